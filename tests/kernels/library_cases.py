"""Which library of an op a kernel test runs on which device and in which dtype."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from dist_infer.kernels.dispatch import Library, Target
from tests.kernels.triton_interpreter import TRITON_DEVICES

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CUDA = torch.device("cuda")


def library_cases(libraries: Iterable[Library[Any]], dtypes: Sequence[torch.dtype] = FLOATS) -> list[Any]:
    """(library, device, dtype) of every library, on the CPU and on a GPU, in each of the dtypes that it takes.

    On the CPU the interpreter runs the Triton libraries, which would refuse that device otherwise.
    """
    return [
        pytest.param(library, device, dtype, marks=marks, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for library, device, marks, name in _places(libraries)
        for dtype in dtypes
        if library.is_available(Target(device=_CUDA, dtype=dtype)) is None
    ]


def library_devices(libraries: Iterable[Library[Any]]) -> list[Any]:
    """(library, device): the same for tests that have a dtype of their own."""
    return [pytest.param(library, device, marks=marks, id=name) for library, device, marks, name in _places(libraries)]


def _places(libraries: Iterable[Library[Any]]) -> Iterable[tuple[Library[Any], str, Any, str]]:
    for library in libraries:
        for place in TRITON_DEVICES:
            device = str(place.values[0])
            marks = () if device == "cpu" and library.name != "triton" else place.marks
            yield library, device, marks, f"{library.name}-{device}"
