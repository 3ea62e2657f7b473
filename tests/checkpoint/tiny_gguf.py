"""Writes a small random Llama or Qwen as a GGUF file, as llama.cpp's converter lays it out. Skip without gguf."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers

Float32Array = npt.NDArray[np.float32]
HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TOKENS = (
    SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES] + ["<tool>"]
)
# By transformers' formula for rope type llama3 (factor 32, 1, 4, 8192) with theta 50000 and 16 channels.
ROPE_FACTORS = np.array([1, 1, 1, 1, 1, 5.12194, 32, 32], np.float32)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@dataclass
class TinyModel:
    """The float32 values that a correct conversion gives, by their names in a Hugging Face folder."""

    weights: dict[str, Float32Array] = field(default_factory=dict)


def write_tiny_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    tied: bool = True,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q4_1,
    metadata: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
    with_rope_factors: bool = False,
) -> TinyModel:
    """`metadata` replaces values (None: leaves them out); `renamed` replaces names of tensors.

    `with_rope_factors` adds what llama.cpp's converter writes for a Llama 3 with factor 32.
    """
    writer, model = gguf.GGUFWriter(path, arch=architecture), TinyModel()
    _write_metadata(writer, architecture, dict(metadata or {}))
    rng = np.random.default_rng(7)
    kv_rows = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": ("model.embed_tokens", (len(TOKENS), HIDDEN)), "output_norm": ("model.norm", (HIDDEN,))}
    if not tied:
        shapes["output"] = ("lm_head", (len(TOKENS), HIDDEN))
    for i in range(LAYERS):
        new = f"model.layers.{i}"
        shapes |= {
            f"blk.{i}.attn_norm": (f"{new}.input_layernorm", (HIDDEN,)),
            f"blk.{i}.ffn_norm": (f"{new}.post_attention_layernorm", (HIDDEN,)),
            f"blk.{i}.attn_q": (f"{new}.self_attn.q_proj", (HIDDEN, HIDDEN)),
            f"blk.{i}.attn_k": (f"{new}.self_attn.k_proj", (kv_rows, HIDDEN)),
            f"blk.{i}.attn_v": (f"{new}.self_attn.v_proj", (kv_rows, HIDDEN)),
            f"blk.{i}.attn_output": (f"{new}.self_attn.o_proj", (HIDDEN, HIDDEN)),
            f"blk.{i}.ffn_gate": (f"{new}.mlp.gate_proj", (FFN, HIDDEN)),
            f"blk.{i}.ffn_up": (f"{new}.mlp.up_proj", (FFN, HIDDEN)),
            f"blk.{i}.ffn_down": (f"{new}.mlp.down_proj", (HIDDEN, FFN)),
        }
        shapes |= _own_shapes(architecture, i, kv_rows)
    for name, (new, shape) in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else quantisation
        if name == "token_embd":
            kind = gguf.GGMLQuantizationType.Q8_0
        suffix = "" if name.endswith(".bias") else ".weight"
        model.weights[f"{new}{suffix}"] = dequantize(quantize(values, kind), kind).reshape(shape)
        stored = quantize(_interleaved(name, values) if architecture == "llama" else values, kind)
        old = f"{name}{suffix}"
        writer.add_tensor((renamed or {}).get(old, old), stored, raw_dtype=kind)
    if with_rope_factors:
        writer.add_tensor("rope_freqs.weight", ROPE_FACTORS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _own_shapes(architecture: str, layer: int, kv_rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensors that only this architecture has."""
    rows = {"q": HIDDEN, "k": kv_rows, "v": kv_rows}
    block, new = f"blk.{layer}", f"model.layers.{layer}.self_attn"
    if architecture == "qwen2":
        return {f"{block}.attn_{part}.bias": (f"{new}.{part}_proj.bias", (rows[part],)) for part in "qkv"}
    if architecture == "qwen3":
        return {f"{block}.attn_{part}_norm": (f"{new}.{part}_norm", (HIDDEN // HEADS,)) for part in "qk"}
    return {}


def _interleaved(name: str, values: Float32Array) -> Float32Array:
    """Rows in the order that llama.cpp's rotary embedding wants, built row by row: x0, y0, x1, y1, ... in each head."""
    heads = HEADS if name.endswith("attn_q") else KV_HEADS if name.endswith("attn_k") else 0
    if not heads:
        return values
    half = len(values) // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return values[order]


def _write_metadata(writer: gguf.GGUFWriter, architecture: str, replaced: dict[str, Any]) -> None:
    kinds = [1] * len(TOKENS)  # normal
    kinds[: len(SPECIAL)] = [3] * len(SPECIAL)  # control
    kinds[-1] = 4  # user defined
    values: dict[str, Any] = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": FFN,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 50000.0,
        f"{architecture}.rope.dimension_count": HIDDEN // HEADS,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in (values | replaced).items():
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add[type(value)](key, value)
