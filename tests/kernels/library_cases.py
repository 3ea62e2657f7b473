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
    cases = []
    for library in libraries:
        for place in TRITON_DEVICES:
            device = place.values[0]
            marks = () if device == "cpu" and library.name != "triton" else place.marks
            for dtype in dtypes:
                if library.is_available(Target(device=_CUDA, dtype=dtype)) is None:
                    name = f"{library.name}-{device}-{str(dtype).removeprefix('torch.')}"
                    cases.append(pytest.param(library, device, dtype, marks=marks, id=name))
    return cases
