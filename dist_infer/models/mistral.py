"""Mistral in config.json: in the first release, every layer sees a window of the past."""

from dataclasses import replace

from dist_infer.config import ModelConfig
from dist_infer.models.config_fields import Fields
from dist_infer.models.family import Defaults, Family, parse_decoder, window_of_all_layers

_DEFAULTS = Defaults(max_position_embeddings=131072, num_kv_heads=8)
_DEFAULT_WINDOW = 4096  # of a config.json that doesn't name the field; null is none


def parse_mistral(fields: Fields) -> ModelConfig:
    """Errors: UsageError naming the field."""
    config = parse_decoder(fields, "MistralForCausalLM", _DEFAULTS)
    window = window_of_all_layers(fields, config, default=_DEFAULT_WINDOW)
    return replace(config, attention_bias=False, output_bias=False, mlp_bias=False, sliding_window=window)


MISTRAL = Family(architecture="MistralForCausalLM", model_type="mistral", parse=parse_mistral)
