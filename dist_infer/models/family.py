"""What all families of models share: how one is described, and the fields that their config.json have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from dist_infer.config import DType, ModelConfig, RopeConfig
from dist_infer.errors import UsageError
from dist_infer.layers.moe import MoeNames
from dist_infer.models.config_fields import Fields
from dist_infer.models.rope_fields import parse_rope

_ACTIVATIONS = ("silu", "swish")  # two names of one function


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture: its names in config.json, how that is read, and how its experts are named."""

    architecture: str
    model_type: str
    parse: Callable[[Fields], ModelConfig]
    moe_names: MoeNames = field(default_factory=MoeNames)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What absent fields mean in a family."""

    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    num_kv_heads: int | None = None  # as many as heads
    head_dim: int | None = None  # hidden size / heads


def parse_decoder(
    fields: Fields,
    architecture: str,
    defaults: Defaults | None = None,
    *,
    intermediate_size: int | None = None,
    head_dim: int | None = None,
    partial_rotary: bool = False,
    rope: Callable[[Fields, int], RopeConfig] | None = None,
) -> ModelConfig:
    """A dense decoder with grouped-query attention; families change what is theirs.

    `intermediate_size` and `head_dim` replace the fields where those mean nothing; `rope` reads the rotary embedding
    another way.

    Errors: UsageError naming the field, its value and what is supported.
    """
    defaults = defaults or Defaults()
    fields.refuse_if_set("quantization_config", "quantised checkpoints are not supported: use one in bfloat16")
    fields.one_of("hidden_act", _ACTIVATIONS, default="silu")
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    num_kv_heads = fields.positive_int("num_key_value_heads", default=defaults.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise UsageError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    max_len = fields.positive_int("max_position_embeddings", default=defaults.max_position_embeddings)
    head_dim = head_dim or _head_dim(fields, hidden_size, num_heads, defaults.head_dim)
    if rope is None:
        parsed_rope = parse_rope(
            fields, max_len, default_theta=defaults.rope_theta, partial_of=head_dim if partial_rotary else None
        )
    else:
        parsed_rope = rope(fields, max_len)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or fields.positive_int("intermediate_size"),
        num_layers=fields.positive_int("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_len,
        rms_norm_eps=fields.number("rms_norm_eps", default=defaults.rms_norm_eps),
        rope=parsed_rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        attention_bias=fields.boolean("attention_bias", default=False),
        output_bias=fields.boolean("attention_bias", default=False),
        mlp_bias=fields.boolean("mlp_bias", default=False),
        dtype=_dtype(fields),
        bos_token_id=next(iter(fields.ints("bos_token_id")), None),
        eos_token_ids=fields.ints("eos_token_id"),
    )


def check_top_k(num_experts: int, top_k: int, *, num_groups: int = 1, num_kept_groups: int = 1) -> None:
    """Errors: UsageError with the fields' numbers when a token can't have that many experts."""
    if num_experts % num_groups:
        raise UsageError(f"config.json: n_group {num_groups} does not divide the {num_experts} experts")
    if num_kept_groups > num_groups:
        raise UsageError(f"config.json: topk_group {num_kept_groups} is more than n_group {num_groups}")
    eligible = num_experts // num_groups * num_kept_groups
    if top_k > eligible:
        raise UsageError(f"config.json: num_experts_per_tok {top_k} is more than the {eligible} experts to choose from")


def window_of_all_layers(fields: Fields, config: ModelConfig, *, default: int | None = None) -> int | None:
    """The keys that a query sees at most, its own among them; None where every sequence fits into them."""
    if not fields.is_written("sliding_window"):
        window = default
    elif fields.get("sliding_window") is None:
        window = None
    else:
        window = fields.positive_int("sliding_window")
    return window if window is not None and window < config.max_position_embeddings else None


def with_optional_window(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The same where `use_sliding_window` asks for it, in the layers from `max_window_layers` on or those named."""
    if not fields.boolean("use_sliding_window", default=False):
        return config
    named = fields.strings("layer_types")
    first = fields.count("max_window_layers", default=28)
    windowed = [kind == "sliding_attention" for kind in named] or [idx >= first for idx in range(config.num_layers)]
    if not any(windowed):
        return config
    window = window_of_all_layers(fields, config, default=4096)
    return replace(config, sliding_window=window, all_windowed=all(windowed))


def number_of_experts(fields: Fields, *names: str) -> int:
    """The first of the names that is there: releases of transformers call it differently."""
    present: Mapping[str, object] = {name: fields.get(name) for name in names if fields.get(name) is not None}
    return fields.positive_int(next(iter(present), names[0]))


def _head_dim(fields: Fields, hidden_size: int, num_heads: int, default: int | None) -> int:
    if fields.get("head_dim") is None and default is None and hidden_size % num_heads:
        raise UsageError(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}:"
            " give head_dim"
        )
    head_dim = fields.positive_int("head_dim", default=default or hidden_size // num_heads)
    if head_dim % 2:
        raise UsageError(f"config.json: head_dim {head_dim} is odd; rotary positions need an even one")
    return head_dim


def _dtype(fields: Fields) -> DType:
    name = fields.string("dtype") or fields.string("torch_dtype") or "float32"
    name = name.removeprefix("torch.")
    for known in get_args(DType):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise UsageError(f"config.json: dtype {name!r} is not supported; supported: {', '.join(get_args(DType))}")
