"""Experts that quantise their weights after the load: near the plain ones, smaller, on slices of several ranks too."""

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives, SingleCollectives
from dist_infer.comm.mesh import Mesh
from dist_infer.config import MoeConfig
from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.layers.moe import Experts, MoeNames
from dist_infer.layers.setup import LayerSetup
from tests.fake_collectives import run_group
from tests.layers.setups import fill, random

D, E, I = 128, 3, 256  # noqa: E741  hidden, experts, their channels
TENSORS = {
    f"m.experts.{e}.{name}_proj.weight": random(*shape, seed=10 * e + seed) / 12
    for e in range(E)
    for seed, (name, shape) in enumerate({"gate": (I, D), "up": (I, D), "down": (D, I)}.items())
}
FORMATS = [WeightFormat.FP8_BLOCK, WeightFormat.MXFP8, WeightFormat.NVFP4]
TOLERANCE = {WeightFormat.FP8_BLOCK: 0.08, WeightFormat.MXFP8: 0.06, WeightFormat.NVFP4: 0.2}


def experts_of(
    tp: Collectives, weight_format: WeightFormat | None, dtype: torch.dtype, inner: int = I
) -> tuple[Experts, list[str], int]:
    """The layer, loaded and ready, what it told of its choices, and the bytes that quantising freed."""
    notes: list[str] = []
    setup = LayerSetup(
        tp=tp,
        dtype=dtype,
        device=torch.device("cpu"),
        mesh=Mesh.create(world=tp.size, rank=tp.rank, ep=1),
        weight_format=weight_format,
        on_choice=notes.append,
    )
    moe = MoeConfig(
        num_experts=E,
        top_k=2,
        expert_intermediate_size=inner,
        moe_layers=(0,),
        scoring="softmax",
        renormalise=True,
    )
    layer = Experts(D, moe, setup)
    tensors = {name: _cut(tensor, inner) for name, tensor in TENSORS.items()}
    fill(layer.weight_slots("m.", MoeNames()), tensors)
    return layer, notes, sum(finish() for finish in setup.on_loaded)


def _cut(tensor: Tensor, inner: int) -> Tensor:
    return tensor[:inner] if tensor.shape[1] == D else tensor[:, :inner]


def routed(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = random(9, D, seed=50).to(dtype)
    ids = torch.tensor([[0, 2], [1, -1], [2, 1]] * 3)
    return x, ids, random(9, 2, seed=51).abs().to(torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda chosen: chosen.value)
def test_near_the_plain_ones_and_smaller(weight_format: WeightFormat, dtype: torch.dtype) -> None:
    plain, _, _ = experts_of(SingleCollectives(), None, dtype)
    plain_bytes = plain.gate_up.nbytes + plain.down.nbytes
    layer, _, freed = experts_of(SingleCollectives(), weight_format, dtype)
    assert 0.4 * plain_bytes < freed < 0.95 * plain_bytes and layer.gate_up.numel() == layer.down.numel() == 0
    truth, out = plain(*routed(dtype)).double(), layer(*routed(dtype))
    error = float((out.double() - truth).norm() / truth.norm())
    assert out.dtype == dtype and 1e-4 < error < TOLERANCE[weight_format]


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda chosen: chosen.value)
def test_slices_of_two_ranks_add_up(weight_format: WeightFormat) -> None:
    def main(tp: Collectives) -> Tensor:
        layer, _, freed = experts_of(tp, weight_format, torch.float32)
        assert freed > 0
        return tp.all_reduce(layer(*routed(torch.float32)))

    whole = experts_of(SingleCollectives(), None, torch.float64)[0](*routed(torch.float64))
    for out in run_group(2, main):
        assert float((out - whole).norm() / whole.norm()) < TOLERANCE[weight_format]


def test_experts_that_do_not_fit_a_format_say_so_and_stay() -> None:
    layer, notes, freed = experts_of(SingleCollectives(), WeightFormat.FP8_BLOCK, torch.float32, inner=72)
    assert not freed and len(layer.gate_up) == E
    assert any("weights stay as they are (128 doesn't divide its 72 channels)" in note for note in notes)
    _, notes, freed = experts_of(SingleCollectives(), WeightFormat.FP8, torch.float32)
    assert not freed and any("experts aren't held in fp8" in note for note in notes)
