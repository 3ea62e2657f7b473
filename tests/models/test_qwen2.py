"""Qwen2 and Qwen2.5: config.json, and a tiny one against transformers in float64."""

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
QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def test_as_released() -> None:
    config = parse_config(QWEN25_7B)
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, False, False)
    assert (config.head_dim, config.qk_norm, config.sliding_window) == (128, "none", None)


def test_defaults_are_those_of_transformers() -> None:
    reference = pytest.importorskip("transformers").Qwen2Config()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    config = parse_config({"model_type": "qwen2"} | {name: getattr(reference, name) for name in names})
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.rope.theta == reference.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "window", "everywhere"),
    [
        ({"use_sliding_window": False}, None, True),
        ({"max_window_layers": 28}, None, True),
        ({"max_window_layers": 21}, 4096, False),
        ({"max_window_layers": 0}, 4096, True),
        ({"max_window_layers": 0, "sliding_window": 40000}, None, True),
        ({"layer_types": ["full_attention"] * 28}, None, True),
        ({"layer_types": ["sliding_attention", "full_attention"] * 14}, 4096, False),
        ({"layer_types": ["sliding_attention"] * 28}, 4096, True),
    ],
)
def test_a_window_counts_where_layers_use_it(change: dict[str, Any], window: int | None, everywhere: bool) -> None:
    config = parse_config({**QWEN25_7B, "sliding_window": 4096, "use_sliding_window": True, **change})
    assert (config.sliding_window, config.all_windowed) == (window, everywhere)


@pytest.mark.parametrize(("tp_size", "window"), [(1, None), (2, 9), (4, None)])
def test_tokens_and_logits_equal_the_oracle(tmp_path: Path, tp_size: int, window: int | None) -> None:
    """The window in all layers."""
    folder = make_tiny(
        tmp_path, "qwen2", use_sliding_window=window is not None, sliding_window=window, max_window_layers=0
    )
    oracle = LiftedOracle(folder)
    expected = [oracle.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]
    for tokens, logits in run_group(tp_size, greedy_batch(folder, PROMPTS, NUM_TOKENS)):
        assert tokens == [tokens for tokens, _ in expected]
        torch.testing.assert_close(logits, torch.stack([rows for _, rows in expected]), rtol=0, atol=1e-9)
