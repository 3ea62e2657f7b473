"""The gated MLP over uneven shards, down to ranks without a channel."""

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.layers.mlp import GatedMlp
from tests.fake_collectives import run_group
from tests.layers.setups import CONFIG, close, fill, random, setup_of

D, I = CONFIG.hidden_size, CONFIG.intermediate_size  # noqa: E741
TENSORS = {
    "m.gate_proj.weight": random(I, D, seed=1),
    "m.gate_proj.bias": random(I, seed=2),
    "m.up_proj.weight": random(I, D, seed=3),
    "m.up_proj.bias": random(I, seed=4),
    "m.down_proj.weight": random(D, I, seed=5),
    "m.down_proj.bias": random(D, seed=6),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_shards_give_the_whole_layer(size: int) -> None:
    x = random(5, D)

    def main(tp: Collectives) -> Tensor:
        layer = GatedMlp(D, I, setup_of(tp), bias=True)
        fill(layer.weight_slots("m."), TENSORS)
        return tp.all_reduce(layer(x))

    gate, up = (x @ TENSORS[f"m.{name}_proj.weight"].T + TENSORS[f"m.{name}_proj.bias"] for name in ("gate", "up"))
    whole = torch.nn.functional.silu(gate) * up @ TENSORS["m.down_proj.weight"].T + TENSORS["m.down_proj.bias"]
    for out in run_group(size, main):
        close(out, whole)
