"""Column- and row-parallel products: together they are the whole product, at every tp size and with uneven parts."""

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.comm.mesh import split_range
from dist_infer.layers.linear import ColumnParallelLinear, OutputRows, RowParallelLinear
from tests.fake_collectives import run_group
from tests.layers.setups import close, fill, random, setup_of

IN, A, B, OUT = 6, 5, 3, 4
TENSORS = {
    "m.a.weight": random(A, IN, seed=1),
    "m.b.weight": random(B, IN, seed=2),
    "m.a.bias": random(A, seed=3),
    "m.b.bias": random(B, seed=4),
    "m.o.weight": random(OUT, A, seed=5),
    "m.o.bias": random(OUT, seed=6),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_merged_parts_are_rows_of_each_matrix(size: int, bias: bool) -> None:
    x = random(3, IN)

    def main(tp: Collectives) -> Tensor:
        parts = [OutputRows("a", A, split_range(A, size, tp.rank)), OutputRows("b", B, split_range(B, size, tp.rank))]
        layer = ColumnParallelLinear(IN, parts, bias=bias, setup=setup_of(tp))
        fill(layer.weight_slots("m."), TENSORS)
        out = layer(x)
        assert out.shape == (3, len(parts[0].held) + len(parts[1].held))
        return out

    wholes = [x @ TENSORS[f"m.{name}.weight"].T + (TENSORS[f"m.{name}.bias"] if bias else 0) for name in "ab"]
    for rank, out in enumerate(run_group(size, main)):
        held = [split_range(width, size, rank) for width in (A, B)]
        close(out, torch.cat([whole[:, part.start : part.stop] for whole, part in zip(wholes, held, strict=True)], 1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_partial_results_are_summed_and_the_bias_added_once(size: int, bias: bool) -> None:
    """With 7 ranks for 5 inputs two ranks have none, and still take part in the sum."""
    x = random(3, A)

    def main(tp: Collectives) -> Tensor:
        held = split_range(A, size, tp.rank)
        layer = RowParallelLinear(A, held, OUT, bias=bias, setup=setup_of(tp))
        fill(layer.weight_slots("m.o."), TENSORS)
        return tp.all_reduce(layer(x[:, held.start : held.stop].contiguous()))

    whole = x @ TENSORS["m.o.weight"].T + (TENSORS["m.o.bias"] if bias else 0)
    results = run_group(size, main)
    for out in results:
        close(out, whole)
        assert torch.equal(out, results[0])
