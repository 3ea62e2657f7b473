"""Tiny random checkpoints of all families but Llama, for the float64 oracle of tiny_models.

Weights are large, norms far from 1, and router biases large enough to change the choice. Numbers are odd where a family
allows it: 5 or 6 experts, 3 KV groups, vocabularies and widths that no rank count divides.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from dist_infer.comm.collectives import SingleCollectives
from dist_infer.models.registry import build_model, parse_config

safetensors_torch = pytest.importorskip("safetensors.torch")

_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 131,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float64",
    }
)
_YARN: Mapping[str, Any] = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
        "original_max_position_embeddings": 64,
    }
)
_LATENT: Mapping[str, Any] = MappingProxyType(
    {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 6,
        "intermediate_size": 37,
        "moe_intermediate_size": 19,
        "rms_norm_eps": 1e-5,
    }
)
DENSE_CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2": {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "hidden_size": 48,
            "intermediate_size": 37,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
        "qwen3": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "intermediate_size": 37,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "use_sliding_window": False,
        },
        "mistral": {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 37,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
)
# with experts
CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "deepseek-v3": {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **_LATENT,
            "q_lora_rank": 14,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": True,
            "rope_parameters": dict(_YARN),
            "num_nextn_predict_layers": 1,
        },
        "deepseek-v2-lite": {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            **_LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "deepseek-v2": {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            **_LATENT,
            "q_lora_rank": 14,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "attention_bias": True,
            "rope_parameters": dict(_YARN),
        },
        "qwen3-moe": {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "intermediate_size": 37,
            "moe_intermediate_size": 19,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "mixtral": {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 23,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        "minimax-m2": {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "intermediate_size": 19,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    }
)


def make_tiny(
    folder: Path, family: str, *, std: float = 0.25, seed: int = 0, mtp: bool = False, **changes: Any
) -> Path:
    """Writes a random model of a family as a Hugging Face folder; `mtp` adds tensors of a layer behind the last."""
    hf_config = {**_COMMON, **(CONFIGS.get(family) or DENSE_CONFIGS[family]), **changes}
    model = build_model(
        parse_config(hf_config), tp=SingleCollectives(), dtype=torch.float64, device=torch.device("meta")
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for slot in model.weight_slots():
        tensors[slot.name] = _values(slot.name, slot.shape, std, generator)
    if mtp:
        prefix = f"model.layers.{hf_config['num_hidden_layers']}."
        for name in ("enorm.weight", "eh_proj.weight", "mlp.experts.0.up_proj.weight"):
            tensors[prefix + name] = torch.full((3, 5), float("nan"), dtype=torch.float64)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2))
    safetensors_torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _values(name: str, shape: tuple[int, ...], std: float, generator: torch.Generator) -> torch.Tensor:
    if "norm" in name:
        return 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name.endswith((".gate.weight", "e_score_correction_bias")):
        # transformers keeps these in float32 whatever the model's dtype, so the file holds nothing finer.
        return (values * 0.3).float().double()
    return values * std
