"""Qwen2 and Qwen2.5 in config.json: queries, keys and values have biases, the output of attention has none."""

from dataclasses import replace

from dist_infer.config import ModelConfig
from dist_infer.models.config_fields import Fields
from dist_infer.models.family import Defaults, Family, parse_decoder, with_optional_window

_DEFAULTS = Defaults(max_position_embeddings=32768, num_kv_heads=32)


def parse_qwen2(fields: Fields) -> ModelConfig:
    """Errors: UsageError naming the field."""
    config = parse_decoder(fields, "Qwen2ForCausalLM", _DEFAULTS)
    config = with_optional_window(fields, config)
    return replace(config, attention_bias=True, output_bias=False, mlp_bias=False)


QWEN2 = Family(architecture="Qwen2ForCausalLM", model_type="qwen2", parse=parse_qwen2)
