"""Programmatic dependent launch: a kernel of a captured graph starts before the one in front of it has ended.

A kernel with OVERLAP calls gdc_wait before it reads or writes what any other kernel writes or reads, and
gdc_launch_dependents as soon as it likes: the next one waits for its end all the same. Before gdc_wait it may read
parameters only, so that a graph must not write its own. Outside a capture nothing overlaps, because there a parameter
may just have been written.
"""

import torch
from torch import Tensor

_FIRST_CAPABILITY = (9, 0)


def overlaps(x: Tensor) -> bool:
    """Whether kernels on x are launched so: constexpr OVERLAP and option launch_pdl of a launch."""
    return (
        x.is_cuda
        and torch.cuda.is_current_stream_capturing()
        and torch.cuda.get_device_capability(x.device) >= _FIRST_CAPABILITY
    )
