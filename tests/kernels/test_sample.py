"""The choice of a token, and the noise for it."""

import math

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.reference.sample import draw, gumbel_noise
from dist_infer.kernels.sample import (
    LIBRARIES,
    ROW_KEYS_LIBRARIES,
    RowKeysFunction,
    SampleFunction,
    row_keys,
    sample,
)
from dist_infer.kernels.triton.sample import _best_of_parts
from tests.devices import DEVICES
from tests.kernels.aot import compile_ahead
from tests.kernels.library_cases import library_cases, library_devices

REFERENCE = LIBRARIES[-1]
EVERY_LIBRARY = pytest.mark.parametrize(("library", "device"), library_devices(LIBRARIES))
EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES)


def noisy(library: Library[SampleFunction], logits: Tensor, seed: int, first_id: int = 0) -> tuple[Tensor, Tensor]:
    """A row each position from 0 on, at temperature 0.7."""
    rows = torch.arange(len(logits), device=logits.device)
    ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    temperature = torch.full((len(rows),), 0.7, dtype=torch.float64, device=logits.device)
    return sample(logits, ids, temperature, row_keys(torch.full_like(rows, seed), rows), library=library)


@EVERY_DEVICE
def test_draws_are_the_published_splitmix64_numbers(device: str) -> None:
    drawn = draw(torch.tensor([1234567], device=device), torch.arange(5, device=device))
    assert [number % 2**64 for number in drawn.tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@EVERY_DEVICE
def test_noise_is_gumbel_noise(device: str) -> None:
    keys = row_keys(torch.full((100,), -5), torch.arange(100)).to(device)
    noise = gumbel_noise(keys, torch.arange(1000, device=device)).cpu().flatten()
    assert bool(noise.isfinite().all()) and len(set(noise.tolist())) == len(noise)
    assert abs(noise.mean().item() - 0.5772156649) < 0.02 and abs(noise.var().item() - math.pi**2 / 6) < 0.03
    levels = torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99], dtype=torch.float64)
    below = torch.tensor([(noise < -math.log(-math.log(level))).double().mean().item() for level in levels.tolist()])
    assert bool(((below - levels).abs() < 5 * (levels * (1 - levels) / len(noise)).sqrt()).all())


def test_the_extreme_draws_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([[0, -1]])  # all bits clear, all bits set
    monkeypatch.setattr("dist_infer.kernels.reference.sample.draw", lambda keys, numbers: extremes)
    assert gumbel_noise(torch.zeros(1, dtype=torch.int64), torch.arange(2)).tolist()[0] == pytest.approx(
        [-3.60, 36.7], abs=0.1
    )


@pytest.mark.parametrize(("library", "device"), library_devices(ROW_KEYS_LIBRARIES))
def test_keys_differ_by_seed_and_position(library: Library[RowKeysFunction], device: str) -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)]).repeat_interleave(1000)
    positions = torch.arange(1000).repeat(5)
    keys = row_keys(seeds.to(device), positions.to(device), library=library)
    assert len(set(keys.tolist())) == 5000
    assert torch.equal(keys.cpu(), row_keys(seeds, positions))
    assert row_keys(seeds[:0].to(device), positions[:0].to(device), library=library).shape == (0,)


@pytest.mark.parametrize(("library", "device", "dtype"), library_cases(LIBRARIES))
@pytest.mark.parametrize(("num_rows", "num_columns"), [(0, 5), (1, 1), (7, 129), (13, 63)])
def test_shards_agree_with_the_whole(
    device: str, library: Library[SampleFunction], dtype: torch.dtype, num_rows: int, num_columns: int
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, num_columns, generator=generator).to(dtype).to(device)
    score, best = noisy(library, logits, seed=3)
    if num_rows:
        expected = noisy(REFERENCE, logits, seed=3)
        assert torch.equal(best, expected[1])
        torch.testing.assert_close(score, expected[0], rtol=1e-13, atol=1e-13)
    assert score.dtype == torch.float64 and best.dtype == torch.int64
    cut = num_columns // 3
    parts = [noisy(library, logits[:, :cut], 3)] if cut else []
    parts.append(noisy(library, logits[:, cut:], 3, first_id=cut))
    scores, ids = (torch.stack(pair) for pair in zip(*parts, strict=True))
    assert torch.equal(scores.amax(0), score)
    assert torch.equal(ids.gather(0, scores.argmax(0, keepdim=True))[0], best)


