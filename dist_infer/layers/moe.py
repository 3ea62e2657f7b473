"""A layer of routed experts, and of one shared expert where the model has it.

R rows of this rank, D hidden, E experts (all, and held by this rank), I intermediate channels held, K experts a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from dist_infer.comm.collectives import SingleCollectives
from dist_infer.comm.expert import AllReduce, ExpertExchange
from dist_infer.comm.lane import Pending
from dist_infer.comm.mesh import Mesh, split_range
from dist_infer.comm.moe_chunks import ChunkPlan
from dist_infer.comm.peer_collectives import PeerCollectives
from dist_infer.config import ModelConfig, MoeConfig
from dist_infer.errors import UsageError
from dist_infer.kernels import moe_experts as experts_op
from dist_infer.kernels import moe_finalize as finalize_op
from dist_infer.kernels import moe_route as route_op
from dist_infer.kernels import router_gemm as router_op
from dist_infer.kernels.carriers import ExpertOutputs, RoutingMethod
from dist_infer.layers.mlp import GatedMlp
from dist_infer.layers.quantized_experts import ExpertQuantizer, QuantizedExperts
from dist_infer.layers.setup import LayerSetup
from dist_infer.layers.weights import WeightSlot

BESIDE_ROWS = 64  # up to which the shared expert is computed beside the others, on a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeNames:
    """How a family names the tensors of a MoE layer, under the layer's prefix."""

    block: str = "mlp."
    router_bias: str = "gate.e_score_correction_bias"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class Router:
    """Replicated: every rank routes its own rows. Weight and bias are kept and applied in at least float32.

    Ids count the experts `held`, -1 is any other; None: they count all.
    """

    def __init__(self, hidden_size: int, moe: MoeConfig, setup: LayerSetup, *, held: range | None = None) -> None:
        self._held = held
        self.weight = setup.empty_wide(moe.num_experts, hidden_size)
        self.bias = setup.empty_wide(moe.num_experts) if moe.has_bias else None
        self._method = RoutingMethod(
            scoring=moe.scoring,
            top_k=moe.top_k,
            renormalise=moe.renormalise,
            renorm_epsilon=moe.renorm_epsilon,
            scaling_factor=moe.routed_scaling_factor,
            num_groups=moe.num_groups,
            num_kept_groups=moe.num_kept_groups,
            group_score=moe.group_score,
            uniform=setup.uniform_routing,
        )
        self._gemm = setup.choose("router_gemm", router_op.LIBRARIES, width=hidden_size, experts=moe.num_experts)
        self._route = setup.choose("moe_route", route_op.LIBRARIES, experts=moe.num_experts, top_k=moe.top_k)

    def __call__(self, hidden: Tensor, num_real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(expert ids, weights) of each row; those behind the first `num_real` are padding and go to no expert.

        Shapes: hidden [R, D], num_real [1] int32 -> two of [R, K].
        Ranks: local.
        """
        logits = router_op.router_gemm(hidden, self.weight, library=self._gemm)
        return route_op.moe_route(logits, self.bias, self._method, num_real, held=self._held, library=self._route)

    def weight_slots(self, prefix: str, names: MoeNames) -> Iterator[WeightSlot]:
        """The tensor `gate.weight`, and the bias where there is one."""
        num_experts, hidden_size = self.weight.shape
        whole = (range(num_experts), range(hidden_size))
        yield WeightSlot(f"{prefix}gate.weight", (num_experts, hidden_size), whole, self.weight)
        if self.bias is not None:
            yield WeightSlot(f"{prefix}{names.router_bias}", (num_experts,), whole[:1], self.bias)


class Experts:
    """The experts that a rank holds: whole ones, or a slice of their channels where several ranks share them.

    With `unsummed`, unless they are quantised, the outputs of a row can be had one by one.
    """

    def __init__(self, hidden_size: int, moe: MoeConfig, setup: LayerSetup, *, unsummed: bool = False) -> None:
        mesh = setup.expert_mesh
        self.held = split_range(moe.num_experts, mesh.ep, mesh.ep_rank)
        self._num_experts = moe.num_experts
        self._total = moe.expert_intermediate_size
        self._channels = split_range(self._total, mesh.moe_tp, mesh.moe_tp_rank)
        inner = len(self._channels)
        self.gate_up = setup.empty(len(self.held), 2 * inner, hidden_size)
        self.down = setup.empty(len(self.held), hidden_size, inner)
        self._quantizer = ExpertQuantizer.choose(len(self.held), hidden_size, inner, setup)
        self._quantized: QuantizedExperts | None = None
        self.unsummed = unsummed and self._quantizer is None
        sizes = {"experts": len(self.held), "width": hidden_size, "intermediate": inner}
        if self._quantizer is not None:
            setup.on_loaded.append(self._quantize)
        elif self.unsummed:
            self._outputs = setup.choose_by_size("moe_experts", experts_op.OUTPUTS_LIBRARIES, "pairs", **sizes)
            self._finalize = setup.choose("moe_finalize", finalize_op.LIBRARIES, width=hidden_size)
        else:
            self._libraries = setup.choose_by_size("moe_experts", experts_op.LIBRARIES, "pairs", **sizes)

    def _quantize(self) -> int:
        """Replaces the weights by quantised ones; the bytes it freed."""
        if self._quantizer is None:
            raise RuntimeError("these experts keep their weights")
        num_bytes = self.gate_up.nbytes + self.down.nbytes
        self._quantized = self._quantizer(self.gate_up, self.down)
        self.gate_up, self.down = self.gate_up[:0].clone(), self.down[:0].clone()
        return num_bytes - self._quantized.num_bytes

    def __call__(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """This rank's part of the weighted sum; ids count the experts held, -1 is none of them.

        Shapes: hidden [R, D], expert_ids and weights [R, K] -> [R, D].
        Ranks: local.
        """
        if self._quantized is not None:
            return self._quantized(hidden, expert_ids, weights)
        if self.unsummed:
            return self.finalized(self.outputs(hidden, expert_ids, weights))
        library = self._libraries.pick(self._num_pairs(expert_ids))
        return experts_op.moe_experts(hidden, expert_ids, weights, self.gate_up, self.down, library=library)

    def outputs(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> ExpertOutputs:
        """What the weighted sum is made of, where it is `unsummed`.

        Shapes: hidden [R, D], expert_ids and weights [R, K].
        Ranks: local.
        """
        library = self._outputs.pick(self._num_pairs(expert_ids))
        return experts_op.expert_outputs(hidden, expert_ids, weights, self.gate_up, self.down, library=library)

    def _num_pairs(self, expert_ids: Tensor) -> int:
        """That experts held here get of so many rows, if all experts get as many: what is known without the device."""
        return expert_ids.numel() * len(self.held) // self._num_experts

    def finalized(self, outputs: ExpertOutputs) -> Tensor:
        """The sum over the experts of each row and the shared one.

        Shapes: -> [R, D].
        Ranks: local.
        """
        return finalize_op.moe_finalize(outputs, library=self._finalize)

    def weight_slots(self, prefix: str, names: MoeNames) -> Iterator[WeightSlot]:
        """`experts.{e}.{gate, up, down}.weight` of all experts; of those of other ranks the part is empty."""
        hidden_size, inner = self.down.shape[1:]
        hidden = range(hidden_size)
        into_inner, out_of_inner = (self._total, hidden_size), (hidden_size, self._total)
        nothing = self.gate_up.new_empty(0, hidden_size)
        for expert in range(self._num_experts):
            name = f"{prefix}experts.{expert}."
            held = expert in self.held
            place = expert - self.held.start
            channels = self._channels if held else range(0)
            gate, up = (self.gate_up[place, :inner], self.gate_up[place, inner:]) if held else (nothing, nothing)
            down = self.down[place] if held else nothing.T
            yield WeightSlot(f"{name}{names.gate}.weight", into_inner, (channels, hidden), gate)
            yield WeightSlot(f"{name}{names.up}.weight", into_inner, (channels, hidden), up)
            yield WeightSlot(f"{name}{names.down}.weight", out_of_inner, (hidden, channels), down)


class MoeLayer:
    """Router, experts over the whole world, shared expert.

    With one group all ranks hold all rows: the shared expert is cut over them too and joins the experts' one sum. With
    several, each rank holds rows of its own and the whole shared expert.

    Where the group sums through peer memory, the sum over a row's experts and the shared one is left to it: it may be
    done in the kernel of the sum over the ranks. It is one sum in float32 then, rounded once, whoever makes it.
    """

    def __init__(self, config: ModelConfig, names: MoeNames, exchange: ExpertExchange, setup: LayerSetup) -> None:
        moe = moe_geometry(config)
        held = exchange.held if isinstance(exchange, AllReduce) else None
        self.router = Router(config.hidden_size, moe, setup, held=held)
        unsummed = held is not None and isinstance(setup.tp, PeerCollectives)
        self.experts = Experts(config.hidden_size, moe, setup, unsummed=unsummed)
        self._names = names
        self._exchange = exchange
        self.shared: GatedMlp | None = None
        if moe.shared_intermediate_size:
            self._lane = setup.lane
            own = setup if self.has_parts else replace(setup, tp=SingleCollectives())
            self.shared = GatedMlp(config.hidden_size, moe.shared_intermediate_size, own, adds=True)

    def __call__(self, hidden: Tensor, chunks: ChunkPlan, num_real: Tensor | None = None) -> Tensor:
        """The output for this rank's rows; no expert sees those behind the first `num_real`.

        Shapes: hidden [R, D], num_real [1] int32 -> [R, D].
        Ranks: collective over the world.
        """
        if isinstance(self._exchange, AllReduce):
            part = self.part(hidden, chunks, num_real)
            return self._exchange.sum(part if isinstance(part, Tensor) else self.experts.finalized(part))
        expert_ids, weights = self.router(hidden, num_real)
        routed = self._exchange.run(hidden, expert_ids, weights, self.experts, chunks)
        return routed if self.shared is None else self.shared(hidden, routed)

    @property
    def has_parts(self) -> bool:
        """There is one group: what `part` gives, summed over it, is the output."""
        return isinstance(self._exchange, AllReduce)

    def part(self, hidden: Tensor, chunks: ChunkPlan, num_real: Tensor | None = None) -> Tensor | ExpertOutputs:
        """This rank's part of the output, where it has parts: for a sum through peer memory what it is the sum of.

        Shapes: as the output's.
        Ranks: local.
        """
        if not isinstance(self._exchange, AllReduce):
            raise ValueError("experts of several groups give sums, not parts")
        whole = chunks.num_chunks == 1 and chunks.rows(0) == len(hidden)
        shared = self._start_shared(hidden) if whole or not self.experts.unsummed else None
        expert_ids, weights = self.router(hidden, num_real)
        if self.experts.unsummed and whole:
            outputs = self.experts.outputs(hidden, expert_ids, weights)
            return replace(outputs, shared=self._shared_output(hidden, shared))
        if shared is not None:
            return self._exchange.run_part(hidden, expert_ids, weights, self.experts, chunks).add_(shared.wait())
        return self._exchange.run_part(hidden, expert_ids, weights, self._experts_and_shared, chunks)

    def _start_shared(self, hidden: Tensor) -> Pending | None:
        """The shared expert beside router and experts, where few rows leave the device room; None: after them."""
        if self.shared is None or not self._lane.overlaps or not 0 < len(hidden) <= BESIDE_ROWS:
            return None
        return self._lane.start(partial(self.shared, hidden), hidden)

    def _shared_output(self, hidden: Tensor, started: Pending | None) -> Tensor | None:
        if self.shared is None:
            return None
        return self.shared(hidden) if started is None else started.wait()

    def _experts_and_shared(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        if self.experts.unsummed:
            outputs = self.experts.outputs(hidden, expert_ids, weights)
            return self.experts.finalized(replace(outputs, shared=self._shared_output(hidden, None)))
        routed = self.experts(hidden, expert_ids, weights)
        return routed if self.shared is None else self.shared(hidden, routed)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Tensors under `prefix`."""
        yield from self.router.weight_slots(prefix, self._names)
        yield from self.experts.weight_slots(prefix, self._names)
        if self.shared is not None:
            yield from self.shared.weight_slots(f"{prefix}shared_experts.")


def moe_geometry(config: ModelConfig) -> MoeConfig:
    """Errors: UsageError for a model without experts."""
    if config.moe is None:
        raise UsageError(f"{config.architecture} has no experts")
    return config.moe


def check_experts(moe: MoeConfig, mesh: Mesh) -> None:
    """Refuses a layout that leaves a rank without an expert, or without a channel of one.

    Errors: UsageError with the numbers and the nearest valid choice.
    """
    divisors = [ep for ep in range(1, mesh.world + 1) if mesh.world % ep == 0]
    valid = [ep for ep in divisors if ep <= moe.num_experts and mesh.world // ep <= moe.expert_intermediate_size]
    if mesh.ep in valid:
        return
    if mesh.ep > moe.num_experts:
        problem = f"leaves ranks without an expert: the model has {moe.num_experts}"
    else:
        problem = (
            f"makes {mesh.moe_tp} ranks share each expert, but an expert has {moe.expert_intermediate_size} channels"
        )
    nearest = sorted(valid, key=lambda ep: abs(ep - mesh.ep))[:1]
    choice = f"the nearest valid choice is --ep {nearest[0]}" if nearest else "launch fewer ranks"
    raise UsageError(f"--ep {mesh.ep} {problem}; {choice}")
