"""Mixtral in config.json: every layer routes each token to a few of its experts."""

from dataclasses import replace

from dist_infer.config import ModelConfig, MoeConfig
from dist_infer.layers.moe import MoeNames
from dist_infer.models.config_fields import Fields
from dist_infer.models.family import (
    Defaults,
    Family,
    check_top_k,
    number_of_experts,
    parse_decoder,
    window_of_all_layers,
)

_DEFAULTS = Defaults(max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e6, num_kv_heads=8)


def parse_mixtral(fields: Fields) -> ModelConfig:
    """Errors: UsageError naming the field."""
    config = parse_decoder(fields, "MixtralForCausalLM", _DEFAULTS)
    moe = MoeConfig(
        num_experts=number_of_experts(fields, "num_local_experts", "num_experts"),
        top_k=fields.positive_int("num_experts_per_tok", default=2),
        expert_intermediate_size=config.intermediate_size,
        moe_layers=tuple(range(config.num_layers)),
        scoring="softmax",
        renormalise=True,
    )
    check_top_k(moe.num_experts, moe.top_k)
    return replace(config, moe=moe, sliding_window=window_of_all_layers(fields, config))


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    parse=parse_mixtral,
    moe_names=MoeNames(block="block_sparse_moe.", gate="w1", up="w3", down="w2"),
)
