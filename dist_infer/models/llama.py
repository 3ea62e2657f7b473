"""The Llama family in config.json."""

from dist_infer.config import ModelConfig
from dist_infer.models.config_fields import Fields
from dist_infer.models.family import Family, parse_decoder


def parse_llama(fields: Fields) -> ModelConfig:
    """Errors: UsageError naming the field."""
    return parse_decoder(fields, "LlamaForCausalLM")


LLAMA = Family(architecture="LlamaForCausalLM", model_type="llama", parse=parse_llama)
