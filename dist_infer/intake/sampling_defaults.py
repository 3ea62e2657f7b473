"""What a model's generation_config.json says of sampling: it holds where a request is silent, as in vLLM."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import isfinite

from dist_infer.errors import CheckpointError
from dist_infer.intake.fields import is_int, show
from dist_infer.intake.sampling_fields import REPETITION_RANGE


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values for requests that don't give their own."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x >= 0, "a number from 0"),
    "top_k": (lambda x: x >= -1, "an integer from -1"),
    "top_p": (lambda x: 0 < x <= 1, "a number above 0 to 1"),
    "min_p": (lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "repetition_penalty": (
        lambda x: REPETITION_RANGE[0] <= x <= REPETITION_RANGE[1],
        f"a number from {REPETITION_RANGE[0]:g} to {REPETITION_RANGE[1]:g}",
    ),
}


def read_sampling_defaults(generation_config: Mapping[str, object]) -> SamplingDefaults:
    """The defaults of a model; null and absent fields are those of the API.

    Errors: CheckpointError naming a field that can't be used.
    Source: vLLM, `ModelConfig.get_diff_sampling_param`.
    """
    values = {}
    for entry in fields(SamplingDefaults):
        value = generation_config.get(entry.name)
        if value is None:
            continue
        fits, wanted = _RANGES[entry.name]
        is_number = is_int(value) or (isinstance(value, float) and isfinite(value) and entry.name != "top_k")
        if not is_number or not fits(value):  # type: ignore[arg-type]
            raise CheckpointError(f"generation_config.json: {entry.name} is {show(value)}; it must be {wanted}")
        values[entry.name] = value
    values["top_k"] = max(0, values.get("top_k", 0))  # type: ignore[call-overload]
    return SamplingDefaults(**values)  # type: ignore[arg-type]
