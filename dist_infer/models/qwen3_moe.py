"""Qwen3-MoE in config.json: queries and keys are normed head by head; some layers may be dense."""

from dataclasses import replace

from dist_infer.config import ModelConfig, MoeConfig
from dist_infer.models.config_fields import Fields
from dist_infer.models.family import (
    Defaults,
    Family,
    check_top_k,
    number_of_experts,
    parse_decoder,
    with_optional_window,
)

_DEFAULTS = Defaults(max_position_embeddings=32768, num_kv_heads=4)


def parse_qwen3_moe(fields: Fields) -> ModelConfig:
    """Errors: UsageError naming the field."""
    config = parse_decoder(fields, "Qwen3MoeForCausalLM", _DEFAULTS)
    moe = MoeConfig(
        num_experts=number_of_experts(fields, "num_experts", "num_local_experts"),
        top_k=fields.positive_int("num_experts_per_tok", default=8),
        expert_intermediate_size=fields.positive_int("moe_intermediate_size", default=768),
        moe_layers=_moe_layers(fields, config.num_layers),
        scoring="softmax",
        renormalise=fields.boolean("norm_topk_prob", default=False),
    )
    check_top_k(moe.num_experts, moe.top_k)
    return replace(with_optional_window(fields, config), qk_norm="head", moe=moe)


def _moe_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    step = fields.positive_int("decoder_sparse_step", default=1)
    dense = fields.ints("mlp_only_layers")
    return tuple(idx for idx in range(num_layers) if (idx + 1) % step == 0 and idx not in dense)


QWEN3_MOE = Family(architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", parse=parse_qwen3_moe)
