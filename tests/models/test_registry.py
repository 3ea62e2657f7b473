"""config.json to ModelConfig, and the refusal of everything that isn't supported."""

import json
from pathlib import Path

import pytest
import torch

from dist_infer.comm.collectives import SingleCollectives
from dist_infer.config import ModelConfig, RopeConfig
from dist_infer.errors import UsageError
from dist_infer.models.registry import build_model, parse_config
from tests.tiny_models import LLAMA3_ROPE

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
MINIMAL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}


def test_a_released_config() -> None:
    assert parse_config(SMOLLM2) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_defaults_are_those_of_transformers() -> None:
    config = parse_config(MINIMAL)
    reference = pytest.importorskip("transformers").LlamaConfig(**MINIMAL)
    assert (config.num_kv_heads, config.head_dim) == (reference.num_key_value_heads, reference.head_dim)
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (reference.rms_norm_eps, reference.tie_word_embeddings)
    assert (config.attention_bias, config.mlp_bias) == (reference.attention_bias, reference.mlp_bias)
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert (config.dtype, config.eos_token_ids, config.bos_token_id) == ("float32", (), None)


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"eos_token_id": [128001, 128008, 128009]}, "eos_token_ids", (128001, 128008, 128009)),
        ({"eos_token_id": None}, "eos_token_ids", ()),
        ({"head_dim": 128}, "head_dim", 128),
        ({"head_dim": None}, "head_dim", 64),
        ({"torch_dtype": None, "dtype": "float16"}, "dtype", "float16"),
        ({"torch_dtype": "torch.float64"}, "dtype", "float64"),
        ({"hidden_act": "swish"}, "num_heads", 9),
        ({"architectures": ["Other", "LlamaForCausalLM"]}, "architecture", "LlamaForCausalLM"),
        ({"mlp_bias": True}, "mlp_bias", True),
    ],
)
def test_variants(change: dict[str, object], field: str, value: object) -> None:
    assert getattr(parse_config({**SMOLLM2, **change}), field) == value


def test_what_transformers_saves_is_read_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    saved = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=dict(LLAMA3_ROPE),
        eos_token_id=[3, 5],
    )
    transformers.LlamaForCausalLM(saved).bfloat16().save_pretrained(tmp_path)
    config = parse_config(json.loads((tmp_path / "config.json").read_text()))
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size) == (4, 2, 12, 32)
    assert (config.attention_bias, config.mlp_bias, config.tie_word_embeddings) == (True, False, True)
    assert (config.rope.kind, config.rope.factor, config.rope.original_max_position_embeddings) == ("llama3", 8.0, 32)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (3, 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"architectures \['GPT2LMHeadModel'\] is not supported; supported: LlamaForCausalLM, MistralForCausalLM",
        ),
        ({"architectures": [], "model_type": "gpt2"}, "model_type 'gpt2' is not known; supported: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu, swish"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type 'dynamic' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
        ({"torch_dtype": "int8"}, "dtype 'int8' is not supported; supported: float64, float32, bfloat16, float16"),
        ({"num_key_value_heads": 2}, "num_attention_heads 9 is not a multiple of num_key_value_heads 2"),
        ({"hidden_size": 577}, "hidden_size 577 is not a multiple of num_attention_heads 9: give head_dim"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": "30"}, "num_hidden_layers is '30'; it must be an integer above 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
    ],
)
def test_what_is_not_supported_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_config({**SMOLLM2, **change})


def test_build_model_chooses_kernels_once_and_says_so() -> None:
    lines: list[str] = []
    model = build_model(
        parse_config(MINIMAL),
        tp=SingleCollectives(),
        dtype="bfloat16",
        device=torch.device("cpu"),
        kernel_orders={"rms_norm": "+torch", "linear": "torch"},
        on_choice=lines.append,
    )
    ops = {line.split(":")[0].split(".")[0] for line in lines}
    assert ops == {"embedding", "gated_linear", "linear", "paged_attention", "rms_norm", "rotary", "rotary_angles"}
    assert all(slot.into.dtype == torch.bfloat16 for slot in model.weight_slots())
    with pytest.raises(UsageError, match="rms_norm has no library 'nope'"):
        build_model(
            parse_config(MINIMAL),
            tp=SingleCollectives(),
            dtype=torch.float32,
            device=torch.device("cpu"),
            kernel_orders={"rms_norm": "nope"},
        )
