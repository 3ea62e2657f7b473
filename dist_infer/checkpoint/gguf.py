"""Turns a Llama model in a GGUF file into a model folder with float32 weights, tokenizer and chat template.

The weights are the dequantised values, exactly. Three things differ between the formats. Names: see `_NAMES`. Rotary
embedding: GGUF stores query and key rows of each head in interleaved pairs (x0, y0, x1, y1, ...), the folder in halves
(x0, x1, ..., y0, y1, ...). Tokenizer: GGUF names the pre-tokenizer by a word; only those whose result was compared with
llama.cpp are known here.

Whoever changes what is written raises `default_model.CONVERTER_VERSION`.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; names of tensors and pre-tokenizers are llama.cpp's.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

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
_PRE_TOKENIZERS = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
}
_CONTROL, _USER_DEFINED = 3, 4  # token types
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

T = TypeVar("T")


class _GGUF:
    """Checked access to the metadata of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, LookupError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"{path}: truncated or no GGUF file: {error}") from error
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, kind: type[T]) -> T | None:
        """A metadata value, None when it is absent."""
        field = self._reader.get_field(key)
        if field is None:
            return None
        value = field.contents()
        if not isinstance(value, kind):
            raise CheckpointError(f"{self.path}: {key} is {type(value).__name__}, not {kind.__name__}")
        return value

    def need(self, key: str, kind: type[T]) -> T:
        """A metadata value that must be there."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.path}: {key} is missing")
        return value

    def refuse(self, key: str, value: object, known: object) -> CheckpointError:
        """The error for a value that can't be converted."""
        return CheckpointError(f"{self.path}: {key} = {value!r} can't be converted, only {known}")


