"""Up to how many rows the kernel of an all-reduce is also the fastest to add up the outputs of experts: data.

Above, or where nothing was measured above `DEFAULT_ROWS`, a launch of its own does it before.
"""

from collections.abc import Mapping

DEFAULT_ROWS = 64

# (device, ranks, experts a row, hidden) -> rows
MAX_ROWS: Mapping[tuple[str, int, int, int], int] = {}
