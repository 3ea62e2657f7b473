"""Attention of many queries: tiles of queries, dealt to programs from the host's lengths, longest first."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep


def plan_tiles(step: PagedStep, queries: int, seqs: npt.NDArray[np.int64]) -> Tensor:
    """(sequence, first query) of each tile of up to `queries` queries of the sequences `seqs`.

    The tiles with the most keys come first, so that the last programs to run are short.

    Shapes: -> [tiles, 2] int32 on the step's device.
    Stream: the current one; the host waits for nothing.
    """
    query_lens = np.diff(step.host_query_start)
    counts = -(-query_lens[seqs] // queries)
    seq = np.repeat(seqs, counts)
    first = (np.arange(len(seq)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    num_keys = step.host_kv_lens[seq] - query_lens[seq] + first
    order = np.argsort(-num_keys, kind="stable")
    tiles = torch.from_numpy(np.stack([seq, first], 1)[order].astype(np.int32))
    device = step.kv_lens.device
    if device.type == "cuda":
        tiles = tiles.pin_memory()  # torch keeps it until the copy is done
    return tiles.to(device, non_blocking=True)
