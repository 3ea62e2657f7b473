"""Sequences and the arrays of a batch."""

import numpy as np

from dist_infer.config import SchedulerConfig
from dist_infer.pages import chain_hash
from dist_infer.sequences import Plan, Rows, Sequence, ceil_div
from dist_infer.types import Batch, BatchKind, PageChanges, Request, SamplingParams

CONFIG = SchedulerConfig(max_model_len=32, max_num_seqs=3, max_num_tokens=16, block_size=4, num_kv_blocks=9)


def start(rows: Rows, request_id: int, prompt_ids: list[int], blocks: list[int], **sampling: float) -> Sequence:
    params = SamplingParams(max_tokens=8, **sampling)  # type: ignore[arg-type]
    seq = Sequence.arrive(
        Request(request_id=request_id, prompt_ids=tuple(prompt_ids), sampling=params), arrival=request_id
    )
    seq.row = rows.take(seq.request)
    rows.set_pages(seq.row, 0, blocks)
    seq.blocks = blocks
    return seq


def cells_of(batch: Batch) -> list[tuple[int, int, int]]:
    """(state row, column, page) of the pages that are new."""
    changes = batch.pages
    assert isinstance(changes, PageChanges)
    return list(zip(changes.rows.tolist(), changes.columns.tolist(), changes.page_ids.tolist(), strict=True))


def test_a_mixed_batch() -> None:
    rows = Rows(CONFIG)
    decode = start(rows, 7, [1, 2, 3, 4, 5], [8, 2], temperature=0.5, top_k=2**40, top_p=0.25, seed=-9)
    decode.num_scheduled, decode.num_unknown = 5, 1
    chunk = start(rows, 8, list(range(10, 20)), [0, 1, 3])
    chunk.num_scheduled = 3
    fresh = start(rows, 9, [6, 6], [5])
    plan = Plan(budget=16)
    plan.add_decode(decode)
    plan.add(chunk, 6)
    plan.add(fresh, 2)
    batch = rows.fill(plan)
    assert plan.budget == 7 and batch.kind is BatchKind.PREFILL
    assert batch.request_ids.tolist() == [7, 8, 9] and batch.state_rows.tolist() == [0, 1, 2]
    assert batch.token_ids.tolist() == [-1, 13, 14, 15, 16, 17, 18, 6, 6]
    assert batch.positions.tolist() == [5, 3, 4, 5, 6, 7, 8, 0, 1]
    assert batch.slots.tolist() == [9, 3, 4, 5, 6, 7, 12, 20, 21]
    assert batch.query_start.tolist() == [0, 1, 7, 9] and batch.kv_lens.tolist() == [6, 9, 2]
    pages = batch.pages
    assert isinstance(pages, PageChanges) and pages.num_pages == 3
    assert cells_of(batch) == [(0, 0, 8), (0, 1, 2), (1, 0, 0), (1, 1, 1), (1, 2, 3), (2, 0, 5)]
    assert batch.logit_rows.tolist() == [0, 8] and batch.logit_seqs.tolist() == [0, 2]
    assert batch.temperature.tolist() == [0.5, 1.0] and batch.top_p.tolist() == [0.25, 1.0]
    assert batch.top_k.tolist() == [2**31 - 1, 0] and batch.seeds.tolist() == [-9, 0]
    assert batch.draw_positions.tolist() == [6, 2]
    dtypes = {name: getattr(batch, name).dtype for name in ("token_ids", "positions", "slots", "logit_rows", "seeds")}
    assert set(dtypes.values()) == {np.dtype(np.int64)}
    narrow = (batch.query_start, batch.kv_lens, pages.page_ids, batch.state_rows, batch.logit_seqs, batch.top_k)
    assert {array.dtype for array in narrow} == {np.dtype(np.int32)}


def test_a_batch_does_not_change_with_what_comes_later() -> None:
    rows = Rows(CONFIG)
    seq = start(rows, 0, [1, 2, 3], [4])
    plan = Plan(budget=16)
    plan.add(seq, 3)
    batch = rows.fill(plan)
    seq.tokens[:3] = 0
    rows.set_pages(seq.row, 0, [7])
    assert batch.token_ids.tolist() == [1, 2, 3] and cells_of(batch) == [(0, 0, 4)]
    plan = Plan(budget=16)
    plan.add(seq, 3)
    assert cells_of(rows.fill(plan)) == [(0, 0, 7)], "only what is new"


def test_the_smallest_row_is_taken_and_comes_back_clean() -> None:
    rows = Rows(CONFIG)
    seqs = [start(rows, idx, [1], [idx]) for idx in range(3)]
    assert [seq.row for seq in seqs] == [0, 1, 2] and rows.num_free == 0
    for row in (2, 0):
        rows.give_back(row, 1)
    seq = start(rows, 5, [1] * 5, [6, 7])
    assert seq.row == 0 and rows.num_free == 1
    rows.give_back(0, 2)
    plan = Plan(budget=1)
    plan.add(start(rows, 6, [1, 1], [8]), 1)
    assert cells_of(rows.fill(plan)) == [(1, 0, 1), (0, 0, 8)], "nothing of rows that were given back"


def test_kinds() -> None:
    rows = Rows(CONFIG)

    def kind(num_scheduled: int, num_tokens: int, *, num_output: int) -> BatchKind:
        seq = Sequence.arrive(
            Request(request_id=0, prompt_ids=(1,) * 6, sampling=SamplingParams(max_tokens=9)), arrival=0
        )
        seq.row, seq.num_scheduled, seq.num_known = rows.take(seq.request), num_scheduled, 6 + num_output
        rows.set_pages(seq.row, 0, [0, 1, 2, 3])
        plan = Plan(budget=16)
        plan.add(seq, num_tokens)
        found = rows.fill(plan).kind
        rows.give_back(seq.row, 4)
        return found

    assert kind(0, 6, num_output=0) is kind(0, 1, num_output=0) is BatchKind.PREFILL
    assert kind(4, 2, num_output=0) is kind(5, 1, num_output=0) is BatchKind.EXTEND
    assert kind(6, 1, num_output=1) is kind(8, 1, num_output=3) is BatchKind.DECODE
    assert kind(6, 1, num_output=3) is kind(6, 3, num_output=3) is BatchKind.EXTEND  # computed again after preemption


def test_hashes_are_chained_over_known_tokens() -> None:
    seq = Sequence.arrive(Request(request_id=0, prompt_ids=tuple(range(9))), arrival=0)
    second = seq.block_hash(1, 4)
    assert seq.hashes == [chain_hash(b"", np.arange(4)), second]
    assert second == chain_hash(seq.hashes[0], np.arange(4, 8)) and seq.block_hash(0, 4) == seq.hashes[0]


def test_ceil_div() -> None:
    assert [ceil_div(value, 4) for value in (0, 1, 4, 5)] == [0, 1, 1, 2]
