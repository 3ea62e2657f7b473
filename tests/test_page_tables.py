"""Pages by their changes: the tables that steps see, and what is sent for them."""

import numpy as np
import pytest
import torch

from dist_infer.config import SchedulerConfig
from dist_infer.decode_inputs import DecodeInputs
from dist_infer.page_tables import PageTables
from dist_infer.scheduler import Scheduler
from dist_infer.types import Admission, Batch, BatchKind, News, PageChanges, Request, SamplingParams
from tests.devices import DEVICES
from tests.page_mirror import PageMirror
from tests.test_decode_inputs import options

CONFIG = SchedulerConfig(
    max_model_len=40, max_num_seqs=4, max_num_tokens=30, block_size=4, num_kv_blocks=13, prefix_cache=True, depth=0
)


def changes(*cells: tuple[int, int, int], num_pages: int = 3) -> PageChanges:
    rows, columns, page_ids = (np.array(values, np.int32) for values in zip(*cells, strict=True))
    return PageChanges(rows=rows, columns=columns, page_ids=page_ids, num_pages=num_pages)


@pytest.mark.parametrize("device", DEVICES)
def test_changes_are_kept(device: str) -> None:
    tables = PageTables(max_num_seqs=3, max_pages=4, device=torch.device(device))
    for new in (changes((0, 0, 7), (0, 1, 8), (2, 0, 9)), changes((2, 1, 5), (0, 0, 6))):
        cells = torch.from_numpy(tables.cells_of(new)).to(device)
        tables.apply(cells, torch.from_numpy(new.page_ids).to(device))
    rows = torch.tensor([2, 0, 3], device=device)
    assert tables.of_rows(rows, 2).tolist() == [[9, 5], [6, 8], [0, 0]]
    into = torch.full((3, 4), -1, dtype=torch.int32, device=device)
    tables.gather(rows, into)
    assert into.tolist() == [[9, 5, 0, 0], [6, 8, 0, 0], [0, 0, 0, 0]]
    assert tables.num_applied == 5
    if device == "cpu":
        shown = tables.on_host(changes((3, 0, 4), (2, 0, 1), num_pages=2), np.array([2, 3, 0]))
        assert shown.tolist() == [[1, 5], [4, 0], [6, 8]] == tables.of_rows(torch.tensor([2, 3, 0]), 2).tolist()


def served(num_requests: int) -> list[Batch]:
    """Batches of requests that come and go, are preempted, and share prefixes."""
    scheduler = Scheduler(CONFIG, 0)
    random = np.random.default_rng(num_requests)
    batches: list[Batch] = []
    for request_id in range(num_requests):
        prompt = tuple([5] * 8 + random.integers(9, size=int(random.integers(1, 12))).tolist())
        sampling = SamplingParams(max_tokens=int(random.integers(1, 20)))
        request = Request(request_id=request_id, prompt_ids=prompt, sampling=sampling)
        scheduler.apply(News(admissions=(Admission(group=0, request=request),)), drain=False)
        while scheduler.live > (6 if request_id + 1 < num_requests else 0):
            batch = scheduler.schedule()
            assert batch is not None
            batches.append(batch)
            scheduler.commit(batch, np.full(len(batch.logit_rows), 3, np.int64))
    assert scheduler.counters.preemptions and scheduler.counters.cached_tokens
    return batches


def test_a_page_is_sent_once() -> None:
    batches = served(30)
    mirror = PageMirror(CONFIG.max_num_seqs, 10)
    num_sent, num_shown = 0, 0
    for batch in batches:
        assert isinstance(batch.pages, PageChanges)
        num_sent += len(batch.pages.rows)
        num_shown += mirror.table_of(batch).size
        used = [-(-int(length) // CONFIG.block_size) for length in batch.kv_lens]
        table = mirror.table_of(batch)
        assert all((row[:count] >= 0).all() for row, count in zip(table, used, strict=True))
    assert num_sent * 4 < num_shown


@pytest.mark.parametrize("device", DEVICES)
def test_decode_inputs_show_the_pages_of_each_step(device: str) -> None:
    """Also where the steps between two decodes went another way, and where nothing has changed since the last one."""
    inputs = DecodeInputs(max_num_seqs=4, max_pages=10, block_size=4, device=torch.device(device))
    mirror = PageMirror(CONFIG.max_num_seqs, 10)
    num_decodes = 0
    for batch in served(40):
        expected = mirror.table_of(batch)
        if batch.kind is not BatchKind.DECODE:
            assert isinstance(batch.pages, PageChanges)
            cells = torch.from_numpy(inputs.page_tables.cells_of(batch.pages)).to(device)
            inputs.page_tables.apply(cells, torch.from_numpy(batch.pages.page_ids).to(device))
            continue
        num_decodes += 1
        inputs.fill(batch, batch.state_rows.astype(np.int64), options([0.0] * batch.num_seqs))
        shown = inputs.step_inputs(batch.num_seqs).paged.page_table.cpu().numpy()
        for row, own, length in zip(shown, expected, batch.kv_lens.tolist(), strict=True):
            assert row[: -(-length // 4)].tolist() == own[: -(-length // 4)].tolist()
    assert num_decodes > 50


def test_rows_are_brought_into_order_only_when_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = DecodeInputs(max_num_seqs=4, max_pages=10, block_size=4, device=torch.device("cpu"))
    gathered: list[list[int]] = []
    monkeypatch.setattr(inputs.page_tables, "gather", lambda rows, into: gathered.append(rows.tolist()))
    batch = next(batch for batch in served(30) if batch.kind is BatchKind.DECODE and batch.num_seqs == 2)
    for new in (changes((0, 0, 1), (1, 0, 2)), changes((3, 0, 9))):
        batch.pages = new
        inputs.fill(batch, np.array([0, 1]), options([0.0] * 2))
    empty = np.zeros(0, np.int32)
    batch.pages = PageChanges(rows=empty, columns=empty, page_ids=empty, num_pages=3)
    inputs.fill(batch, np.array([0, 1]), options([0.0] * 2))
    assert gathered == [[0, 1], [0, 1]]
    inputs.fill(batch, np.array([1, 0]), options([0.0] * 2))
    assert gathered[2:] == [[1, 0]]


def test_more_pages_than_planned_are_refused() -> None:
    tables = PageTables(max_num_seqs=3, max_pages=4, device=torch.device("cpu"))
    batch = served(30)[0]
    batch.pages = changes((0, 4, 1), num_pages=5)
    with pytest.raises(ValueError, match="5 pages, but only 4 are planned for"):
        tables.check(batch)
