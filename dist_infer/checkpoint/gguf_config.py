"""config.json and generation_config.json of a model in a GGUF file; what this project doesn't compute is refused.

Source: the keys of llama.cpp, and its conversion from Hugging Face folders.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from dist_infer.checkpoint.gguf_file import GGUFFile
from dist_infer.errors import CheckpointError

ROPE_FACTORS = "rope_freqs.weight"  # a tensor in place of metadata: what each frequency is divided by
_LLAMA3_ROPE = MappingProxyType(
    {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFArchitecture:
    """How an architecture is called in a folder, what more it has in a file, and how the rows of its heads lie."""

    name: str
    model_type: str
    has_pairs: bool  # query and key rows of a head are interleaved pairs, not halves
    tensors: Mapping[str, str] = field(default_factory=dict)  # of a block, beside those that all have
    fields: Mapping[str, object] = field(default_factory=dict)  # of config.json


ARCHITECTURES: Mapping[str, GGUFArchitecture] = MappingProxyType(
    {
        "llama": GGUFArchitecture(
            name="LlamaForCausalLM",
            model_type="llama",
            has_pairs=True,
            fields={"attention_bias": False, "mlp_bias": False},
        ),
        "qwen2": GGUFArchitecture(
            name="Qwen2ForCausalLM",
            model_type="qwen2",
            has_pairs=False,
            tensors={f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
            fields={"use_sliding_window": False},
        ),
        "qwen3": GGUFArchitecture(
            name="Qwen3ForCausalLM",
            model_type="qwen3",
            has_pairs=False,
            tensors={f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"},
            fields={"attention_bias": False, "use_sliding_window": False},
        ),
    }
)


def read_architecture(file: GGUFFile) -> tuple[str, GGUFArchitecture]:
    """Its name, which its metadata keys begin with, and what it is. Errors: CheckpointError for an unknown one."""
    name = file.need("general.architecture", str)
    if name not in ARCHITECTURES:
        raise file.refuse("general.architecture", name, ", ".join(ARCHITECTURES))
    return name, ARCHITECTURES[name]


def read_config(file: GGUFFile) -> dict[str, object]:
    """The fields of config.json.

    Errors: CheckpointError naming the key that can't be converted.
    """
    key, architecture = read_architecture(file)
    for name, plain in (("rope.scaling.type", "none"), ("expert_count", 0), ("attention.sliding_window", 0)):
        value = file.get(f"{key}.{name}", object)
        if value is not None and value != plain:
            raise file.refuse(f"{key}.{name}", value, repr(plain))
    num_heads = file.need(f"{key}.attention.head_count", int)
    hidden_size = file.need(f"{key}.embedding_length", int)
    head_dim = file.get(f"{key}.attention.key_length", int) or hidden_size // num_heads
    for name in ("rope.dimension_count", "attention.value_length"):
        value = file.get(f"{key}.{name}", int)
        if value is not None and value != head_dim:
            raise file.refuse(f"{key}.{name}", value, f"the head dim {head_dim}")
    rope_theta = _shortest(file.get(f"{key}.rope.freq_base", float) or 10000.0)
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.need(f"{key}.feed_forward_length", int),
        "num_hidden_layers": file.need(f"{key}.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.get(f"{key}.attention.head_count_kv", int) or num_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.need(f"{key}.context_length", int),
        "rms_norm_eps": _shortest(file.need(f"{key}.attention.layer_norm_rms_epsilon", float)),
        "rope_parameters": _rope(file, rope_theta, head_dim),
        "rope_theta": rope_theta,  # for readers that don't know rope_parameters
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float32",
        **architecture.fields,
        **_special_ids(file),
    }


def read_generation_config(file: GGUFFile) -> dict[str, object]:
    """End of text and, where it is another token, end of turn both end a generation."""
    ids = _special_ids(file)
    ends = [ids.get("eos_token_id"), file.get("tokenizer.ggml.eot_token_id", int)]
    known = list(dict.fromkeys(end for end in ends if end is not None))
    return ids | ({"eos_token_id": known[0] if len(known) == 1 else known} if known else {})


def _rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, object]:
    """Factors of frequencies are those of Llama 3, whatever its factor, or refused."""
    if ROPE_FACTORS not in file.tensors:
        return {"rope_type": "default", "rope_theta": theta}
    stored = file.values(ROPE_FACTORS)
    factor = float(stored.max())
    expected = [_llama3_factor(theta ** (-2 * idx / head_dim), factor) for idx in range(head_dim // 2)]
    if stored.shape != (len(expected),) or not np.allclose(stored, expected, rtol=1e-4):
        raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS!r} holds other factors than those of Llama 3")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3_ROPE}


def _llama3_factor(frequency: float, factor: float) -> float:
    low, high, length = _LLAMA3_ROPE.values()
    turns = length * frequency / (2 * math.pi)  # in the original context
    if turns > high:
        return 1.0
    if turns < low:
        return factor
    smooth = (turns - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _special_ids(file: GGUFFile) -> dict[str, object]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id", int) for name, key in keys.items()}
    return {name: value for name, value in ids.items() if value is not None}
