"""The decoder of all families: pre-norm layers of attention and a dense MLP or routed experts.

T tokens, R rows of this rank (see layers/rows), L rows with logits, D hidden.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from dist_infer.comm.expert import ExpertExchange, open_expert_exchange
from dist_infer.comm.moe_chunks import ChunkPlan
from dist_infer.config import ModelConfig
from dist_infer.kernels.carriers import Fp8Tensor
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.layers.attention import Attention, AttentionPlanner, AttentionStep, KVLayer
from dist_infer.layers.embedding import VocabEmbedding, VocabHead
from dist_infer.layers.mla import LatentLayer, MlaAttention, MlaPlanner
from dist_infer.layers.mlp import GatedMlp
from dist_infer.layers.moe import MoeLayer, MoeNames, check_experts
from dist_infer.layers.norm import InputNorm, RmsNorm
from dist_infer.layers.rope import RotaryAngles
from dist_infer.layers.rows import Branch, GroupRows, plan_rows
from dist_infer.layers.setup import LayerSetup
from dist_infer.layers.step_inputs import StepInputs
from dist_infer.layers.weights import WeightSlot

LayerCache: TypeAlias = KVLayer | LatentLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStep:
    """What all layers of a step share."""

    attention: AttentionStep
    rows: GroupRows
    chunks: ChunkPlan | None  # of the experts; None in a model without any
    num_real: Tensor | None  # how many of this rank's rows are no padding; None: all


class _AttentionLayer(Protocol):
    """Attention of either kind, on a cache of its own kind."""

    @property
    def input_format(self) -> QuantFormat | None: ...

    def __call__(self, hidden: Tensor | Fp8Tensor, step: AttentionStep, kv: Any) -> Tensor: ...

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]: ...


class DecoderLayer:
    """One decoder layer.

    The residual stream travels beside the branch output, so that each sum and addition is fused with the norm after it.
    """

    def __init__(
        self, config: ModelConfig, setup: LayerSetup, exchange: ExpertExchange | None, names: MoeNames
    ) -> None:
        self.attention: _AttentionLayer = (Attention if config.mla is None else MlaAttention)(config, setup)
        self.mlp: GatedMlp | MoeLayer
        if exchange is None:
            self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, setup, bias=config.mlp_bias)
            self._mlp_prefix = "mlp."
        else:
            self.mlp = MoeLayer(config, names, exchange, setup)
            self._mlp_prefix = names.block
        # a router reads the norm as it is
        mlp_format = self.mlp.input_format if isinstance(self.mlp, GatedMlp) else None
        self.attention_norm = InputNorm(config.hidden_size, config.rms_norm_eps, setup, self.attention.input_format)
        self.mlp_norm = InputNorm(config.hidden_size, config.rms_norm_eps, setup, mlp_format)

    def __call__(
        self, branch: Branch, residual: Tensor | None, step: DecoderStep, kv: LayerCache
    ) -> tuple[Branch, Tensor]:
        """(branch, residual): their sum is the hidden state after this layer.

        Shapes: residual [R, D].
        Ranks: collective over tp, and over the world where there are experts.
        """
        normed, residual = step.rows.add_input_norm(branch, residual, self.attention_norm)
        attended = self.attention(step.rows.gather(normed), step.attention, kv)
        normed, residual = step.rows.add_input_norm(Branch(attended, is_part=True), residual, self.mlp_norm)
        return self._feed_forward(normed, step), residual

    def _feed_forward(self, normed: Tensor | Fp8Tensor, step: DecoderStep) -> Branch:
        if isinstance(self.mlp, GatedMlp):
            return Branch(self.mlp(step.rows.gather(normed)), is_part=True)
        if step.chunks is None or not isinstance(normed, Tensor):
            raise ValueError("a layer of experts got a step without a plan of chunks, or a quantised norm")
        if self.mlp.has_parts:
            return Branch(self.mlp.part(normed, step.chunks, step.num_real), is_part=True)
        return Branch(self.mlp(normed, step.chunks, step.num_real), is_part=False)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Tensors under `prefix`."""
        yield from self.attention_norm.weight_slots(f"{prefix}input_layernorm.")
        yield from self.attention.weight_slots(f"{prefix}self_attn.")
        yield from self.mlp_norm.weight_slots(f"{prefix}post_attention_layernorm.")
        yield from self.mlp.weight_slots(f"{prefix}{self._mlp_prefix}")


