"""MiniMax-M2 in config.json."""

from typing import Any

import pytest

from dist_infer.errors import UsageError
from dist_infer.models.registry import parse_config

M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def test_as_released() -> None:
    config = parse_config(M2)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.top_k, config.moe.expert_intermediate_size) == (256, 8, 1536)
    assert (config.moe.scoring, config.moe.renormalise, config.moe.has_bias) == ("sigmoid", True, True)
    assert (config.moe.num_groups, config.moe.routed_scaling_factor) == (1, 1.0)
    assert (config.qk_norm, config.rope.rotary_dim, config.rope.theta) == ("projection", 64, 5e6)
    assert config.num_mtp_layers == 3


def test_the_newer_name_of_the_rotary_part() -> None:
    changed = {**M2, "rotary_dim": None, "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}}
    assert parse_config(changed).rope.rotary_dim == 64
    assert parse_config({**M2, "rotary_dim": 128}).rope.rotary_dim is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: sigmoid"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type 'per_head' is not supported"),
        ({"use_qk_norm": False}, "use_qk_norm is false"),
        ({"use_routing_bias": False}, "use_routing_bias is false"),
        ({"shared_intermediate_size": 8}, "shared_intermediate_size is set"),
        ({"attn_type_list": [1, 0]}, "attn_type_list names layers other than full attention"),
        ({"rotary_dim": 130}, "130 rotary channels of a head_dim of 128"),
        ({"rotary_dim": 63}, "63 rotary channels"),
    ],
)
def test_what_is_not_supported_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_config({**M2, **change})
