"""DeepSeek-V2 and V3 (R1 too) in config.json: latent attention, a few dense layers, then experts with a shared one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dist_infer.config import MlaConfig, ModelConfig, MoeConfig, RopeConfig
from dist_infer.errors import UsageError
from dist_infer.models.config_fields import Fields
from dist_infer.models.family import Defaults, Family, check_top_k, number_of_experts, parse_decoder
from dist_infer.models.rope_fields import parse_rope, rope_section, yarn_mscale

_V2_DEFAULTS = Defaults(max_position_embeddings=2048)
_V3_DEFAULTS = Defaults(max_position_embeddings=4096)


def parse_deepseek_v2(fields: Fields) -> ModelConfig:
    """Errors: UsageError naming the field."""
    fields.one_of("scoring_func", ("softmax",), default="softmax")
    grouped = fields.one_of("topk_method", ("greedy", "group_limited_greedy"), default="greedy") != "greedy"
    if fields.boolean("norm_topk_prob", default=False):
        raise UsageError("config.json: norm_topk_prob is true; only false is supported for this architecture")
    config = _parse_latent(fields, "DeepseekV2ForCausalLM", _V2_DEFAULTS, interleaved=True)
    return replace(
        config,
        moe=_parse_moe(
            fields,
            config,
            num_shared=fields.count("n_shared_experts", default=2),
            first_dense=fields.count("first_k_dense_replace", default=0),
            num_groups=fields.positive_int("n_group") if grouped else 1,
            num_kept_groups=fields.positive_int("topk_group") if grouped else 1,
        )(
            scoring="softmax",
            renormalise=False,
            routed_scaling_factor=fields.number("routed_scaling_factor", default=1.0),
            group_score="max",
        ),
    )


def parse_deepseek_v3(fields: Fields) -> ModelConfig:
    """Errors: UsageError naming the field."""
    fields.one_of("scoring_func", ("sigmoid",), default="sigmoid")
    fields.one_of("topk_method", ("noaux_tc",), default="noaux_tc")
    interleaved = fields.boolean("rope_interleave", default=True)
    config = _parse_latent(fields, "DeepseekV3ForCausalLM", _V3_DEFAULTS, interleaved=interleaved)
    config = replace(config, num_mtp_layers=fields.count("num_nextn_predict_layers", default=1))
    config = replace(
        config,
        moe=_parse_moe(
            fields,
            config,
            num_shared=fields.count("n_shared_experts", default=1),
            first_dense=fields.count("first_k_dense_replace", default=3),
            num_groups=fields.positive_int("n_group", default=8),
            num_kept_groups=fields.positive_int("topk_group", default=4),
        )(
            scoring="sigmoid",
            renormalise=fields.boolean("norm_topk_prob", default=True),
            renorm_epsilon=1e-20,
            routed_scaling_factor=fields.number("routed_scaling_factor", default=2.5),
            group_score="top2_sum",
            has_bias=True,
        ),
    )
    if config.moe is not None and 2 * config.moe.num_groups > config.moe.num_experts:
        raise UsageError(
            f"config.json: n_group {config.moe.num_groups} leaves one expert a group; groups are compared by their two"
            " best"
        )
    return config


def _parse_latent(fields: Fields, architecture: str, defaults: Defaults, *, interleaved: bool) -> ModelConfig:
    fields.refuse_if_set("mlp_bias", "biases of MLPs are not supported for this architecture")
    q_lora_rank = None
    if fields.get("q_lora_rank") is not None or not fields.is_written("q_lora_rank"):
        q_lora_rank = fields.positive_int("q_lora_rank", default=1536)
    mla = MlaConfig(
        q_lora_rank=q_lora_rank,
        kv_lora_rank=fields.positive_int("kv_lora_rank", default=512),
        qk_nope_head_dim=fields.positive_int("qk_nope_head_dim", default=128),
        qk_rope_head_dim=fields.positive_int("qk_rope_head_dim", default=64),
        v_head_dim=fields.positive_int("v_head_dim", default=128),
    )
    if mla.qk_rope_head_dim % 2:
        raise UsageError(f"config.json: qk_rope_head_dim {mla.qk_rope_head_dim} is odd; rotary positions need pairs")
    config = parse_decoder(
        fields,
        architecture,
        defaults,
        head_dim=mla.qk_head_dim,
        rope=partial(_parse_rope, interleaved=interleaved, rotary_dim=mla.qk_rope_head_dim),
    )
    if config.num_kv_heads != config.num_heads:
        raise UsageError(
            f"config.json: num_key_value_heads {config.num_kv_heads} differs from num_attention_heads"
            f" {config.num_heads}: latent attention has one key for each query head"
        )
    return replace(config, mla=mla)


def _parse_rope(fields: Fields, max_len: int, *, interleaved: bool, rotary_dim: int) -> RopeConfig:
    rope = replace(parse_rope(fields, max_len), interleaved=interleaved, rotary_dim=rotary_dim)
    mscale_all_dim = rope_section(fields).number_or_zero("mscale_all_dim")
    if rope.kind == "default" or not mscale_all_dim:
        return rope
    return replace(rope, score_factor=yarn_mscale(rope.factor, mscale_all_dim) ** 2)


def _parse_moe(
    fields: Fields, config: ModelConfig, *, num_shared: int, first_dense: int, num_groups: int, num_kept_groups: int
) -> Callable[..., MoeConfig]:
    """What both versions have in common; the routing is still to be given."""
    if fields.positive_int("moe_layer_freq", default=1) != 1:
        raise UsageError("config.json: moe_layer_freq is not 1; only 1 is supported")
    num_experts = number_of_experts(fields, "n_routed_experts", "num_local_experts", "num_experts")
    top_k = fields.positive_int("num_experts_per_tok")
    check_top_k(num_experts, top_k, num_groups=num_groups, num_kept_groups=num_kept_groups)
    inner = fields.positive_int("moe_intermediate_size")
    return partial(
        MoeConfig,
        num_experts=num_experts,
        top_k=top_k,
        expert_intermediate_size=inner,
        moe_layers=tuple(range(min(first_dense, config.num_layers), config.num_layers)),
        shared_intermediate_size=num_shared * inner,
        num_groups=num_groups,
        num_kept_groups=num_kept_groups,
    )


DEEPSEEK_V2 = Family(architecture="DeepseekV2ForCausalLM", model_type="deepseek_v2", parse=parse_deepseek_v2)
DEEPSEEK_V3 = Family(architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3", parse=parse_deepseek_v3)
