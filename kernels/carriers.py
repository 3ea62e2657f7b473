"""Structures that ops take as one argument."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedStep:
    """The sequences of a step, whose keys and values lie in pages of `block_size` flat slots.

    Slot of token i of sequence s = page_table[s, i // block_size] * block_size + i % block_size. The page ids are
    logical: the same id names a page in every layer's cache. Kernels read the device tensors; the host copies are for
    plans that need no device read.

    Shapes: query_start [S + 1] int32, kv_lens [S] int32, page_table [S, P] int32 (-1 beyond a sequence's pages).
    """

    query_start: Tensor
    kv_lens: Tensor
    page_table: Tensor
    block_size: int
    host_query_start: npt.NDArray[np.int32]
    host_kv_lens: npt.NDArray[np.int32]

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.host_kv_lens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.host_query_start[-1])
