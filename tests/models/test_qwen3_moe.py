"""Qwen3-MoE in config.json."""

from typing import Any

import pytest

from dist_infer.models.registry import parse_config

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_as_released() -> None:
    config = parse_config(QWEN3_30B_A3B)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.top_k, config.moe.expert_intermediate_size) == (128, 8, 768)
    assert (config.moe.scoring, config.moe.renormalise, config.moe.has_bias) == ("softmax", True, False)
    assert config.moe.moe_layers == tuple(range(48))
    assert (config.qk_norm, config.head_dim, config.rope.theta) == ("head", 128, 1e6)


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"mlp_only_layers": [0, 4]}, (1, 2, 3, 5)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, (2,)),
    ],
)
def test_some_layers_are_dense(change: dict[str, Any], layers: tuple[int, ...]) -> None:
    config = parse_config({**QWEN3_30B_A3B, "num_hidden_layers": 6, **change})
    assert config.moe is not None
    assert config.moe.moe_layers == layers


def test_defaults_are_those_of_transformers() -> None:
    reference = pytest.importorskip("transformers").Qwen3MoeConfig()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    minimal = {"model_type": "qwen3_moe", "num_local_experts": 128} | {name: getattr(reference, name) for name in names}
    config = parse_config(minimal)
    assert config.moe is not None
    assert config.moe.top_k == reference.num_experts_per_tok
    assert config.moe.renormalise == reference.norm_topk_prob
    assert config.moe.expert_intermediate_size == reference.moe_intermediate_size
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.max_position_embeddings == reference.max_position_embeddings


def test_a_window_matters_only_when_it_is_used() -> None:
    for used, layers, window in ((False, 0, None), (True, 0, 4096), (True, 48, None)):
        change = {"sliding_window": 4096, "use_sliding_window": used, "max_window_layers": layers}
        assert parse_config({**QWEN3_30B_A3B, **change}).sliding_window == window
