"""The sum over the experts of each row: a float64 formula, the same bytes from both libraries, what is left out."""

from dataclasses import replace

import pytest
import torch

from dist_infer.kernels.carriers import ExpertOutputs
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.moe_finalize import LIBRARIES, MoeFinalizeFunction, moe_finalize
from tests.kernels.library_cases import library_cases
from tests.yardstick import check_error, check_rounded_once

NUM_EXPERTS = 5


def outputs_of(num_rows: int, width: int, dtype: torch.dtype, device: str, *, top_k: int = 4) -> ExpertOutputs:
    """Ids from -2 on and above those held; NaN where no expert is."""
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.randint(-2, NUM_EXPERTS + 2, (num_rows, top_k), generator=generator, dtype=torch.int32)
    outputs = torch.randn(num_rows, top_k, width, generator=generator, dtype=torch.float64)
    outputs[(ids < 0) | (ids >= NUM_EXPERTS)] = torch.nan
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return ExpertOutputs(
        outputs=outputs.flatten(0, 1).to(dtype).to(device),
        ids=ids.to(device),
        weights=torch.rand(num_rows, top_k, generator=generator, dtype=torch.float64).to(wide).to(device),
        num_experts=NUM_EXPERTS,
        shared=torch.randn(num_rows, width, generator=generator, dtype=torch.float64).to(dtype).to(device),
    )


@pytest.mark.parametrize(("library", "device", "dtype"), library_cases(LIBRARIES))
@pytest.mark.parametrize(("num_rows", "width"), [(0, 64), (1, 64), (17, 70)])
@pytest.mark.parametrize("has_shared", [False, True])
def test_sums(
    library: Library[MoeFinalizeFunction],
    device: str,
    dtype: torch.dtype,
    num_rows: int,
    width: int,
    has_shared: bool,
) -> None:
    x = outputs_of(num_rows, width, dtype, device)
    if not has_shared:
        x = replace(x, shared=None)
    ours = moe_finalize(x, library=library)
    is_held = (x.ids >= 0) & (x.ids < NUM_EXPERTS)
    outputs = x.outputs.view(num_rows, 4, width).nan_to_num().double()
    truth = (outputs * (x.weights.double() * is_held)[..., None]).sum(1)
    if x.shared is not None:
        truth += x.shared.double()
    assert ours.dtype == dtype
    check_error(ours, truth, truth.to(dtype), factor=4 if dtype == torch.float32 else 2)
    check_rounded_once(ours, truth)
    by_torch = moe_finalize(x, library=LIBRARIES[-1])
    assert torch.equal(ours, by_torch)  # not only close: the same bytes


def test_what_does_not_fit_is_refused() -> None:
    x = outputs_of(3, 8, torch.float32, "cpu")
    assert moe_finalize(x, library=LIBRARIES[-1]).shape == x.shape == (3, 8)
    for wrong in (
        replace(x, outputs=x.outputs[:-1]),
        replace(x, ids=x.ids.long()),
        replace(x, weights=x.weights.double()),
        replace(x, weights=x.weights[:, :2]),
    ):
        with pytest.raises(ValueError, match="outputs, ids, weights don't fit"):
            moe_finalize(wrong, library=LIBRARIES[-1])
    with pytest.raises(ValueError, match="shared torch.float32"):
        moe_finalize(replace(x, shared=torch.ones(3, 9)), library=LIBRARIES[-1])
