"""Mixtral in config.json."""

from typing import Any

import pytest

from dist_infer.errors import UsageError
from dist_infer.models.registry import parse_config

MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32000,
}


def test_as_released() -> None:
    config = parse_config(MIXTRAL)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.top_k, config.moe.expert_intermediate_size) == (8, 2, 14336)
    assert (config.moe.scoring, config.moe.renormalise, config.moe.shared_intermediate_size) == ("softmax", True, 0)
    assert config.moe.moe_layers == tuple(range(32))
    assert (config.qk_norm, config.mla, config.rope.theta) == ("none", None, 1e6)
    assert config.sliding_window is None
    assert parse_config({**MIXTRAL, "sliding_window": 4096}).sliding_window == 4096


def test_defaults_are_those_of_transformers() -> None:
    reference = pytest.importorskip("transformers").MixtralConfig(num_local_experts=8)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    config = parse_config(
        {"model_type": "mixtral", "num_local_experts": 8} | {name: getattr(reference, name) for name in names}
    )
    assert config.moe is not None
    assert config.moe.top_k == reference.num_experts_per_tok
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.rope.theta == reference.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": None}, "num_local_experts is missing"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
    ],
)
def test_what_is_not_supported_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_config({**MIXTRAL, **change})
