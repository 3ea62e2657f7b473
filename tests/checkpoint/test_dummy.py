"""Random weights that don't depend on the layout, and are random enough."""

import itertools

import pytest
import torch
from torch import Tensor

from dist_infer.checkpoint import dummy
from dist_infer.checkpoint.dummy import DummySource
from dist_infer.checkpoint.loader import load_weights
from dist_infer.errors import CheckpointError
from dist_infer.layers.weights import WeightSlot

EXPECTED_NORM = [1.0159294605255127, 0.9929236769676208, 1.032768964767456]
EXPECTED_MATRIX = [[-1.0974026918411255, -1.1122397184371948], [-0.046357132494449615, -0.7120994925498962]]


def make(
    name: str,
    shape: tuple[int, ...],
    take: tuple[range, ...] | None = None,
    *,
    seed: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A part of a tensor as a rank with only this part makes it."""
    take = take or tuple(range(size) for size in shape)
    into = torch.empty([len(r) for r in take], dtype=dtype)
    slot = WeightSlot(name, shape, take, into)
    load_weights([slot], DummySource([slot], seed))
    return into


@pytest.mark.parametrize("shape", [(7,), (6, 10), (4, 3, 5)], ids=str)
def test_parts_are_those_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = make("w.weight", shape)
    halves = [(range(size // 3), range(size // 3, size)) for size in shape]
    for take in itertools.product(*halves):
        assert torch.equal(make("w.weight", shape, take), whole[tuple(slice(r.start, r.stop) for r in take)])


def test_pieces_of_work_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make("w.weight", (37, 53))
    for chunk in (1, 10, 100):
        monkeypatch.setattr(dummy, "_CPU_CHUNK", chunk)
        assert torch.equal(make("w.weight", (37, 53)), whole)


def test_values_are_the_same_for_ever() -> None:
    """A hash has no oracle but itself: these are its first values, so that a seed keeps its model over releases."""
    assert make("model.norm.weight", (3,)).tolist() == EXPECTED_NORM
    assert make("w.weight", (2, 2)).tolist() == EXPECTED_MATRIX


def test_seed_and_name_and_size_matter() -> None:
    reference = make("a.weight", (8, 8))
    assert not torch.equal(reference, make("b.weight", (8, 8)))
    assert not torch.equal(reference, make("a.weight", (8, 8), seed=4))
    assert torch.equal(reference, make("a.weight", (8, 8)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_casts_of_float32(dtype: torch.dtype) -> None:
    assert torch.equal(make("w.weight", (9, 9), dtype=dtype), make("w.weight", (9, 9)).to(dtype))


def test_nothing_is_announced_as_rounded(caplog: pytest.LogCaptureFixture) -> None:
    make("w.weight", (9, 9), dtype=torch.bfloat16)
    assert caplog.records == []


def test_moments_and_spread() -> None:
    matrix = make("w.weight", (512, 2048)) * 2048**0.5
    assert abs(float(matrix.mean())) < 0.005 and abs(float(matrix.std()) - 1) < 0.005
    assert float(matrix.abs().max()) <= 3**0.5
    counts = torch.histc(matrix, 64)
    assert float((counts - counts.mean()).abs().max()) < 6 * float(counts.mean()) ** 0.5
    norm = make("model.norm.weight", (4096,))
    assert 0.9 <= float(norm.min()) < 0.91 and 1.09 < float(norm.max()) <= 1.1
    bias = make("q_proj.bias", (4096,))
    assert abs(float(bias.mean())) < 0.01 and abs(float(bias.std()) - 0.1) < 0.01


def test_rows_and_columns_are_no_copies_of_each_other() -> None:
    """Of 1024 vectors of length 1024 the largest correlation by chance is about 5 deviations of 1 / 32."""
    matrix = make("w.weight", (1024, 1024)) * 1024**0.5
    for rows in (matrix, matrix.T, torch.cat([matrix[:512], make("v.weight", (512, 1024)) * 1024**0.5])):
        products = (rows @ rows.T / 1024).fill_diagonal_(0)
        assert float(products.abs().max()) < 7 / 32
    experts = make("experts.weight", (8, 16, 64)).reshape(128, 64)
    assert len({tuple(row) for row in experts.tolist()}) == 128
    shared = set(matrix[0].tolist()) & set(matrix[1].tolist())
    assert len(shared) < 10  # 24-bit values collide by chance, permuted rows would share all


def test_activations_keep_their_size() -> None:
    x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(1))
    for i in range(8):
        x = x @ make(f"{i}.weight", (1024, 1024)).T
    assert 0.5 < float(x.std()) < 2


def test_empty_part_and_scalar() -> None:
    assert make("w.weight", (4, 4), (range(2, 2), range(4))).shape == (0, 4)
    assert make("scale", ()).shape == ()


def test_tensor_that_can_not_be_random() -> None:
    with pytest.raises(CheckpointError, match="dummy weights of seed 3: tensor 'ids' of torch.int64"):
        make("ids", (4,), dtype=torch.int64)


@pytest.mark.gpu
def test_device_gives_the_same_bits() -> None:
    slot = WeightSlot("w.weight", (300, 700), (range(300), range(700)), torch.empty(300, 700, device="cuda"))
    load_weights([slot], DummySource([slot], 3))
    assert torch.equal(slot.into.cpu(), make("w.weight", (300, 700)))