def convert_gguf(path: Path, out_dir: Path, *, on_tensor: Callable[[str], None] = lambda name: None) -> None:
    """Writes the model folder `out_dir`, which must not exist; it appears complete or not at all.

    Tensors are converted one at a time. A killed conversion leaves a folder beside it whose name starts with
    `partial_prefix(out_dir)`.

    Errors: CheckpointError naming file and tensor or metadata key that can't be converted.
    """
    gguf = _GGUF(path)
    config = _config(gguf)
    shapes = {_new_name(gguf, name): _shape(tensor) for name, tensor in gguf.tensors.items()}
    files = {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(_generation_config(gguf), indent=2),
        "tokenizer.json": _tokenizer(gguf).to_str(),
        "tokenizer_config.json": json.dumps(_tokenizer_config(gguf, config), indent=2, ensure_ascii=False),
    }
    partial = Path(tempfile.mkdtemp(prefix=partial_prefix(out_dir), dir=out_dir.parent))
    try:
        for name, text in files.items():
            _write_durably(partial / name, text)
        write_safetensors(partial / SINGLE_NAME, shapes, _tensors(gguf, config, on_tensor))
        partial.rename(out_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def partial_prefix(out_dir: Path) -> str:
    """How the names of unfinished conversions into `out_dir` start."""
    return f".{out_dir.name}.partial-"


def _config(gguf: _GGUF) -> dict[str, object]:
    """config.json; refuses what the Llama architecture of this project doesn't compute."""
    architecture = gguf.need("general.architecture", str)
    if architecture != "llama":
        raise gguf.refuse("general.architecture", architecture, "'llama'")
    for key, plain in (("llama.rope.scaling.type", "none"), ("llama.expert_count", 0)):
        value = gguf.get(key, object)
        if value is not None and value != plain:
            raise gguf.refuse(key, value, repr(plain))
    num_heads = gguf.need("llama.attention.head_count", int)
    hidden_size = gguf.need("llama.embedding_length", int)
    head_dim = gguf.get("llama.attention.key_length", int) or hidden_size // num_heads
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        value = gguf.get(key, int)
        if value is not None and value != head_dim:
            raise gguf.refuse(key, value, f"the head dim {head_dim}")
    rope_theta = _shortest(gguf.get("llama.rope.freq_base", float) or 10000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _shape(_tensor(gguf, "token_embd.weight"))[0],
        "hidden_size": hidden_size,
        "intermediate_size": gguf.need("llama.feed_forward_length", int),
        "num_hidden_layers": gguf.need("llama.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": gguf.get("llama.attention.head_count_kv", int) or num_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": gguf.need("llama.context_length", int),
        "rms_norm_eps": _shortest(gguf.need("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "rope_theta": rope_theta,  # for readers that don't know rope_parameters
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "dtype": "float32",
        **_special_ids(gguf),
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _special_ids(gguf: _GGUF) -> dict[str, object]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {name: gguf.get(f"tokenizer.ggml.{key}_token_id", int) for name, key in keys.items()}
    return {name: value for name, value in ids.items() if value is not None}


def _generation_config(gguf: _GGUF) -> dict[str, object]:
    """End of text and, where it is another token, end of turn both end a generation."""
    ids = _special_ids(gguf)
    ends = [ids.get("eos_token_id"), gguf.get("tokenizer.ggml.eot_token_id", int)]
    known = list(dict.fromkeys(end for end in ends if end is not None))
    return ids | ({"eos_token_id": known[0] if len(known) == 1 else known} if known else {})


def _tensor(gguf: _GGUF, name: str) -> ReaderTensor:
    if name not in gguf.tensors:
        raise CheckpointError(f"{gguf.path}: tensor {name!r} is missing")
    return gguf.tensors[name]


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """Rows first; GGUF writes the fastest dim first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _new_name(gguf: _GGUF, name: str) -> str:
    block = _BLOCK.fullmatch(name)
    known = _NAMES.get(block[2] if block else name)
    if known is None:
        raise CheckpointError(f"{gguf.path}: tensor {name!r} is unknown for the architecture llama")
    return f"model.layers.{block[1]}.{known}" if block else known


def _tensors(
    gguf: _GGUF, config: dict[str, Any], on_tensor: Callable[[str], None]
) -> Iterator[npt.NDArray[np.float32]]:
    for name, tensor in gguf.tensors.items():
        try:
            values = dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor))
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"{gguf.path}: tensor {name!r} of type {tensor.tensor_type.name} can't be read: {error}"
            ) from error
        if name.endswith("attn_q.weight"):
            values = halves_from_pairs(values, config["num_attention_heads"])
        elif name.endswith("attn_k.weight"):
            values = halves_from_pairs(values, config["num_key_value_heads"])
        yield values
        on_tensor(name)


def halves_from_pairs(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Reorders the rows of each head from (x0, y0, x1, y1, ...) to (x0, x1, ..., y0, y1, ...).

    Shapes: [N * H, D] -> [N * H, D].
    """
    return rows.reshape(num_heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(gguf: _GGUF) -> Tokenizer:
    model, pre = gguf.need("tokenizer.ggml.model", str), gguf.need("tokenizer.ggml.pre", str)
    if model != "gpt2":
        raise gguf.refuse("tokenizer.ggml.model", model, "'gpt2'")
    if pre not in _PRE_TOKENIZERS:
        raise gguf.refuse("tokenizer.ggml.pre", pre, sorted(_PRE_TOKENIZERS))
    tokens = gguf.need("tokenizer.ggml.tokens", list)
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.need("tokenizer.ggml.merges", list)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    types = gguf.need("tokenizer.ggml.token_type", list)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in _of_type(tokens, types, _CONTROL)]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in _of_type(tokens, types, _USER_DEFINED)])
    if gguf.get("tokenizer.ggml.add_bos_token", bool):
        bos_id = gguf.need("tokenizer.ggml.bos_token_id", int)
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def _of_type(tokens: list[str], types: list[int], wanted: int) -> list[str]:
    return [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]


def _tokenizer_config(gguf: _GGUF, config: dict[str, object]) -> dict[str, object]:
    tokens = gguf.need("tokenizer.ggml.tokens", list)
    ids = {name: gguf.get(f"tokenizer.ggml.{key}_token_id", int) for name, key in _SPECIAL_TOKENS.items()}
    fields: dict[str, object] = {name: tokens[i] for name, i in ids.items() if i is not None}
    template = gguf.get("tokenizer.chat_template", str)
    if template is not None:
        fields["chat_template"] = template
    return fields | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
