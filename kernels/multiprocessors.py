"""How many multiprocessors a GPU has."""

from functools import cache

import torch


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Asked of the driver once."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
