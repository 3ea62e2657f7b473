"""Qwen3: config.json, and a tiny one against transformers in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_infer.models.registry import parse_config
from tests.fake_collectives import run_group
from tests.greedy_batch import greedy_batch
from tests.tiny_families import make_tiny
from tests.tiny_models import LiftedOracle

PROMPTS = [[7], [(5 * i * i + 3) % 131 for i in range(29)]]
NUM_TOKENS = 6
QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_as_released() -> None:
    config = parse_config(QWEN3_4B)
    assert (config.qk_norm, config.head_dim, config.num_heads * config.head_dim) == ("head", 128, 4096)
    assert (config.attention_bias, config.output_bias, config.sliding_window) == (False, False, None)


def test_defaults_are_those_of_transformers() -> None:
    reference = pytest.importorskip("transformers").Qwen3Config()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    config = parse_config({"model_type": "qwen3"} | {name: getattr(reference, name) for name in names})
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == reference.head_dim
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.rope.theta == reference.rope_parameters["rope_theta"]


@pytest.mark.parametrize(("tp_size", "attention_bias"), [(1, False), (2, True), (4, False)])
def test_tokens_and_logits_equal_the_oracle(tmp_path: Path, tp_size: int, attention_bias: bool) -> None:
    folder = make_tiny(tmp_path, "qwen3", attention_bias=attention_bias)
    oracle = LiftedOracle(folder)
    expected = [oracle.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]
    for tokens, logits in run_group(tp_size, greedy_batch(folder, PROMPTS, NUM_TOKENS)):
        assert tokens == [tokens for tokens, _ in expected]
        torch.testing.assert_close(logits, torch.stack([rows for _, rows in expected]), rtol=0, atol=1e-9)
