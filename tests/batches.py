"""Batches by hand, for tests below the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dist_infer.types import Batch, BatchKind


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one sequence computes in a step: `token_ids` at positions start, start + 1, ... in its `pages`."""

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    state_row: int = -1
    wants_logits: bool = True
    request_id: int = 0


def make_batch(parts: Sequence[Part], *, block_size: int) -> Batch:
    """The parts one after another. Sampling fields are greedy."""
    lens = [len(part.token_ids) for part in parts]
    positions = [np.arange(part.start, part.start + n, dtype=np.int64) for part, n in zip(parts, lens, strict=True)]
    slots = [
        np.asarray(part.pages, np.int64)[own // block_size] * block_size + own % block_size
        for part, own in zip(parts, positions, strict=True)
    ]
    page_table = np.full((len(parts), max((len(part.pages) for part in parts), default=0)), -1, np.int32)
    for row, part in zip(page_table, parts, strict=True):
        row[: len(part.pages)] = part.pages
    query_start = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    logit_seqs = np.flatnonzero([part.wants_logits for part in parts]).astype(np.int32)
    num_logits = len(logit_seqs)
    return Batch(
        kind=_kind(parts),
        request_ids=np.array([part.request_id for part in parts], np.int64),
        token_ids=np.concatenate([np.asarray(part.token_ids, np.int64) for part in parts]),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        query_start=query_start,
        kv_lens=np.array([part.start + n for part, n in zip(parts, lens, strict=True)], np.int32),
        pages=page_table,
        state_rows=np.array([part.state_row for part in parts], np.int32),
        logit_rows=query_start[1:][logit_seqs].astype(np.int64) - 1,
        logit_seqs=logit_seqs,
        temperature=np.zeros(num_logits),
        top_k=np.zeros(num_logits, np.int32),
        top_p=np.ones(num_logits),
        seeds=np.zeros(num_logits, np.int64),
        draw_positions=np.array([parts[seq].start + lens[seq] for seq in logit_seqs.tolist()], np.int64),
    )


def _kind(parts: Sequence[Part]) -> BatchKind:
    if any(part.start == 0 for part in parts):
        return BatchKind.PREFILL
    return BatchKind.DECODE if all(len(part.token_ids) == 1 for part in parts) else BatchKind.EXTEND
