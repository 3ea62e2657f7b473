"""Qwen3 in config.json: queries and keys are normed head by head."""

from dataclasses import replace

from dist_infer.config import ModelConfig
from dist_infer.models.config_fields import Fields
from dist_infer.models.family import Defaults, Family, parse_decoder, with_optional_window

_DEFAULTS = Defaults(max_position_embeddings=32768, num_kv_heads=32, head_dim=128)


def parse_qwen3(fields: Fields) -> ModelConfig:
    """Errors: UsageError naming the field."""
    config = parse_decoder(fields, "Qwen3ForCausalLM", _DEFAULTS)
    return replace(with_optional_window(fields, config), qk_norm="head", mlp_bias=False)


QWEN3 = Family(architecture="Qwen3ForCausalLM", model_type="qwen3", parse=parse_qwen3)