class Decoder:
    """This rank's shard of a model: parameters are empty until the loader has filled `weight_slots`."""

    def __init__(self, config: ModelConfig, setup: LayerSetup, names: MoeNames | None = None) -> None:
        mesh = setup.expert_mesh
        names = names or MoeNames()
        self.config = config
        self._graph_blockers = setup.graph_blockers
        self._tp = setup.tp
        self._world = setup.world or setup.tp
        self._exchange: ExpertExchange | None = None
        if config.moe is not None:
            check_experts(config.moe, mesh)
            self._exchange = open_expert_exchange(
                mesh,
                self._world,
                setup.device,
                num_experts=config.moe.num_experts,
                top_k=config.moe.top_k,
            )
        self._max_moe_tokens = setup.max_moe_tokens
        self._sliced = config.moe is not None and mesh.dp > 1
        self._world_size = mesh.world
        self.embedding = VocabEmbedding(config.vocab_size, config.hidden_size, setup)
        self.angles = RotaryAngles(config.rope, config.head_dim, setup)
        self.plan_attention = (AttentionPlanner if config.mla is None else MlaPlanner)(config, setup)
        moe_layers = frozenset(config.moe.moe_layers if config.moe else ())
        self.layers = tuple(
            DecoderLayer(config, setup, self._exchange if idx in moe_layers else None, names)
            for idx in range(config.num_layers)
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, setup)
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.head = VocabHead(config.vocab_size, config.hidden_size, setup, tied_to=tied_to)

    @property
    def graph_blocker(self) -> str | None:
        """Why a step of this model can't be captured in a graph; None where it can."""
        if blockers := sorted(self._graph_blockers):
            return f"{', '.join(blockers)} can't be captured"
        if not (self._tp.capturable and self._world.capturable):
            return "the collectives between these ranks can't be captured"
        return None

    @property
    def vocab_range(self) -> range:
        """The token ids that this rank's logits stand for."""
        return self.head.held

    def __call__(self, inputs: StepInputs, kv: Sequence[LayerCache]) -> Tensor:
        """The normed last hidden state of every token; `kv` (one a layer) holds what this step caches afterwards.

        Shapes: -> [T, D].
        Ranks: collective over tp, and over the world where there are experts.
        """
        step = self._plan(inputs)
        branch, residual = Branch(self.embedding(inputs.token_ids), is_part=True), None
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            branch, residual = layer(branch, residual, step, layer_kv)
        normed, _ = step.rows.add_norm(branch, residual, self.norm)
        return step.rows.gather(normed)

    def _plan(self, inputs: StepInputs) -> DecoderStep:
        """All that depends on the sizes of the step, once for all layers."""
        cos, sin = self.angles(inputs.positions)
        attend = self.plan_attention(inputs.paged)
        chunks = None
        if self._exchange is not None:
            tokens = inputs.rank_tokens or (inputs.num_tokens,) * self._world_size
            chunks = self._exchange.plan(tokens, self._max_moe_tokens, eager_prefill=inputs.eager_prefill)
        rows = plan_rows(inputs.num_tokens, self._tp, sliced=self._sliced)
        return DecoderStep(
            attention=AttentionStep(cos=cos, sin=sin, slots=inputs.slots, attend=attend),
            rows=rows,
            chunks=chunks,
            num_real=None if inputs.num_real is None or chunks is None else rows.real(inputs.num_real),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits of the rows of `hidden`.

        Shapes: [L, D] -> [L, len(vocab_range)].
        Ranks: local.
        """
        return self.head(hidden)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every checkpoint tensor that the model is made of, once. A tied head has none of its own."""
        yield from self.embedding.weight_slots("model.embed_tokens.")
        for layer_idx, layer in enumerate(self.layers):
            yield from layer.weight_slots(f"model.layers.{layer_idx}.")
        yield from self.norm.weight_slots("model.norm.")
        yield from self.head.weight_slots("lm_head.")

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions for whole names that a checkpoint may hold although the model doesn't use them."""
        first = self.config.num_layers
        unused = [rf"model\.layers\.{first + idx}\..*" for idx in range(self.config.num_mtp_layers)]
        frequencies = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
        return (frequencies, *unused, *(re.escape(name) for name in self.tied_weights))

    @property
    def tied_weights(self) -> dict[str, str]:
        """Tensors that a checkpoint may repeat, and the one that is used in their place."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.head.tied else {}
