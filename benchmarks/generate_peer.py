"""Decode steps of transformers: `generate` with a static cache, which compiles the model's step on a GPU."""

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import BenchmarkError

NAME = "transformers generate, static cache, compiled"
_ROOT = Path(__file__).parents[1]
_PAD = 0


def import_transformers() -> Any:
    """The package, which takes folders at the top of the repository for packages of others unless they are hidden.

    Errors: ImportError where it isn't installed: the tests need it, the project does not.
    """
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _ROOT]
    return importlib.import_module("transformers")


class StepClock:
    """A stopping criterion that never stops; it takes the time behind two of the steps, with the device at rest."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._num_steps = 0
        self._times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """No sequence has ended."""
        self._num_steps += 1
        if self._num_steps in (self._first, self._last):
            if input_ids.is_cuda:
                torch.cuda.synchronize(input_ids.device)
            self._times_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @property
    def step_us(self) -> float:
        """Of one step between the two. Errors: BenchmarkError when generation has ended before."""
        if len(self._times_s) != 2:
            raise BenchmarkError(f"generate made {self._num_steps} steps of {self._last}")
        return (self._times_s[1] - self._times_s[0]) * 1e6 / (self._last - self._first)


def generate_step_us(
    folder: Path, *, batch: int, context: int, num_first: int, num_timed: int, device: torch.device
) -> float:
    """Microseconds of a decode step of the model in config.json with random weights, best of three; `context` tokens on
    average are cached while it is timed. `num_first` steps before aren't.

    Errors: ImportError without transformers; BenchmarkError.
    """
    transformers = import_transformers()
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(device):  # weights are drawn there
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    prompt_len = context - num_first - num_timed // 2
    ids = torch.randint(config.vocab_size, (batch, prompt_len), generator=generator).to(device)
    times_us = []
    for _ in range(1 + 3):  # the first one compiles
        clock = StepClock(num_first, num_first + num_timed)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_first + num_timed,
                do_sample=False,
                pad_token_id=_PAD,
                cache_implementation="static",
                stopping_criteria=[clock],
            )
        times_us.append(clock.step_us)
    return min(times_us[1:])
