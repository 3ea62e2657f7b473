"""The two phases of attention: sequences that compute several tokens (context) and one (generation)."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep

Attend: TypeAlias = Callable[..., Tensor]  # (q, others that the op names) -> out, a row a token
Plan: TypeAlias = Callable[[PagedStep], Attend]


def num_seqs_by_phase(step: PagedStep) -> tuple[int, int]:
    """(context, generation). A sequence without queries is context."""
    generating = int(np.count_nonzero(np.diff(step.host_query_start) == 1))
    return step.num_seqs - generating, generating


def plan_by_phase(step: PagedStep, context: Plan, generation: Plan) -> Attend:
    """A step in which each phase has a plan of its own; a step of both is cut in two.

    Stream: the current one; the host waits for nothing.
    """
    single = np.diff(step.host_query_start) == 1
    if single.all():
        return generation(step)
    if not single.any():
        return context(step)
    parts = []
    for plan, chosen in ((context, ~single), (generation, single)):
        rows, part = take_sequences(step, np.flatnonzero(chosen))
        parts.append((rows, plan(part)))

    def attend(q: Tensor, *others: Tensor | None) -> Tensor:
        (rows, result), *later = ((rows, plan(q.index_select(0, rows), *others)) for rows, plan in parts)
        out = result.new_empty(len(q), *result.shape[1:]).index_copy_(0, rows, result)
        for rows, result in later:
            out.index_copy_(0, rows, result)
        return out

    return attend


def take_sequences(step: PagedStep, seqs: npt.NDArray[np.int64] | Sequence[int]) -> tuple[Tensor, PagedStep]:
    """(token rows, a step of these sequences alone).

    Stream: the current one; the host waits for nothing.
    """
    seqs = np.asarray(seqs, np.int64)
    starts = step.host_query_start
    lens = np.diff(starts)[seqs]
    query_start = np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)
    rows = np.repeat(starts[seqs] - query_start[:-1], lens) + np.arange(query_start[-1])
    on_host = torch.from_numpy(np.concatenate([seqs, rows, query_start]))
    device = step.kv_lens.device
    if device.type == "cuda":
        on_host = on_host.pin_memory()  # torch keeps it until the copy is done
    sizes = [len(seqs), len(rows), len(query_start)]
    ids, row_ids, starts_of = on_host.to(device, non_blocking=True).split_with_sizes(sizes)
    taken = PagedStep(
        query_start=starts_of.int(),
        kv_lens=step.kv_lens.index_select(0, ids),
        page_table=step.page_table.index_select(0, ids),
        block_size=step.block_size,
        host_query_start=query_start.astype(np.int32),
        host_kv_lens=step.host_kv_lens[seqs],
    )
    return row_ids, taken
