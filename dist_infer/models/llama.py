"""The Llama family: pre-norm decoder layers of grouped-query attention and a gated MLP.

T tokens, L rows with logits, D hidden.
"""

import re
from collections.abc import Iterator, Sequence

from torch import Tensor

from dist_infer.config import ModelConfig
from dist_infer.layers.attention import Attention, AttentionPlanner, AttentionStep, KVLayer
from dist_infer.layers.embedding import VocabEmbedding, VocabHead
from dist_infer.layers.mlp import GatedMlp
from dist_infer.layers.norm import RmsNorm
from dist_infer.layers.rope import RotaryAngles
from dist_infer.layers.setup import LayerSetup
from dist_infer.layers.step_inputs import StepInputs
from dist_infer.layers.weights import WeightSlot


class LlamaLayer:
    """One decoder layer.

    The residual stream travels beside the branch output, so that each addition is fused with the norm after it.
    """

    def __init__(self, config: ModelConfig, setup: LayerSetup) -> None:
        self.attention_norm = RmsNorm(config.hidden_size, config.rms_norm_eps, setup)
        self.attention = Attention(config, setup)
        self.mlp_norm = RmsNorm(config.hidden_size, config.rms_norm_eps, setup)
        self.mlp = GatedMlp(config, setup)

    def __call__(
        self, branch: Tensor, residual: Tensor | None, step: AttentionStep, kv: KVLayer
    ) -> tuple[Tensor, Tensor]:
        """(branch, residual): their sum is the hidden state after this layer.

        Shapes: all [T, D].
        Ranks: collective over tp.
        """
        normed, residual = self.attention_norm(branch, residual)
        normed, residual = self.mlp_norm(self.attention(normed, step, kv), residual)
        return self.mlp(normed), residual

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Tensors under `prefix`."""
        yield from self.attention_norm.weight_slots(f"{prefix}input_layernorm.")
        yield from self.attention.weight_slots(f"{prefix}self_attn.")
        yield from self.mlp_norm.weight_slots(f"{prefix}post_attention_layernorm.")
        yield from self.mlp.weight_slots(f"{prefix}mlp.")


class Llama:
    """This rank's shard of a Llama: parameters are empty until the loader has filled `weight_slots`."""

    def __init__(self, config: ModelConfig, setup: LayerSetup) -> None:
        self.config = config
        self.embedding = VocabEmbedding(config.vocab_size, config.hidden_size, setup)
        self.angles = RotaryAngles(config.rope, config.head_dim, setup)
        self.plan_attention = AttentionPlanner(config, setup)
        self.layers = tuple(LlamaLayer(config, setup) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, setup)
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.head = VocabHead(config.vocab_size, config.hidden_size, setup, tied_to=tied_to)

    @property
    def vocab_range(self) -> range:
        """The token ids that this rank's logits stand for."""
        return self.head.held

    def __call__(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> Tensor:
        """The normed last hidden state of every token; `kv` (one a layer) holds this step's keys and values afterwards.

        Shapes: -> [T, D].
        Ranks: collective over tp.
        """
        cos, sin = self.angles(inputs.positions)
        step = AttentionStep(cos=cos, sin=sin, slots=inputs.slots, attend=self.plan_attention(inputs.paged))
        branch, residual = self.embedding(inputs.token_ids), None
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            branch, residual = layer(branch, residual, step, layer_kv)
        normed, _ = self.norm(branch, residual)
        return normed

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
        frequencies = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
        return (frequencies, *(re.escape(name) for name in self.tied_weights))

    @property
    def tied_weights(self) -> dict[str, str]:
        """Tensors that a checkpoint may repeat, and the one that is used in their place."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.head.tied else {}
