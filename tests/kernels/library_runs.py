"""Where the implementations of an op run: plain torch everywhere, Triton's on a GPU or else interpreted."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch

from dist_infer.kernels.dispatch import Library
from tests.kernels.triton_interpreter import switch_on

# With a GPU Triton compiles, so then its functions take no CPU tensors.
_NOT_COMPILED = pytest.mark.skipif(torch.cuda.is_available(), reason="host: with a GPU Triton does not interpret")
F = TypeVar("F", bound=Callable[..., object])
ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def named(libraries: Sequence[Library[F]], name: str) -> Library[F]:
    """The library of that name."""
    return next(library for library in libraries if library.name == name)


def library_runs(
    libraries: Sequence[Library[Callable[..., Any]]],
    dtypes: Sequence[torch.dtype] | None = None,
    *,
    names: Sequence[str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrizes a test over (library, device), or over (library, device, dtype): float64 is torch's alone."""
    switch_on()
    runs = []
    for library in (named(libraries, name) for name in names or ("triton", libraries[-1].name)):
        interpreted = library.name == "triton"
        for device, marks in (("cpu", (_NOT_COMPILED,) if interpreted else ()), ("cuda", (pytest.mark.gpu,))):
            if dtypes is None:
                runs.append(pytest.param(library, device, marks=marks, id=f"{library.name}-{device}"))
                continue
            for dtype in dtypes:
                if not interpreted or dtype != torch.float64:
                    label = f"{library.name}-{device}-{str(dtype).removeprefix('torch.')}"
                    runs.append(pytest.param(library, device, dtype, marks=marks, id=label))
    return pytest.mark.parametrize(("library", "device") if dtypes is None else ("library", "device", "dtype"), runs)
