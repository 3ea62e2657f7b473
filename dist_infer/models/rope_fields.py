"""Rotary embedding in config.json: `rope_parameters`, or the older `rope_theta` with `rope_scaling`."""

from dist_infer.config import RopeConfig
from dist_infer.errors import UsageError
from dist_infer.models.config_fields import Fields

_KINDS = ("default", "llama3")


def parse_rope(fields: Fields, max_position_embeddings: int) -> RopeConfig:
    """The rotary embedding of the top-level `fields`. The kind is called `rope_type`, in old files `type`.

    Errors: UsageError naming the field and the supported kinds.
    """
    section = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({})
    for where in (fields, section):
        if where.number("partial_rotary_factor", default=1.0) != 1.0:
            raise UsageError("config.json: partial_rotary_factor is not supported for this architecture")
    kind_name = "rope_type" if section.get("rope_type") is not None else "type"
    kind = section.one_of(kind_name, _KINDS, default="default")
    theta = section.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if not low < high:
        raise UsageError(f"config.json: low_freq_factor {low} of the rope is not below high_freq_factor {high}")
    original = section.positive_int(
        "original_max_position_embeddings",
        default=fields.positive_int("original_max_position_embeddings", default=max_position_embeddings),
    )
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=section.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )
