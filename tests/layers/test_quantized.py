"""Linear layers that quantise their weights after the load: near the plain ones, in every format."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives, SingleCollectives
from dist_infer.comm.mesh import split_range
from dist_infer.kernels.prepared_weight import PreparedWeight
from dist_infer.kernels.quantize import dequantize
from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.layers.linear import ColumnParallelLinear, OutputRows, RowParallelLinear
from dist_infer.layers.mlp import GatedMlp
from dist_infer.layers.quantized import misfit
from dist_infer.layers.setup import LayerSetup
from tests.fake_collectives import run_group
from tests.layers.setups import fill, random

# The largest relative error of a product of 256 terms: a value has 4, or 2, digits, and errors add up as a root.
TOLERANCE = {
    WeightFormat.FP8: 0.06,
    WeightFormat.FP8_BLOCK: 0.06,
    WeightFormat.MXFP8: 0.05,
    WeightFormat.NVFP4: 0.15,
}
EVERY_FORMAT = pytest.mark.parametrize("weight_format", list(WeightFormat), ids=lambda chosen: chosen.value)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def setup_of(
    tp: Collectives, weight_format: WeightFormat | None, dtype: torch.dtype, notes: list[str] | None = None
) -> LayerSetup:
    tell: Callable[[str], None] = (lambda _: None) if notes is None else notes.append
    return LayerSetup(
        tp=tp,
        dtype=dtype,
        device=torch.device("cpu"),
        kernel_orders={"linear": "torch"},
        weight_format=weight_format,
        on_choice=tell,
    )


def relative_error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth).norm() / truth.norm())


@EVERY_FORMAT
@DTYPES
def test_a_quantised_layer_is_near_the_plain_one_and_smaller(weight_format: WeightFormat, dtype: torch.dtype) -> None:
    tensors = {"m.a.weight": random(96, 256, seed=1), "m.b.weight": random(64, 256, seed=2)}
    tensors |= {"m.a.bias": random(96, seed=3), "m.b.bias": random(64, seed=4)}
    setup = setup_of(SingleCollectives(), weight_format, dtype)
    layer = ColumnParallelLinear(
        256, [OutputRows("a", 96, range(96)), OutputRows("b", 64, range(64))], bias=True, setup=setup
    )
    fill(layer.weight_slots("m."), tensors)
    x = random(5, 256, seed=5).to(dtype)
    plain_bytes = 160 * 256 * dtype.itemsize
    assert sum(slot.into.nbytes for slot in layer.weight_slots("m.") if slot.into.dim() == 2) == plain_bytes
    freed = [quantize() for quantize in setup.on_loaded]
    assert len(freed) == 1 and 0.4 * plain_bytes < freed[0] < 0.95 * plain_bytes
    truth = x.double() @ torch.cat([tensors["m.a.weight"], tensors["m.b.weight"]]).T
    truth += torch.cat([tensors["m.a.bias"], tensors["m.b.bias"]])
    out = layer(x)
    assert out.dtype == dtype and layer.weight is None
    assert 1e-4 < relative_error(out, truth) < TOLERANCE[weight_format]


@EVERY_FORMAT
def test_a_token_has_the_same_output_in_any_company(weight_format: WeightFormat) -> None:
    setup = setup_of(SingleCollectives(), weight_format, torch.float32)
    layer = ColumnParallelLinear(256, [OutputRows("a", 64, range(64))], bias=False, setup=setup)
    fill(layer.weight_slots("m."), {"m.a.weight": random(64, 256)})
    setup.on_loaded[0]()
    x = random(4, 256, seed=1).float()
    x[3] *= 1000
    torch.testing.assert_close(layer(x)[:1], layer(x[:1]), rtol=1e-5, atol=1e-5)


@EVERY_FORMAT
@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_several_ranks_add_up(weight_format: WeightFormat, size: int) -> None:
    """384 inputs over 3 ranks are whole blocks; over 2 the 192 of each are none of 128, so they stay as they are."""
    weight, x = random(32, 384, seed=1), random(3, 384, seed=2).float()
    notes: list[str] = []

    def main(tp: Collectives) -> Tensor:
        held = split_range(384, size, tp.rank)
        setup = setup_of(tp, weight_format, torch.float32, notes)
        layer = RowParallelLinear(384, held, 32, bias=False, setup=setup)
        fill(layer.weight_slots("m."), {"m.weight": weight})
        for quantize in setup.on_loaded:
            quantize()
        return tp.all_reduce(layer(x[:, held.start : held.stop].contiguous()))

    for out in run_group(size, main):
        error = relative_error(out, x.double() @ weight.T)
        stays = weight_format is WeightFormat.FP8_BLOCK and size == 2
        assert error < (1e-5 if stays else TOLERANCE[weight_format])
    assert any("192 -> 32 isn't quantised: 128 doesn't divide its 192 inputs" in note for note in notes) is stays


@EVERY_FORMAT
def test_a_quantised_mlp_is_near_the_plain_one(weight_format: WeightFormat) -> None:
    tensors = {f"{name}_proj.weight": random(256, 128, seed=seed) / 12 for seed, name in enumerate(("gate", "up"))}
    tensors["down_proj.weight"] = random(128, 256, seed=3) / 16
    outputs = []
    for chosen in (None, weight_format):
        setup = setup_of(SingleCollectives(), chosen, torch.float32)
        mlp = GatedMlp(128, 256, setup)
        fill(mlp.weight_slots(""), tensors)
        assert len([quantize() for quantize in setup.on_loaded]) == (2 if chosen else 0)
        outputs.append(mlp(random(4, 128, seed=9).float()))
    assert 1e-4 < relative_error(outputs[1], outputs[0].double()) < 2 * TOLERANCE[weight_format]


def test_zero_weights_of_nvfp4_stay_zero() -> None:
    setup = setup_of(SingleCollectives(), WeightFormat.NVFP4, torch.float32)
    layer = ColumnParallelLinear(32, [OutputRows("a", 16, range(16))], bias=False, setup=setup)
    fill(layer.weight_slots("m."), {"m.a.weight": torch.zeros(16, 32).double()})
    setup.on_loaded[0]()
    assert torch.equal(layer(torch.ones(2, 32)), torch.zeros(2, 16))


def test_what_is_not_quantised_says_why() -> None:
    assert misfit(WeightFormat.NVFP4, 24, 8) == "16 doesn't divide its 24 inputs"
    assert misfit(WeightFormat.MXFP8, 48, 8) == "32 doesn't divide its 48 inputs"
    assert misfit(WeightFormat.FP8, 0, 8) == misfit(WeightFormat.FP8, 8, 0) == "it is empty"
    assert misfit(WeightFormat.FP8, 7, 5) is None and misfit(WeightFormat.FP8_BLOCK, 256, 5) is None


def test_the_weight_of_a_quantised_layer_is_its_values() -> None:
    setup = setup_of(SingleCollectives(), WeightFormat.MXFP8, torch.float32)
    layer = ColumnParallelLinear(64, [OutputRows("a", 64, range(64))], bias=False, setup=setup)
    fill(layer.weight_slots("m."), {"m.a.weight": random(64, 64)})
    setup.on_loaded[0]()
    quantized = layer._product.quantized
    assert quantized is not None and not isinstance(quantized.weight, PreparedWeight)
    values = dequantize(quantized.weight, torch.float32)
    torch.testing.assert_close(layer(torch.eye(64)), values.T, rtol=0, atol=0)
