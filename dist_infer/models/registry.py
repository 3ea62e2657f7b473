"""From a Hugging Face config.json to this rank's shard of a model; what isn't supported is refused by field."""

from collections.abc import Callable, Mapping
from typing import get_args

import torch

from dist_infer.comm.collectives import Collectives
from dist_infer.config import DType, ModelConfig
from dist_infer.errors import UsageError
from dist_infer.layers.setup import LayerSetup
from dist_infer.models.config_fields import Fields
from dist_infer.models.llama import Llama
from dist_infer.models.rope_fields import parse_rope

_MODELS: Mapping[str, type[Llama]] = {"LlamaForCausalLM": Llama}
_ARCHITECTURE_OF_TYPE = {"llama": "LlamaForCausalLM"}
_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(DType)}
_ACTIVATIONS = ("silu", "swish")  # two names of one function


def parse_config(hf_config: Mapping[str, object]) -> ModelConfig:
    """The geometry that a config.json describes. Absent optional fields have the defaults of the architecture.

    Errors: UsageError naming the field, its value and what is supported.
    Source: the config.json of Hugging Face transformers, old and new field names.
    """
    fields = Fields(hf_config)
    architecture = _architecture(fields)
    fields.refuse_if_set("quantization_config", "quantised checkpoints are not supported: use one in bfloat16")
    fields.one_of("hidden_act", _ACTIVATIONS, default="silu")
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    num_kv_heads = fields.positive_int("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise UsageError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    max_position_embeddings = fields.positive_int("max_position_embeddings", default=2048)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=fields.positive_int("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, hidden_size, num_heads),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=parse_rope(fields, max_position_embeddings),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        attention_bias=fields.boolean("attention_bias", default=False),
        mlp_bias=fields.boolean("mlp_bias", default=False),
        dtype=_dtype(fields),
        bos_token_id=next(iter(fields.ints("bos_token_id")), None),
        eos_token_ids=fields.ints("eos_token_id"),
    )


def build_model(
    config: ModelConfig,
    *,
    tp: Collectives,
    dtype: DType | torch.dtype,
    device: torch.device,
    kernel_orders: Mapping[str, str] | None = None,
    on_choice: Callable[[str], None] | None = None,
) -> Llama:
    """This rank's shard, its parameters not yet filled. `on_choice` gets one line for each kernel library chosen.

    Ranks: local; every rank of the tp group builds its own.
    Errors: UsageError for a tp size that the model can't be cut into, and for a wrong kernel order.
    """
    setup = LayerSetup(
        tp=tp,
        dtype=dtype if isinstance(dtype, torch.dtype) else _DTYPES[dtype],
        device=device,
        kernel_orders=kernel_orders or {},
        on_choice=on_choice or (lambda _: None),
    )
    return _MODELS[config.architecture](config, setup)


def _architecture(fields: Fields) -> str:
    supported = ", ".join(_MODELS)
    names = fields.strings("architectures")
    if not names:
        model_type = fields.string("model_type")
        if model_type in _ARCHITECTURE_OF_TYPE:
            return _ARCHITECTURE_OF_TYPE[model_type]
        raise UsageError(
            f"config.json: architectures is missing and model_type {model_type!r} is not known; supported: {supported}"
        )
    for name in names:
        if name in _MODELS:
            return name
    raise UsageError(f"config.json: architectures {list(names)} is not supported; supported: {supported}")


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise UsageError(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}:"
            " give head_dim"
        )
    head_dim = fields.positive_int("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise UsageError(f"config.json: head_dim {head_dim} is odd; rotary positions need an even one")
    return head_dim


def _dtype(fields: Fields) -> DType:
    name = fields.string("dtype") or fields.string("torch_dtype") or "float32"
    name = name.removeprefix("torch.")
    for known in get_args(DType):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise UsageError(f"config.json: dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}")
