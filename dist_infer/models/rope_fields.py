"""Rotary embedding in config.json: `rope_parameters`, or the older `rope_theta` with `rope_scaling`."""

import math

from dist_infer.config import RopeConfig
from dist_infer.errors import UsageError
from dist_infer.models.config_fields import Fields

_KINDS = ("default", "llama3", "yarn")


def parse_rope(
    fields: Fields, max_position_embeddings: int, *, default_theta: float = 10000.0, partial_of: int | None = None
) -> RopeConfig:
    """The rotary embedding of the top-level `fields`. The kind is called `rope_type`, in old files `type`.

    `partial_of` is the head dim of an architecture that may turn a part of it only.

    Errors: UsageError naming the field and the supported kinds.
    """
    section = rope_section(fields)
    rotary_dim = _rotary_dim(fields, section, partial_of)
    kind_name = "rope_type" if section.get("rope_type") is not None else "type"
    kind = section.one_of(kind_name, _KINDS, default="default")
    theta = section.number("rope_theta", default=fields.number("rope_theta", default=default_theta))
    if kind == "default":
        return RopeConfig(theta=theta, rotary_dim=rotary_dim)
    original = section.positive_int(
        "original_max_position_embeddings",
        default=fields.positive_int("original_max_position_embeddings", default=max_position_embeddings),
    )
    if kind == "yarn":
        return _yarn(section, theta, rotary_dim, original)
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if not low < high:
        raise UsageError(f"config.json: low_freq_factor {low} of the rope is not below high_freq_factor {high}")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        rotary_dim=rotary_dim,
        factor=section.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def rope_section(fields: Fields) -> Fields:
    """The object with the parameters of the rotary embedding; an empty one where there is none."""
    return fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({})


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much attention is sharpened for a context that is `factor` times as long.

    Source: Peng et al., YaRN (2023), equation 22, with DeepSeek's weight `mscale`.
    """
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def _yarn(section: Fields, theta: float, rotary_dim: int | None, original: int) -> RopeConfig:
    factor = section.number("factor")
    mscale, mscale_all_dim = (section.number_or_zero(name) for name in ("mscale", "mscale_all_dim"))
    if mscale and mscale_all_dim:
        angle_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    else:
        angle_factor = yarn_mscale(factor, 1.0)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        rotary_dim=rotary_dim,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=section.number("beta_fast", default=32.0),
        beta_slow=section.number("beta_slow", default=1.0),
        truncate=section.boolean("truncate", default=True),
        angle_factor=section.number("attention_factor", default=angle_factor),
    )


def _rotary_dim(fields: Fields, section: Fields, head_dim: int | None) -> int | None:
    """Channels of a head that turn; None: all. `rotary_dim` is the older name of MiniMax."""
    factors = [where.number("partial_rotary_factor", default=1.0) for where in (section, fields)]
    factor = next((factor for factor in factors if factor != 1.0), 1.0)
    if head_dim is None:
        if factor != 1.0:
            raise UsageError("config.json: partial_rotary_factor is not supported for this architecture")
        return None
    named = fields.positive_int("rotary_dim", default=head_dim)
    rotary_dim = named if factor == 1.0 else int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise UsageError(
            f"config.json: {rotary_dim} rotary channels of a head_dim of {head_dim}: it must be an even number up to it"
        )
    return None if rotary_dim == head_dim else rotary_dim
