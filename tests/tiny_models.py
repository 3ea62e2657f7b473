"""Tiny random Llamas on disk, this project's model built from one, and the float64 oracle for it.

The weights are large (a standard deviation of 0.1 to 0.5) and the norms far from 1, so that a mistake shows in the
tokens.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dist_infer.comm.collectives import Collectives, SingleCollectives
from dist_infer.layers.weights import WeightSlot
from dist_infer.models.decoder import Decoder
from dist_infer.models.registry import build_model, parse_config

safetensors_torch = pytest.importorskip("safetensors.torch")

LLAMA3_ROPE: Mapping[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_tiny_llama(
    folder: Path,
    heads: int,
    kv_heads: int,
    *,
    head_dim: int = 8,
    num_layers: int = 3,
    vocab_size: int = 131,
    intermediate_size: int = 67,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    tie: bool = False,
    rope: Mapping[str, object] | None = None,
    std: float = 0.25,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    eos_token_id: int | Sequence[int] | None = None,
    max_position_embeddings: int = 512,
) -> Path:
    """Writes a random Llama as a Hugging Face folder (config.json, model.safetensors) and returns the folder.

    The hidden size is 8 a head whatever the head dim; vocabulary and intermediate size are odd, so that no tp size
    divides them. Nothing but torch and safetensors is needed.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 8 * heads,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "tie_word_embeddings": tie,
        "rope_parameters": dict(rope) if rope else {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": max_position_embeddings,
        "bos_token_id": None,
        "eos_token_id": eos_token_id if eos_token_id is None or isinstance(eos_token_id, int) else list(eos_token_id),
        "pad_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in _shapes(config):
        if "norm" in name:
            tensors[name] = (0.5 + torch.rand(shape, generator=generator)).to(dtype)
        else:
            tensors[name] = (torch.randn(shape, generator=generator) * std).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    safetensors_torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor in the file."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    matrices = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape in matrices.items():
            yield f"{prefix}{name}.weight", shape
            if config["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                yield f"{prefix}{name}.bias", shape[:1]
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def load_tiny_model(
    folder: Path,
    tp: Collectives | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
) -> Decoder:
    """This project's model, filled by a plain loop over its weight slots."""
    config = parse_config(read_config(folder))
    model = build_model(config, tp=tp or SingleCollectives(), dtype=dtype, device=torch.device(device))
    fill(model, safetensors_torch.load_file(folder / "model.safetensors"))
    return model


def read_config(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    return config


def fill(model: Decoder, tensors: Mapping[str, Tensor]) -> list[WeightSlot]:
    """Copies this rank's part of each tensor into the model; returns the slots that were filled."""
    slots = list(model.weight_slots())
    for slot in slots:
        whole = tensors[slot.name]
        assert tuple(whole.shape) == slot.shape
        slot.into.copy_(whole[tuple(slice(part.start, part.stop) for part in slot.take)])
    return slots


class LiftToDouble(TorchFunctionMode):
    """Turns every cast to float32 inside torch calls into one to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


class LiftedOracle:
    """transformers in float64, its float32 casts (norms, rotary angles, softmax) lifted to float64."""

    def __init__(self, folder: Path, *, lift: bool = True) -> None:
        transformers = pytest.importorskip("transformers")
        self._lift = lift
        with self._mode():
            self._model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float64,
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
            )
        # Rather a failure than random weights where a name is wrong.
        assert not loading["missing_keys"], sorted(loading["missing_keys"])
        self._model.eval()

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[T, V] in float64."""
        with torch.no_grad(), self._mode():
            result: Tensor = self._model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        assert result.dtype == torch.float64
        return result

    def greedy(self, prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], Tensor]:
        """The next tokens and the logits [num_tokens, V] that each was chosen from; no stop token."""
        token_ids = list(prompt_ids)
        rows = []
        for _ in range(num_tokens):
            rows.append(self.logits(token_ids)[-1])
            token_ids.append(int(rows[-1].argmax()))
        return token_ids[len(prompt_ids) :], torch.stack(rows)

    def _mode(self) -> AbstractContextManager[object]:
        return LiftToDouble() if self._lift else nullcontext()