@EVERY_LIBRARY
def test_many_rows_draw_the_noise_of_one(
    device: str, library: Library[SampleFunction], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More elements than the noise of one go is drawn for, and than a part of a row has."""
    monkeypatch.setattr("dist_infer.kernels.reference.sample._NOISY_ELEMENTS", 2**13)
    logits = torch.zeros(10, 2**12, device=device)
    _, best = noisy(library, logits, seed=1)
    for row in (0, 1, 2, 9):
        keys = row_keys(torch.tensor([1], device=device), torch.tensor([row], device=device))
        one = torch.ones(1, dtype=torch.float64, device=device)
        assert sample(logits[:1], 0, one, keys, library=library)[1] == best[row]
    assert len(set(best.tolist())) == 10


@EVERY_LIBRARY
@pytest.mark.parametrize("shared_ids", [True, False])
def test_ties_and_not_a_number(device: str, library: Library[SampleFunction], shared_ids: bool) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [[1.0, 3, 3, 2], [nan, -inf, -5, -inf], [nan, nan, -inf, nan], [inf, 1, inf, nan], [-inf] * 4], device=device
    )
    ids = torch.tensor([4, 5, 6, 7], device=device)
    scores, best = sample(logits, ids if shared_ids else ids.repeat(5, 1), library=library)
    assert best.tolist() == [5, 6, 4, 4, 4] and scores.tolist() == [3, -5, -inf, inf, -inf]


@EVERY_LIBRARY
def test_own_ids_need_no_order(device: str, library: Library[SampleFunction]) -> None:
    ids = torch.tensor([[9, 3, 4], [1, 9, 2]], device=device)
    assert sample(torch.zeros(2, 3, device=device), ids, library=library)[1].tolist() == [3, 1]


@EVERY_LIBRARY
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-12, 1e-5])
def test_a_tiny_temperature_is_greedy(device: str, library: Library[SampleFunction], temperature: float) -> None:
    logits = torch.tensor([[-1e4, 3.0, 2.99, -math.inf]], device=device)
    ids, keys = torch.arange(4, device=device), torch.tensor([7], device=device)
    heat = torch.tensor([temperature], dtype=torch.float64, device=device)
    score, best = sample(logits, ids, heat, keys, library=library)
    assert best.tolist() == [1] and score.item() == pytest.approx(3, abs=1e-3)


@EVERY_LIBRARY
def test_columns_and_rows_may_lie_anywhere(device: str, library: Library[SampleFunction]) -> None:
    """A part of wider rows, and candidates of shards side by side, which are a transposed float64 table."""
    table = torch.randn(7, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    expected = [row.index(max(row)) for row in table[:, 3:].tolist()]
    assert sample(table[:, 3:], 10, library=library)[1].tolist() == [10 + column for column in expected]
    ids = torch.arange(350, device=device).view(7, 50)
    best = sample(table.t(), ids.t(), library=library)[1].tolist()
    assert best == [50 * column.index(max(column)) + row for row, column in enumerate(table.t().tolist())]


def test_ahead_of_time_loads_are_wide() -> None:
    types = {"logits": "*bf16", "temperature": "*fp64", "keys": "*i64", "scores": "*fp64", "best_ids": "*i64"}
    types |= {"num_columns": "i32:16", "part_len": "i32:16", "row_stride": "i32:16", "first_id": "i32"}
    constexprs = {
        "ids": None,
        "cut_values": None,
        "last_ties": None,
        "column_stride": 1,
        "ids_stride": 0,
        "BLOCK": 1024,
    }
    made = compile_ahead(_best_of_parts, types, constexprs, num_warps=4)
    assert "ld.global.v4.b32" in made.asm["ptx"] and made.spilled_bytes == 0


@pytest.mark.parametrize(
    ("ids", "temperature", "keys"),
    [
        (torch.arange(2), None, None),
        (torch.arange(3, dtype=torch.int32), None, None),
        (torch.arange(3), torch.ones(2, dtype=torch.float64), None),
        (torch.arange(3), None, torch.zeros(2, dtype=torch.int64)),
        (torch.arange(3), torch.ones(2), torch.zeros(2, dtype=torch.int64)),
        (torch.arange(3), torch.ones(1, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_what_does_not_fit_is_refused(ids: Tensor, temperature: Tensor | None, keys: Tensor | None) -> None:
    with pytest.raises(ValueError, match="sample: "):
        sample(torch.zeros(2, 3), ids, temperature, keys, library=REFERENCE)


def test_no_column_is_refused() -> None:
    with pytest.raises(ValueError, match="have no column"):
        sample(torch.zeros(2, 0), torch.arange(0), library=REFERENCE)
