"""Attention of many queries: tiles of queries, dealt to programs from the host's lengths, longest first."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep

_MAX_KEYS = 1 << 17  # of several sequences together; one alone may have more


def split_sequences(step: PagedStep) -> list[npt.NDArray[np.int64]]:
    """The sequences of several queries, in parts whose keys take a bounded room together."""
    parts: list[list[int]] = []
    room = 0  # keys that the last part may still take
    for seq in np.flatnonzero(np.diff(step.host_query_start) > 1).tolist():
        kv_len = int(step.host_kv_lens[seq])
        if not parts or kv_len > room:
            parts.append([])
            room = _MAX_KEYS
        parts[-1].append(seq)
        room -= kv_len
    return [np.array(seqs, np.int64) for seqs in parts]


def plan_tiles(step: PagedStep, queries: int, seqs: npt.NDArray[np.int64], key_start: npt.NDArray[np.int64]) -> Tensor:
    """(sequence, first query, first key) of each tile of up to `queries` queries of the sequences `seqs`.

    `key_start` says for every sequence where its keys begin among those of `seqs`. The tiles with the most keys come
    first, so that the last programs to run are short.

    Shapes: key_start [S] -> [tiles, 3] int32 on the step's device.
    Stream: the current one; the host waits for nothing.
    """
    query_lens = np.diff(step.host_query_start)
    counts = -(-query_lens[seqs] // queries)
    seq = np.repeat(seqs, counts)
    first = (np.arange(len(seq)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    num_keys = step.host_kv_lens[seq] - query_lens[seq] + first
    order = np.argsort(-num_keys, kind="stable")
    return to_device(np.stack([seq, first, key_start[seq]], 1)[order], step.kv_lens.device)


def to_device(array: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """As int32.

    Stream: the current one; the host waits for nothing.
    """
    tensor = torch.from_numpy(array.astype(np.int32))
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # torch keeps it until the copy is done
    return tensor.to(device, non_blocking=True)
