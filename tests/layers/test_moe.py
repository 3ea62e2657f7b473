"""The layer of experts in the layouts of one and of several groups, against a plain loop over experts."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dist_infer.comm.all_reduce import FusedAllReduce
from dist_infer.comm.collectives import Collectives
from dist_infer.comm.expert import open_expert_exchange
from dist_infer.comm.lane import Pending
from dist_infer.comm.mesh import Mesh, split_sizes
from dist_infer.comm.peer_collectives import PeerCollectives
from dist_infer.config import MoeConfig
from dist_infer.errors import UsageError
from dist_infer.kernels.carriers import ExpertOutputs
from dist_infer.kernels.dispatch import Target
from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.layers.moe import Experts, MoeLayer, MoeNames, Router, check_experts
from dist_infer.layers.norm import RmsNorm
from dist_infer.layers.rows import Branch, plan_rows
from tests.fake_collectives import run_group, run_mesh
from tests.layers.setups import CONFIG, close, fill, random, setup_of

D, E, I, S = CONFIG.hidden_size, 5, 7, 6  # noqa: E741  hidden, experts, their channels, the shared expert's
MOE = MoeConfig(
    num_experts=E,
    top_k=2,
    expert_intermediate_size=I,
    moe_layers=(0, 1),
    scoring="sigmoid",
    renormalise=True,
    renorm_epsilon=1e-20,
    routed_scaling_factor=1.7,
    shared_intermediate_size=S,
    has_bias=True,
)
NAMES = MoeNames(gate="w1", up="w3", down="w2", router_bias="bias")
TENSORS = {"m.gate.weight": random(E, D, seed=1), "m.bias": random(E, seed=2)}
TENSORS |= {
    f"m.experts.{e}.{name}.weight": random(*shape, seed=10 * e + seed)
    for e in range(E)
    for seed, (name, shape) in enumerate({"w1": (I, D), "w3": (I, D), "w2": (D, I)}.items())
}
TENSORS |= {
    f"m.shared_experts.{name}_proj.weight": random(*shape, seed=90 + seed)
    for seed, (name, shape) in enumerate({"gate": (S, D), "up": (S, D), "down": (D, S)}.items())
}


def dense(x: Tensor) -> Tensor:
    def mlp(row: Tensor, gate: str, up: str, down: str) -> Tensor:
        inner = torch.nn.functional.silu(TENSORS[gate] @ row) * (TENSORS[up] @ row)
        return TENSORS[down] @ inner

    out = torch.zeros_like(x)
    for idx, row in enumerate(x):
        scores = (TENSORS["m.gate.weight"] @ row).sigmoid()
        chosen = (scores + TENSORS["m.bias"]).argsort(descending=True)[:2].tolist()
        for e in chosen:
            name = f"m.experts.{e}."
            weight = scores[e] / scores[chosen].sum() * 1.7
            out[idx] += weight * mlp(row, f"{name}w1.weight", f"{name}w3.weight", f"{name}w2.weight")
        out[idx] += mlp(row, *(f"m.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")))
    return out


class EagerLane:
    """Does its work at once, as if there were streams."""

    overlaps = True

    def start(self, work: Callable[[], Tensor], *_: Tensor) -> Pending:
        return Pending(work())


@pytest.mark.parametrize(("world_size", "dp"), [(1, 1), (2, 1), (2, 2)])
def test_the_shared_expert_beside_the_others(world_size: int, dp: int) -> None:
    def main(mesh: Mesh, world: Collectives, tp: Collectives) -> Tensor:
        setup = replace(setup_of(tp), mesh=mesh, world=world)
        exchange = open_expert_exchange(mesh, world, setup.device, num_experts=E, top_k=2)
        layer = MoeLayer(replace(CONFIG, moe=MOE), NAMES, exchange, setup)
        fill(layer.weight_slots("m."), TENSORS)
        layer._lane = EagerLane()  # type: ignore[assignment]
        return layer(random(3, D, seed=70), exchange.plan([3] * mesh.world, None))

    for out in run_mesh(world_size, main, dp=dp):
        close(out, dense(random(3, D, seed=70)))


@pytest.mark.parametrize("max_moe_tokens", [None, 1, 3])
@pytest.mark.parametrize(
    ("world_size", "dp", "ep"), [(1, 1, 1), (2, 1, 2), (4, 1, 2), (2, 2, 1), (3, 3, 3), (4, 2, 4), (4, 4, 2)]
)
def test_every_layout_gives_the_plain_loop(world_size: int, dp: int, ep: int, max_moe_tokens: int | None) -> None:
    """Groups with 5, 0, 3 and 1 tokens; the rows of a group are sliced over its ranks."""
    tokens = [5, 0, 3, 1][:dp]

    def main(mesh: Mesh, world: Collectives, tp: Collectives) -> Tensor:
        setup = replace(setup_of(tp), mesh=mesh, world=world)
        config = replace(CONFIG, moe=MOE)
        exchange = open_expert_exchange(mesh, world, setup.device, num_experts=E, top_k=2)
        layer = MoeLayer(config, NAMES, exchange, setup)
        fill(layer.weight_slots("m."), TENSORS)
        rank_tokens = [tokens[mesh.group_of(rank)] for rank in range(mesh.world)]
        x = random(tokens[mesh.dp_rank], D, seed=70 + mesh.dp_rank)
        if dp > 1:
            x = x.split_with_sizes(split_sizes(len(x), mesh.tp))[mesh.tp_rank]
        return layer(x, exchange.plan(rank_tokens, max_moe_tokens))

    results = run_mesh(world_size, main, dp=dp, ep=ep)
    for group in range(dp):
        whole = dense(random(tokens[group], D, seed=70 + group))
        own = results[group * (world_size // dp) : (group + 1) * (world_size // dp)]
        close(torch.cat(own) if dp > 1 else own[0], whole)
        assert dp > 1 or all(torch.equal(out, own[0]) for out in own)


@pytest.mark.parametrize("num_tokens", [0, 1, 6])
@pytest.mark.parametrize("has_shared", [False, True])
def test_a_sum_through_peer_memory_takes_the_outputs_one_by_one(has_shared: bool, num_tokens: int) -> None:
    """Its bytes are those of the separate ops, in chunks or not; without a shared expert those of any other group."""
    config = replace(CONFIG, moe=replace(MOE, shared_intermediate_size=S if has_shared else 0))
    dtype = torch.bfloat16
    x, residual = (random(num_tokens, D, seed=seed).to(dtype) for seed in (70, 71))

    def main(mesh: Mesh, world: Collectives, tp: Collectives) -> None:
        peers = PeerCollectives(tp, FusedAllReduce(tp, Target(device=torch.device("cpu"), dtype=dtype)))  # type: ignore[arg-type]
        outs = []
        for group, most in ((tp, None), (peers, None), (peers, 2)):
            setup = replace(setup_of(group, dtype), mesh=mesh, world=group)
            exchange = open_expert_exchange(mesh, group, setup.device, num_experts=E, top_k=2)
            layer, norm = MoeLayer(config, NAMES, exchange, setup), RmsNorm(D, 1e-5, setup)
            fill(layer.weight_slots("m."), TENSORS)
            norm.weight.copy_(random(D, seed=72))
            chunks = exchange.plan([num_tokens] * mesh.world, most)
            part = layer.part(x, chunks)
            assert isinstance(part, ExpertOutputs) == (group is peers and (most is None or num_tokens <= most))
            rows = plan_rows(num_tokens, group, sliced=False)
            outs.append((*rows.add_norm(Branch(part, is_part=True), residual, norm), layer(x, chunks)))
            if isinstance(part, ExpertOutputs):
                assert (part.shared is not None) == has_shared
                separate = tp.all_reduce(layer.experts.finalized(part))
                assert torch.equal(outs[-1][2], separate)
                assert all(torch.equal(*pair) for pair in zip(outs[-1], norm(separate, residual), strict=False))
        for other in outs[has_shared:]:
            assert all(torch.equal(*pair) for pair in zip(other, outs[-1], strict=True))

    run_mesh(2, main)


def test_quantised_experts_add_up_themselves() -> None:
    def main(tp: Collectives) -> bool:
        moe = replace(MOE, expert_intermediate_size=256)
        setup = replace(setup_of(tp, torch.bfloat16), weight_format=WeightFormat.FP8_BLOCK)
        return Experts(128, moe, setup, unsummed=True).unsummed

    assert run_group(2, main) == [False, False]


def test_the_bias_changes_the_choice() -> None:
    x = random(20, D, seed=70)

    def main(tp: Collectives) -> tuple[Tensor, Tensor]:
        router = Router(D, MOE, setup_of(tp))
        fill(router.weight_slots("m.", NAMES), TENSORS)
        ids, _ = router(x)
        assert router.bias is not None
        router.bias.zero_()
        return ids, router(x)[0]

    ((with_bias, without),) = run_group(1, main)
    assert not torch.equal(with_bias.sort(1).values, without.sort(1).values)


def test_uniform_routing_spreads_equal_rows_over_all_experts() -> None:
    def main(tp: Collectives) -> list[set[int]]:
        chosen = []
        for uniform in (False, True):
            router = Router(D, MOE, replace(setup_of(tp), uniform_routing=uniform))
            fill(router.weight_slots("m.", NAMES), TENSORS)
            chosen.append(set(router(torch.ones(64, D, dtype=torch.float64))[0].flatten().tolist()))
        return chosen

    ((plain, uniform),) = run_group(1, main)
    assert len(plain) == 2
    assert uniform == set(range(E))


def test_a_router_is_never_narrower_than_float32() -> None:
    def main(tp: Collectives) -> list[torch.dtype]:
        router = Router(D, MOE, setup_of(tp, torch.bfloat16))
        _, weights = router(torch.ones(1, D, dtype=torch.bfloat16))
        return [slot.into.dtype for slot in router.weight_slots("m.", NAMES)] + [weights.dtype]

    assert run_group(1, main) == [[torch.float32] * 3]


@pytest.mark.parametrize(("world_size", "ep"), [(1, 1), (2, 2), (4, 2), (3, 1)])
def test_experts_are_dealt_without_gap_or_overlap(world_size: int, ep: int) -> None:
    """All ranks ask for all experts' tensors, and hold every element once."""

    def main(mesh: Mesh, world: Collectives, tp: Collectives) -> dict[str, tuple[range, ...]]:
        setup = replace(setup_of(tp), mesh=mesh, world=world)
        return {slot.name: slot.take for slot in Experts(D, MOE, setup).weight_slots("m.", NAMES)}

    held = {name: torch.zeros(tensor.shape) for name, tensor in TENSORS.items() if ".experts." in name}
    for slots in run_mesh(world_size, main, ep=ep):
        assert slots.keys() == held.keys()
        for name, take in slots.items():
            held[name][tuple(slice(part.start, part.stop) for part in take)] += 1
    assert all(bool((count == 1).all()) for count in held.values())


@pytest.mark.parametrize(
    ("world", "ep", "message"),
    [
        (8, 8, r"--ep 8 leaves ranks without an expert: the model has 5; the nearest valid choice is --ep 4"),
        (16, 2, r"--ep 2 makes 8 ranks share each expert, but an expert has 7 channels; .* --ep 4"),
        (64, 64, r"--ep 64 .* 5; launch fewer ranks"),
    ],
)
def test_layouts_that_leave_a_rank_empty_are_refused(world: int, ep: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_experts(MOE, Mesh.create(world=world, rank=0, ep=ep))
