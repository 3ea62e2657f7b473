"""The ways of an all-reduce, and the form of a table that chooses between them."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias


class Strategy(Enum):
    """How the parts of all ranks become their sum."""

    AUTO = "auto"  # one of those below, by the table
    GATHER = "gather"  # comm/collectives: any size, any wire
    ONE_SHOT = "one_shot"  # kernels/all_reduce, through peer memory
    TWO_SHOT = "two_shot"
    LIBRARY = "library"  # NCCL's or gloo's own sum; its bytes may differ


# (device, ranks, what follows the sum, hidden) -> (tokens up to which, strategy), rising; the last also holds beyond.
Table: TypeAlias = Mapping[tuple[str, int, str, int], tuple[tuple[int, Strategy], ...]]
