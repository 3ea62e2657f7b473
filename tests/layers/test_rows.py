"""Slices of a group's rows give the same sums as whole rows, and no token twice."""

import pytest
import torch
from torch import Tensor

from dist_infer.comm.all_reduce import FusedAllReduce
from dist_infer.comm.collectives import Collectives
from dist_infer.comm.mesh import Mesh
from dist_infer.comm.peer_collectives import PeerCollectives, open_peer_collectives
from dist_infer.comm.strategy import Strategy
from dist_infer.kernels.carriers import ExpertOutputs, Fp8Tensor
from dist_infer.kernels.dispatch import Target
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.launch.world import World
from dist_infer.layers.norm import InputNorm, RmsNorm
from dist_infer.layers.rows import Branch, plan_rows
from dist_infer.layers.setup import LayerSetup
from tests.fake_collectives import run_group
from tests.layers.setups import random, setup_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_slices_are_the_rows_of_the_sum(size: int, num_tokens: int) -> None:
    parts = [random(num_tokens, 4, seed=rank) for rank in range(size)]

    def main(tp: Collectives) -> tuple[Tensor, Tensor, Tensor]:
        sliced = plan_rows(num_tokens, tp, sliced=True)
        own = sliced.reduce(parts[tp.rank])
        return own, sliced.gather(own), plan_rows(num_tokens, tp, sliced=False).reduce(parts[tp.rank])

    results = run_group(size, main)
    whole = results[0][2]
    torch.testing.assert_close(whole, sum(parts, torch.zeros(num_tokens, 4, dtype=torch.float64)), rtol=0, atol=1e-12)
    assert torch.equal(torch.cat([own for own, _, _ in results]), whole)
    for own, gathered, reduced in results:
        assert torch.equal(gathered, whole)
        assert torch.equal(reduced, whole)
        assert len(own) in (num_tokens // size, num_tokens // size + 1)


def test_whole_rows_are_gathered_without_an_exchange() -> None:
    def main(tp: Collectives) -> list[tuple[str, tuple[int, ...]]]:
        rows = plan_rows(5, tp, sliced=False)
        x = random(5, 4)
        assert rows.gather(x) is x
        calls: list[tuple[str, tuple[int, ...]]] = tp.calls  # type: ignore[attr-defined]
        return calls

    assert run_group(2, main) == [[], []]


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sum_addition_and_norm(size: int, sliced: bool, with_residual: bool) -> None:
    """Of parts, of sums, and through the one object that does all of it: the same bytes."""
    parts = [random(5, 8, seed=rank).float() for rank in range(size)]
    stream = random(5, 8, seed=9).float()

    def main(tp: Collectives) -> list[tuple[Tensor, Tensor]]:
        norm = RmsNorm(8, 1e-5, setup_of(tp, torch.float32))
        norm.weight.copy_(random(8, seed=7).float())
        rows = plan_rows(5, tp, sliced=sliced)
        own = torch.split(stream, list(rows.sizes))[tp.rank] if rows.sizes is not None else stream
        residual = own if with_residual else None
        part, whole = (
            Branch(x, is_part) for x, is_part in ((parts[tp.rank], True), (rows.reduce(parts[tp.rank]), False))
        )
        results = [rows.add_norm(branch, residual, norm) for branch in (part, whole)]
        if size > 1:
            reducer = FusedAllReduce(tp, Target(device=CPU, dtype=torch.float32))
            peers = PeerCollectives(tp, reducer)  # type: ignore[arg-type]  # a group of threads
            results.append(plan_rows(5, peers, sliced=sliced).add_norm(part, residual, norm))
        return results

    for results in run_group(size, main):
        (normed, total), *others = results
        for other_normed, other_total in others:
            assert torch.equal(other_normed, normed)
            assert torch.equal(other_total, total)


@pytest.mark.parametrize("wanted", [QuantFormat.FP8_ROWS, QuantFormat.FP8_BLOCK128], ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_norm_for_a_consumer_has_the_bytes_that_it_would_make(
    size: int, with_residual: bool, wanted: QuantFormat
) -> None:
    parts = [random(5, 128, seed=rank).bfloat16() for rank in range(size)]
    residual = random(5, 128, seed=9).bfloat16() if with_residual else None

    def main(tp: Collectives) -> list[Fp8Tensor]:
        norm = InputNorm(128, 1e-5, setup_of(tp, torch.bfloat16), wanted)
        norm.weight.copy_(random(128, seed=7))
        groups = [tp]
        if size > 1:
            reducer = FusedAllReduce(tp, Target(device=CPU, dtype=torch.bfloat16))
            groups.append(PeerCollectives(tp, reducer))  # type: ignore[arg-type]  # a group of threads
        results = []
        for group in groups:
            rows, branch = plan_rows(5, group, sliced=False), Branch(parts[tp.rank], is_part=True)
            normed, total = rows.add_norm(branch, residual, norm)
            given, given_total = rows.add_input_norm(branch, residual, norm)
            expected = norm.convert(normed)
            assert isinstance(given, Fp8Tensor) and isinstance(expected, Fp8Tensor)
            assert rows.gather(given) is given
            assert torch.equal(given_total, total)
            assert torch.equal(given.data.view(torch.uint8), expected.data.view(torch.uint8))
            assert torch.equal(given.scales, expected.scales)
            results.append(given)
        return results

    results = [given for own in run_group(size, main) for given in own]
    assert all(torch.equal(given.scales, results[0].scales) for given in results)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two GPUs")
@pytest.mark.gpu
@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("strategy", [Strategy.ONE_SHOT, Strategy.TWO_SHOT])
@pytest.mark.parametrize("wanted", [QuantFormat.FP8_ROWS, QuantFormat.FP8_BLOCK128], ids=str)
def test_through_peer_memory_a_norm_for_a_consumer_has_the_same_bytes(
    wanted: QuantFormat, strategy: Strategy, world: World
) -> None:
    """Whether one launch makes them or three do."""
    device = world.device
    group = world.communicators(Mesh.create(world=world.size, rank=world.rank)).tp
    target = Target(device=device, dtype=torch.bfloat16)
    peers = open_peer_collectives(group, target, max_tokens=200, hidden=7168, strategy=strategy)
    assert isinstance(peers, PeerCollectives)
    setup = LayerSetup(tp=peers, dtype=torch.bfloat16, device=device)
    for num_tokens in (1, 33, 0, 200, 5):
        norm = InputNorm(7168, 1e-5, setup, wanted)
        norm.weight.copy_(random(7168, seed=7))
        assert norm.gives is wanted
        part = random(num_tokens, 7168, seed=10 * num_tokens + world.rank).to(device, torch.bfloat16)
        residual = random(num_tokens, 7168, seed=9).to(device, torch.bfloat16)
        given, total = plan_rows(num_tokens, peers, sliced=False).add_input_norm(Branch(part, True), residual, norm)
        normed, expected_total = norm(group.all_reduce(part), residual)
        expected = norm.convert(normed)
        assert isinstance(given, Fp8Tensor) and isinstance(expected, Fp8Tensor)
        assert torch.equal(total, expected_total) and torch.equal(given.scales, expected.scales)
        assert torch.equal(given.data.view(torch.uint8), expected.data.view(torch.uint8))
    peers.close()


def test_outputs_of_experts_are_only_for_a_sum_through_peer_memory() -> None:
    outputs = ExpertOutputs(
        outputs=random(4, 8), ids=torch.zeros(2, 2, dtype=torch.int32), weights=random(2, 2), num_experts=1
    )

    def main(tp: Collectives) -> None:
        with pytest.raises(TypeError, match="outputs of experts"):
            plan_rows(2, tp, sliced=False).add_norm(Branch(outputs, is_part=True), None, RmsNorm(8, 1e-5, setup_of(tp)))

    run_group(2, main)


def test_slices_are_left_to_their_consumer() -> None:
    def main(tp: Collectives) -> Tensor | Fp8Tensor:
        norm = InputNorm(128, 1e-5, setup_of(tp, torch.bfloat16), QuantFormat.FP8_ROWS)
        norm.weight.fill_(1)
        rows = plan_rows(5, tp, sliced=True)
        normed, _ = rows.add_input_norm(Branch(random(5, 128).bfloat16(), is_part=True), None, norm)
        with pytest.raises(TypeError, match="gathered before they are quantised"):
            rows.gather(norm.convert(normed) if isinstance(normed, Tensor) else normed)
        return rows.gather(normed)

    for gathered in run_group(2, main):
        assert isinstance(gathered, Tensor) and gathered.shape == (5, 128)


def test_real_rows_of_a_slice() -> None:
    def main(tp: Collectives) -> list[int]:
        sliced, whole = plan_rows(5, tp, sliced=True), plan_rows(5, tp, sliced=False)
        counts = [torch.tensor([count], dtype=torch.int32) for count in range(6)]
        assert [int(whole.real(count)) for count in counts] == list(range(6))
        return [int(sliced.real(count)) for count in counts]

    assert run_group(2, main) == [[0, 1, 2, 3, 3, 3], [0, 0, 0, 0, 1, 2]]
