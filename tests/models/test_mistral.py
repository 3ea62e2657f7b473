"""Mistral: config.json, and a tiny one against transformers in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_infer.models.registry import parse_config
from tests.fake_collectives import run_group
from tests.greedy_batch import greedy_batch
from tests.tiny_families import make_tiny
from tests.tiny_models import LiftedOracle

NUM_TOKENS = 6
PROMPTS = [[7], [(5 * i * i + 3) % 131 for i in range(29)], [(11 * i + i * i) % 131 for i in range(15)]]
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}


def test_as_released() -> None:
    config = parse_config(MISTRAL_7B)
    assert (config.head_dim, config.num_kv_heads, config.sliding_window) == (128, 8, 4096)
    later = parse_config({**MISTRAL_7B, "sliding_window": None, "rope_theta": 1e6})
    assert later.sliding_window is None


def test_defaults_are_those_of_transformers() -> None:
    reference = pytest.importorskip("transformers").MistralConfig()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    config = parse_config({"model_type": "mistral"} | {name: getattr(reference, name) for name in names})
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.sliding_window == reference.sliding_window
    assert config.rope.theta == reference.rope_parameters["rope_theta"]


@pytest.mark.parametrize(("tp_size", "window"), [(1, 17), (2, 3), (4, None)])
def test_tokens_and_logits_equal_the_oracle(tmp_path: Path, tp_size: int, window: int | None) -> None:
    folder = make_tiny(tmp_path, "mistral", sliding_window=window)
    oracle = LiftedOracle(folder)
    expected = [oracle.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]
    for tokens, logits in run_group(tp_size, greedy_batch(folder, PROMPTS, NUM_TOKENS)):
        assert tokens == [tokens for tokens, _ in expected]
        torch.testing.assert_close(logits, torch.stack([rows for _, rows in expected]), rtol=0, atol=1e-9)
