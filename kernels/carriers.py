"""Structures that ops take as one argument."""

from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingMethod:
    """How a router's logits become experts and weights (kernels/moe_route.py).

    With `num_groups` > 1 the experts form equal contiguous groups, and only those of the `num_kept_groups` best ones
    can be chosen; `group_score` tells how good a group is: its best expert, or the sum of its two best.

    `uniform` is for benchmarks of models with dummy weights, whose routers send all tokens to few experts: the choice
    is by noise that depends on row and expert alone, so that experts are chosen evenly; weights are the scores still.
    """

    scoring: Literal["softmax", "sigmoid"]
    top_k: int
    renormalise: bool = False  # the weights of a token are divided by (their sum + renorm_epsilon)
    renorm_epsilon: float = 0.0
    scaling_factor: float = 1.0
    num_groups: int = 1
    num_kept_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    uniform: bool = False

    def check(self, num_experts: int) -> None:
        """Errors: ValueError with the numbers that don't fit."""
        if not 0 < self.num_kept_groups <= self.num_groups or num_experts % self.num_groups:
            raise ValueError(
                f"routing keeps {self.num_kept_groups} of {self.num_groups} equal groups of {num_experts} experts"
            )
        num_eligible = num_experts // self.num_groups * self.num_kept_groups
        if not 0 < self.top_k <= num_eligible:
            raise ValueError(f"routing chooses {self.top_k} of {num_eligible} eligible experts")
