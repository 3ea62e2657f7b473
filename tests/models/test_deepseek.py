"""DeepSeek-V2 and V3 in config.json: released numbers, defaults of transformers, refusals."""

import math
from typing import Any

import pytest

from dist_infer.config import MlaConfig, ModelConfig
from dist_infer.errors import UsageError
from dist_infer.models.registry import parse_config

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}


def moe_of(config: ModelConfig) -> Any:
    assert config.moe is not None
    return config.moe


def test_v3_as_released() -> None:
    config = parse_config(V3)
    moe = moe_of(config)
    assert config.mla == MlaConfig(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    assert (config.head_dim, config.num_kv_heads, config.num_mtp_layers, config.dtype) == (192, 128, 1, "bfloat16")
    assert (moe.num_experts, moe.top_k, moe.expert_intermediate_size, moe.shared_intermediate_size) == (
        256,
        8,
        2048,
        2048,
    )
    assert moe.moe_layers == tuple(range(3, 61))
    assert (moe.scoring, moe.renormalise, moe.renorm_epsilon, moe.has_bias) == ("sigmoid", True, 1e-20, True)
    assert (moe.num_groups, moe.num_kept_groups, moe.group_score) == (8, 4, "top2_sum")
    assert (config.rope.kind, config.rope.interleaved, config.rope.rotary_dim) == ("yarn", True, 64)
    assert config.rope.angle_factor == 1.0
    assert 192**-0.5 * config.rope.score_factor == pytest.approx(0.13523, abs=1e-5)


def test_v2_lite_as_released() -> None:
    config = parse_config(V2_LITE)
    moe = moe_of(config)
    assert config.mla is not None
    assert config.mla.q_lora_rank is None
    assert config.num_mtp_layers == 0
    assert (moe.num_experts, moe.top_k, moe.shared_intermediate_size) == (64, 6, 2816)
    assert (moe.scoring, moe.renormalise, moe.has_bias, moe.num_groups) == ("softmax", False, False, 1)
    assert config.rope.score_factor == pytest.approx((0.1 * 0.707 * math.log(40) + 1) ** 2)


def test_v2_keeps_groups_only_when_the_method_does() -> None:
    grouped = {**V2_LITE, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    moe = moe_of(parse_config(grouped))
    assert (moe.num_groups, moe.num_kept_groups, moe.group_score) == (8, 3, "max")
    assert moe_of(parse_config({**grouped, "topk_method": "greedy"})).num_groups == 1


@pytest.mark.parametrize(("version", "config"), [("V2", V2_LITE), ("V3", V3)])
def test_defaults_are_those_of_transformers(version: str, config: dict[str, Any]) -> None:
    """What is left out means the same there. A q_lora_rank that is null is not one that is left out."""
    transformers = pytest.importorskip("transformers")
    kept = (
        "architectures",
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
        "intermediate_size",
    )
    minimal = {name: config[name] for name in kept} | {
        "num_experts_per_tok": 4,
        "n_routed_experts": 64,
        "moe_intermediate_size": 512,
    }
    reference = getattr(transformers, f"Deepseek{version}Config")(**minimal)
    ours = parse_config(minimal)
    assert ours.mla is not None
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        assert getattr(ours.mla, name) == getattr(reference, name), name
    moe = moe_of(ours)
    assert moe.moe_layers[0] == reference.first_k_dense_replace
    assert moe.shared_intermediate_size == reference.n_shared_experts * 512
    assert moe.routed_scaling_factor == reference.routed_scaling_factor
    assert moe.renormalise == reference.norm_topk_prob
    assert (moe.num_groups, moe.num_kept_groups) == (reference.n_group or 1, reference.topk_group or 1)
    assert ours.max_position_embeddings == reference.max_position_embeddings
    assert ours.rope.theta == reference.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: sigmoid"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; supported: noaux_tc"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq is not 1"),
        (V3, {"n_group": 7}, "n_group 7 does not divide the 256 experts"),
        (V3, {"topk_group": 9}, "topk_group 9 is more than n_group 8"),
        (V3, {"num_experts_per_tok": 129}, "num_experts_per_tok 129 is more than the 128 experts to choose from"),
        (V3, {"num_key_value_heads": 64}, "num_key_value_heads 64 differs from num_attention_heads 128"),
        (V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        (V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
        (V2_LITE, {"mlp_bias": True}, "mlp_bias is set; biases of MLPs are not supported"),
        (V3, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        (V3, {"n_group": 256, "topk_group": 128}, "n_group 256 leaves one expert a group"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported; supported: softmax"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is true"),
        (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": None}, "n_group is missing"),
    ],
)
def test_what_is_not_supported_is_refused(base: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_config({**base, **change})
