"""The experts that a rank holds."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.moe_experts import LIBRARIES, MoeExpertsFunction, moe_experts
from tests.dense_experts import DenseExperts
from tests.devices import DEVICES
from tests.yardstick import check_error

WIDTH = 12


def random_rows(num_rows: int, num_experts: int, top_k: int, *, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids with some -1 and an expert that nobody chooses, weights; in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, WIDTH, generator=generator, dtype=torch.float64)
    ids = torch.rand(num_rows, num_experts + top_k, generator=generator).argsort(1)[:, :top_k]
    ids[(ids >= num_experts) | (ids == 1)] = -1
    return x, ids, torch.rand(num_rows, top_k, generator=generator, dtype=torch.float64)


def in_its_dtype(x: Tensor, ids: Tensor, weights: Tensor, dense: DenseExperts) -> Tensor:
    """Plain torch that rounds what the contract rounds."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = torch.zeros(x.shape, dtype=wide)
    for row, row_ids in enumerate(ids.tolist()):
        for k, expert in enumerate(row_ids):
            if expert >= 0:
                gate, up = functional.linear(x[row], dense.gate_up[expert].to(x.dtype)).chunk(2)
                output = functional.linear(functional.silu(gate) * up, dense.down[expert].to(x.dtype))
                out[row] += weights[row, k].to(wide) * output.to(wide)
    return out.to(x.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize(
    ("dtype", "num_rows", "num_experts", "inner", "top_k", "id_dtype"),
    [
        (torch.float64, 63, 5, 7, 3, torch.int32),
        (torch.float64, 1, 1, 1, 1, torch.int64),
        (torch.float64, 0, 3, 4, 2, torch.int64),
        (torch.float32, 129, 8, 16, 2, torch.int64),
        (torch.bfloat16, 129, 4, 33, 4, torch.int32),
        (torch.float16, 63, 3, 8, 2, torch.int32),
        (torch.float32, 5, 0, 4, 2, torch.int32),
        (torch.float32, 5, 3, 0, 2, torch.int32),
    ],
)
def test_against_the_formula(
    device: str,
    library: Library[MoeExpertsFunction],
    dtype: torch.dtype,
    num_rows: int,
    num_experts: int,
    inner: int,
    top_k: int,
    id_dtype: torch.dtype,
) -> None:
    dense = DenseExperts.random(num_experts, inner, WIDTH)
    rounded = DenseExperts(dense.gate_up.to(dtype).double(), dense.down.to(dtype).double())
    x, ids, weights = random_rows(num_rows, num_experts, top_k)
    x, weights = x.to(dtype), weights.to(torch.float64 if dtype == torch.float64 else torch.float32)
    before = [part.clone() for part in (x, ids, weights)]
    out = moe_experts(
        x.to(device),
        ids.to(device, id_dtype),
        weights.to(device),
        dense.gate_up.to(device, dtype),
        dense.down.to(device, dtype),
        library=library,
    ).cpu()
    assert out.is_contiguous()
    check_error(out, rounded(x, ids, weights), in_its_dtype(x, ids, weights, dense))
    assert all(torch.equal(part, kept) for part, kept in zip((x, ids, weights), before, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_what_is_not_routed_here_shows_nowhere(device: str, library: Library[MoeExpertsFunction]) -> None:
    dense = DenseExperts.random(4, 5, WIDTH)
    x, ids, weights = (part.to(device) for part in random_rows(20, 4, 3))
    gate_up, down = dense.gate_up.to(device), dense.down.to(device)
    ids[3] = -1
    clean = moe_experts(x, ids, weights, gate_up, down, library=library)
    assert clean[3].tolist() == [0.0] * WIDTH
    weights[ids < 0] = math.nan
    x[3] = math.nan
    gate_up[1] = math.nan  # nobody chooses it
    assert torch.equal(moe_experts(x, ids, weights, gate_up, down, library=library), clean)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_terms_are_added_in_the_order_of_the_slots(device: str, library: Library[MoeExpertsFunction]) -> None:
    """Experts that give 2^30, 1, -2^30, 1: what is lost in float32 tells the order of the sum."""
    outputs = torch.tensor([2.0**30, 1.0, -(2.0**30), 1.0], device=device)
    gate_up = torch.tensor([32.0, 1.0], device=device).view(1, 2, 1).expand(4, 2, 1).contiguous()  # silu(32) is 32
    down = (outputs / 32).view(4, 1, 1)
    ids = torch.tensor([[0, 1, 2, 3], [0, 2, 1, 3], [1, 3, 0, 2], [2, 0, 3, 1]], device=device)
    x, weights = torch.ones(4, 1, device=device), torch.ones(4, 4, device=device)
    assert moe_experts(x, ids, weights, gate_up, down, library=library).tolist() == [[1.0], [2.0], [0.0], [2.0]]


def test_all_rows_to_one_expert_and_none_to_the_others() -> None:
    dense = DenseExperts.random(3, 5, WIDTH)
    x, _, weights = random_rows(40, 3, 1)
    ids = torch.full((40, 1), 2)
    out = moe_experts(x, ids, weights, dense.gate_up, dense.down, library=LIBRARIES[-1])
    torch.testing.assert_close(out, dense(x, ids, weights), rtol=1e-12, atol=1e-12)


def test_bad_calls_are_refused() -> None:
    dense = DenseExperts.random(3, 5, WIDTH)
    x, ids, weights = random_rows(4, 3, 2)

    def call(
        x: Tensor = x,
        ids: Tensor = ids,
        weights: Tensor = weights,
        gate_up: Tensor = dense.gate_up,
        down: Tensor = dense.down,
    ) -> Tensor:
        return moe_experts(x, ids, weights, gate_up, down, library=LIBRARIES[-1])

    assert call().shape == (4, WIDTH)
    with pytest.raises(ValueError, match=r"x \[3, 12\], ids \[4, 2\]"):
        call(x=x[:3])
    with pytest.raises(ValueError, match=r"weights \[4, 1\] are not"):
        call(weights=weights[:, :1])
    with pytest.raises(ValueError, match=r"weights \[3, 8, 12\] and \[3, 12, 5\] are not \[E, 2 I, 12\]"):
        call(gate_up=dense.gate_up[:, 2:])
    with pytest.raises(ValueError, match="meets weights torch.float32 and torch.float64"):
        call(gate_up=dense.gate_up.float())
    with pytest.raises(ValueError, match="ids torch.int16"):
        call(ids=ids.short())
    with pytest.raises(ValueError, match="weights torch.float16"):
        call(weights=weights.half())
    with pytest.raises(ValueError, match="id 7 is not one of the 3 experts held"):
        call(ids=torch.full((4, 2), 7))
    with pytest.raises(ValueError, match="id -2 is not one of the 3 experts held"):
        call(ids=torch.full((4, 2), -2))
