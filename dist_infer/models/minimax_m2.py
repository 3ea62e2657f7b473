"""MiniMax-M2 in config.json: QK norm over the whole projection, partial rotary, sigmoid router with a bias."""

from dataclasses import replace

from dist_infer.config import ModelConfig, MoeConfig
from dist_infer.errors import UsageError
from dist_infer.layers.moe import MoeNames
from dist_infer.models.config_fields import Fields
from dist_infer.models.family import Defaults, Family, check_top_k, number_of_experts, parse_decoder

_DEFAULTS = Defaults(max_position_embeddings=196608, rope_theta=5e6, num_kv_heads=8, head_dim=128)


def parse_minimax_m2(fields: Fields) -> ModelConfig:
    """Errors: UsageError naming the field."""
    fields.one_of("scoring_func", ("sigmoid",), default="sigmoid")
    fields.one_of("qk_norm_type", ("per_layer",), default="per_layer")
    for name in ("use_qk_norm", "use_routing_bias"):
        if not fields.boolean(name, default=True):
            raise UsageError(f"config.json: {name} is false; only true is supported for this architecture")
    fields.refuse_if_set("shared_intermediate_size", "a shared expert is not supported for this architecture")
    if any(kind != 1 for kind in fields.ints("attn_type_list")):
        raise UsageError("config.json: attn_type_list names layers other than full attention (1)")
    config = parse_decoder(fields, "MiniMaxM2ForCausalLM", _DEFAULTS, partial_rotary=True)
    moe = MoeConfig(
        num_experts=number_of_experts(fields, "num_local_experts", "num_experts"),
        top_k=fields.positive_int("num_experts_per_tok", default=8),
        expert_intermediate_size=config.intermediate_size,
        moe_layers=tuple(range(config.num_layers)),
        scoring="sigmoid",
        renormalise=True,
        has_bias=True,
    )
    check_top_k(moe.num_experts, moe.top_k)
    return replace(config, qk_norm="projection", moe=moe, num_mtp_layers=fields.count("num_mtp_modules", default=0))


MINIMAX_M2 = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    parse=parse_minimax_m2,
    moe_names=MoeNames(block="block_sparse_moe.", router_bias="e_score_correction_bias", gate="w1", up="w3", down="w2"),
)
