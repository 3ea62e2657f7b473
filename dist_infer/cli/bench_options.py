"""The options of `dist-infer bench`, checked in themselves."""

import math
from dataclasses import dataclass

from dist_infer.cli.options import EngineOptions
from dist_infer.errors import UsageError

DEFAULT_INPUT_LEN = 512
DEFAULT_OUTPUT_LEN = 128
DEFAULT_NUM_PROMPTS = 64
_LEAST = {"num_prompts": 1, "input_len": 1, "output_len": 1, "max_inflight": 1, "warmup": 0, "prefix_len": 0}
_RANDOM_ONLY = ("input_len", "range_ratio", "prefix_len")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(EngineOptions):
    """What the user asked of `dist-infer bench`. None: the default, or what the dataset says.

    Errors: UsageError naming the option.
    """

    dataset: str | None = None  # a path; None: random prompts
    num_prompts: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float | None = None
    prefix_len: int | None = None
    request_rate: float | None = None  # a second; None: all at once
    max_inflight: int | None = None
    warmup: int = 2  # requests
    uniform_routing: bool = False
    result: str | None = None  # a path

    def __post_init__(self) -> None:
        """Check every value and that they don't contradict each other."""
        EngineOptions.__post_init__(self)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{_spelling(name)} is {value}; it must be at least {least}")
        if self.range_ratio is not None and not 0 <= self.range_ratio < 1:
            raise UsageError(f"--range-ratio is {self.range_ratio:g}; it must be at least 0, below 1")
        if self.request_rate is not None and not (self.request_rate > 0 and math.isfinite(self.request_rate)):
            raise UsageError(
                f"--request-rate is {self.request_rate:g}; it must be above 0; without it all requests come at once"
            )
        for name in _RANDOM_ONLY:
            if self.dataset is not None and getattr(self, name) is not None:
                raise UsageError(f"{_spelling(name)} is for random prompts, --dataset has its own; give one of them")
        for name in ("dataset", "result"):
            if getattr(self, name) == "":
                raise UsageError(f"{_spelling(name)} is empty; give a path")


def _spelling(name: str) -> str:
    return "--" + name.replace("_", "-")
