"""Turns a Llama or Qwen in a GGUF file into a model folder with float32 weights, tokenizer and chat template.

The weights are the dequantised values, exactly. Three things differ between the formats. Names: see `_NAMES`. Rotary
embedding: for a Llama, GGUF stores query and key rows of each head in interleaved pairs (x0, y0, x1, y1, ...), the
folder in halves (x0, x1, ..., y0, y1, ...). Tokenizer: see `gguf_tokenizer`.

Whoever changes what is written raises `default_model.CONVERTER_VERSION`.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; names of tensors are llama.cpp's.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_infer.checkpoint.gguf_config import ROPE_FACTORS, read_architecture, read_config, read_generation_config
from dist_infer.checkpoint.gguf_file import GGUFFile
from dist_infer.checkpoint.gguf_tokenizer import read_tokenizer, tokenizer_config
from dist_infer.checkpoint.safetensors import SINGLE_NAME, write_safetensors
from dist_infer.errors import CheckpointError

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def convert_gguf(path: Path, out_dir: Path, *, on_tensor: Callable[[str], None] = lambda name: None) -> None:
    """Writes the model folder `out_dir`, which must not exist; it appears complete or not at all.

    Tensors are converted one at a time. A killed conversion leaves a folder beside it whose name starts with
    `partial_prefix(out_dir)`.

    Errors: CheckpointError naming file and tensor or metadata key that can't be converted.
    """
    file = GGUFFile(path)
    config = read_config(file)
    names = _new_names(file)
    shapes = {names[name]: file.shape(name) for name in names}
    files = {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(read_generation_config(file), indent=2),
        "tokenizer.json": read_tokenizer(file).to_str(),
        "tokenizer_config.json": json.dumps(tokenizer_config(file, config), indent=2, ensure_ascii=False),
    }
    partial = Path(tempfile.mkdtemp(prefix=partial_prefix(out_dir), dir=out_dir.parent))
    try:
        for name, text in files.items():
            _write_durably(partial / name, text)
        write_safetensors(partial / SINGLE_NAME, shapes, _tensors(file, config, names, on_tensor))
        partial.rename(out_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def partial_prefix(out_dir: Path) -> str:
    """How the names of unfinished conversions into `out_dir` start."""
    return f".{out_dir.name}.partial-"


def _new_names(file: GGUFFile) -> dict[str, str]:
    """Of the tensors that a folder has too, in the order of the file."""
    key, architecture = read_architecture(file)
    known = {**_NAMES, **architecture.tensors}
    names = {}
    for name in file.tensors:
        if name == ROPE_FACTORS:
            continue  # stands in config.json
        block = _BLOCK.fullmatch(name)
        new = known.get(block[2] if block else name)
        if new is None:
            raise CheckpointError(f"{file.path}: tensor {name!r} is unknown for the architecture {key}")
        names[name] = f"model.layers.{block[1]}.{new}" if block else new
    return names


def _tensors(
    file: GGUFFile, config: Mapping[str, Any], names: Mapping[str, str], on_tensor: Callable[[str], None]
) -> Iterator[npt.NDArray[np.float32]]:
    _, architecture = read_architecture(file)
    heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    for name in names:
        values = file.values(name)
        num_heads = heads.get(".".join(name.split(".")[2:]))
        yield halves_from_pairs(values, num_heads) if num_heads and architecture.has_pairs else values
        on_tensor(name)


def halves_from_pairs(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Reorders the rows of each head from (x0, y0, x1, y1, ...) to (x0, x1, ..., y0, y1, ...).

    Shapes: [N * H, D] -> [N * H, D].
    """
    return rows.reshape(num_heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
