"""Inputs that stay in place: what a step sees, and that rows behind it are inert."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dist_infer.decode_inputs import DecodeInputs
from dist_infer.layers.step_inputs import StepInputs
from dist_infer.row_options import HostOptions
from dist_infer.types import Batch, BatchKind
from tests.batches import Part, make_batch
from tests.devices import DEVICES

M, BLOCK_SIZE = 4, 8


def make_inputs(device: str = "cpu") -> DecodeInputs:
    return DecodeInputs(max_num_seqs=M, max_pages=5, block_size=BLOCK_SIZE, device=torch.device(device))


def decode(*parts: tuple[int, int, list[int], int]) -> Batch:
    """Sequences of (token, position, pages, state row)."""
    return make_batch(
        [Part(token_ids=[token], start=start, pages=pages, state_row=row) for token, start, pages, row in parts],
        block_size=BLOCK_SIZE,
    )


def options(temperature: list[float]) -> HostOptions:
    size = len(temperature)
    return HostOptions(
        temperature=np.array(temperature),
        keys=np.arange(size, dtype=np.int64) + 100,
        top_k=np.arange(size, dtype=np.int64),
        top_p=np.full(size, 0.5),
        min_p=np.full(size, 0.25),
        is_filtered=True,
    )


def fill(inputs: DecodeInputs, batch: Batch) -> None:
    inputs.fill(batch, batch.state_rows.astype(np.int64), options([0.5] * batch.num_seqs))


def rows_of(inputs: StepInputs) -> list[tuple[int, ...]]:
    """(token, position, slot, length, state row) of each row."""
    columns = (inputs.token_ids, inputs.positions, inputs.slots, inputs.paged.kv_lens, inputs.logit_state_rows)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_step_and_inert_ones_behind_them(device: str) -> None:
    inputs = make_inputs(device)
    inputs.last_token_ids.copy_(torch.tensor([50, 51, 52, 53, 54]))
    inert = (0, 0, -1, 0, M)
    assert rows_of(inputs.step_inputs(M)) == [inert] * M
    fill(inputs, decode((7, 3, [2], 1), (-1, 12, [4, 6], 0), (9, 0, [1], 3)))
    own = [(7, 3, 19, 4, 1), (50, 12, 52, 13, 0), (9, 0, 8, 1, 3)]
    assert rows_of(inputs.step_inputs(M)) == [*own, inert]
    assert rows_of(inputs.step_inputs(3)) == own
    fill(inputs, decode((-1, 5, [3], 2)))
    assert rows_of(inputs.step_inputs(M)) == [(52, 5, 29, 6, 2), inert, inert, inert]


def test_pages_and_counts() -> None:
    inputs = make_inputs()
    fill(inputs, decode((7, 3, [2], 1), (8, 12, [4, 3], 0)))
    step = inputs.step_inputs(M)
    assert step.paged.page_table.shape == (M, 5)
    assert step.paged.page_table[0, :1].tolist() + step.paged.page_table[1, :2].tolist() == [2, 4, 3]
    assert step.num_real is not None and step.num_real.tolist() == [2]
    assert step.paged.query_start.tolist() == step.paged.host_query_start.tolist() == [0, 1, 2, 3, 4]
    assert step.paged.host_kv_lens.tolist() == [5 * BLOCK_SIZE] * M, "bounds, where none are given"
    assert step.logit_rows.tolist() == [0, 1, 2, 3]


def test_options_travel_with_the_rows() -> None:
    inputs = make_inputs()
    batch = decode((7, 3, [2], 1), (8, 12, [4, 3], 0))
    inputs.fill(batch, np.array([1, 0]), options([0.5, 0.0]))
    found = inputs.row_options(3)
    assert found.temperature.tolist() == [0.5, 0.0, 0.0]
    assert found.keys.tolist() == [100, 101, 0]
    assert (found.top_k.tolist(), found.top_p.tolist(), found.min_p.tolist()) == (
        [0, 1, 0],
        [0.5, 0.5, 1],
        [0.25] * 2 + [0],
    )


def test_views_stay_where_they_are() -> None:
    """A graph captures addresses: what was made before a fill shows what it fills in."""
    inputs = make_inputs()
    before, found = inputs.step_inputs(2), inputs.row_options(2)
    fill(inputs, decode((7, 3, [2], 1)))
    assert before.slots.tolist() == [19, -1]
    assert before.paged.kv_lens.tolist() == [4, 0]
    assert found.temperature.tolist() == [0.5, 0.0]


def test_a_dummy_is_nobodys() -> None:
    inputs = make_inputs()
    dummy = Batch.dummy()
    assert inputs.takes(dummy)
    inputs.fill(dummy, np.array([M]), options([0.0]))
    step = inputs.step_inputs(2)
    assert rows_of(step) == [(0, 0, -1, 0, M)] * 2
    assert step.num_real is not None and step.num_real.tolist() == [0]


def test_only_decode_steps_are_taken() -> None:
    inputs = make_inputs()
    batch = decode((7, 3, [2], 1))
    assert inputs.takes(batch)
    assert not inputs.takes(replace(batch, kind=BatchKind.EXTEND))
    assert not inputs.takes(replace(batch, kind=BatchKind.PREFILL))
    assert not inputs.takes(make_batch([Part(token_ids=[1, 2], start=3, pages=[0])], block_size=BLOCK_SIZE))


def test_more_pages_than_planned_are_refused() -> None:
    with pytest.raises(ValueError, match="6 pages, but only 5"):
        fill(make_inputs(), decode((7, 3, [0, 1, 2, 3, 4, 5], 1)))
