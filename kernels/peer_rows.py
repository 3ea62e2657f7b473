"""Token rows to all GPUs of a host, and the sums of what these make of them back, through memory that they all map.

The way to the experts and back for few rows: each rank has B rows of its own, all ranks work on all N B rows, and each
gets the sums of its own B. comm/symmetric makes the memory, comm/expert_peers decides when these kernels run. N ranks,
B rows a rank, D columns, K choices of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.all_reduce import DTYPES, SENTINEL
from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.multiprocessors import num_multiprocessors

_LINE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsLayout:
    """Where things stand in each rank's piece of peer memory. Units: bytes, from its start.

    Two turns for each row, of its way out and back. Then the slots of rows that come, N - 1 of up to `max_rows` rows,
    twice; then those of the parts of sums, likewise.
    """

    num_ranks: int
    max_rows: int  # of a rank
    row_bytes: int  # of D columns, a multiple of 16
    top_k: int

    def __post_init__(self) -> None:
        if min(self.num_ranks - 1, self.max_rows, self.row_bytes, self.top_k) < 1 or self.row_bytes % 16:
            raise ValueError(f"no layout of peer memory: {self}")

    @property
    def packed_bytes(self) -> int:
        """Of a row with its choices and their weights."""
        return self.row_bytes + 2 * 16 * -(-self.top_k // 4)

    @property
    def back_turns(self) -> int:
        """Where the turns of the way back begin."""
        return 4 * self.max_rows

    @property
    def slots(self) -> int:
        """Where the rows that come begin."""
        return _aligned(2 * 4 * self.max_rows)

    @property
    def parts(self) -> int:
        """Where the parts of this rank's sums begin."""
        return _aligned(self.slots + 2 * (self.num_ranks - 1) * self.max_rows * self.packed_bytes)

    @property
    def num_bytes(self) -> int:
        """Of the whole piece."""
        return _aligned(self.parts + 2 * (self.num_ranks - 1) * self.max_rows * self.row_bytes)

    def prepare(self, memory: Tensor) -> None:
        """The state before the first call. No peer may write before all ranks have done this.

        Shapes: memory [num_bytes] uint8.
        """
        memory.zero_()
        memory[self.slots :].view(torch.int32).fill_(SENTINEL)


def _aligned(offset: int) -> int:
    return -(-offset // _LINE) * _LINE


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsSpace:
    """Peer memory as a kernel sees it: one rank's, or that of several whose pieces are one tensor on one device.

    The latter is for tests of protocols with more ranks than GPUs; all programs must fit on the device together.

    Shapes: memory [num_bytes] or [ranks, num_bytes] uint8; table [N] int64, the address of every rank's piece.
    """

    layout: RowsLayout
    memory: Tensor
    table: Tensor
    rank: int  # the first one of this launch
    max_programs: int  # of one rank

    @property
    def num_local(self) -> int:
        """Ranks of one launch."""
        return 1 if self.memory.dim() == 1 else self.memory.shape[0]


def rows_on_one_device(layout: RowsLayout, device: torch.device) -> RowsSpace:
    """All ranks of a group in one launch, whose programs share the device's multiprocessors."""
    memory = torch.empty(layout.num_ranks, layout.num_bytes, dtype=torch.uint8, device=device)
    for piece in memory:
        layout.prepare(piece)
    table = torch.tensor([piece.data_ptr() for piece in memory], dtype=torch.int64, device=device)
    num_sms = num_multiprocessors(device)
    return RowsSpace(layout=layout, memory=memory, table=table, rank=0, max_programs=num_sms // layout.num_ranks)


GatherFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, RowsSpace, range], tuple[Tensor, Tensor, Tensor]]
ScatterFunction: TypeAlias = Callable[[Tensor, RowsSpace], Tensor]


GATHER_LIBRARIES: tuple[Library[GatherFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.peer_rows", "gather_rows"),
        is_available=on_triton,
        graph_safe=True,
    ),
)
SCATTER_LIBRARIES: tuple[Library[ScatterFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.peer_rows", "scatter_sums"),
        is_available=on_triton,
        graph_safe=True,
    ),
)


def gather_rows(
    x: Tensor, ids: Tensor, weights: Tensor, space: RowsSpace, held: range, *, library: Library[GatherFunction]
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of all ranks in rank order, with their choices: ids of the experts `held` here, counted from their
    first; -1 for those of other ranks.

    A zero of `x` or of a weight may come with another sign.

    Shapes: x [B, D], ids [B, K] int32, weights [B, K] float32 -> [N B, D], [N B, K], [N B, K]; each with the ranks of
        the launch in front where these are several.
    Ranks: all of `space`, with the same B and the same sequence of calls, one stream a space.
    Errors: ValueError for shapes, dtypes or sizes that don't fit each other or the space.
    """
    shape = list(x.shape)
    _check_rows("gather_rows", x, space, x.shape[-2] if x.dim() > 1 else 0)
    choices = [*shape[:-1], space.layout.top_k]
    if list(ids.shape) != choices or list(weights.shape) != choices:
        raise ValueError(f"gather_rows: ids {list(ids.shape)} and weights {list(weights.shape)} are not {choices}")
    if ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise ValueError(f"gather_rows: ids {ids.dtype} and weights {weights.dtype} are not int32 and float32")
    return library.function(x, ids.contiguous(), weights.contiguous(), space, held)


def scatter_sums(parts: Tensor, space: RowsSpace, *, library: Library[ScatterFunction]) -> Tensor:
    """The sums over the ranks of this rank's rows: that of comm/collectives, in rank order from +0.0 in float32.

    Shapes: parts [N B, D], the rows of all ranks in rank order -> [B, D]; each with the ranks of the launch in front
        where these are several.
    Ranks: as gather_rows.
    Errors: ValueError for shapes, dtypes or sizes that don't fit the space.
    """
    num_rows, rest = divmod(parts.shape[-2] if parts.dim() > 1 else 0, space.layout.num_ranks)
    _check_rows("scatter_sums", parts, space, num_rows)
    if rest:
        raise ValueError(
            f"scatter_sums: parts {list(parts.shape)} are not equally many rows of {space.layout.num_ranks} ranks"
        )
    return library.function(parts, space)


def _check_rows(name: str, x: Tensor, space: RowsSpace, num_rows: int) -> None:
    shape, layout = list(x.shape), space.layout
    if x.dtype not in DTYPES or not x.is_contiguous() or x.data_ptr() % 16:
        raise ValueError(f"{name}: {x.dtype} {shape} is no contiguous 16-byte aligned tensor of a float type")
    if x.dim() != space.memory.dim() + 1 or (x.dim() == 3 and len(x) != space.num_local):
        raise ValueError(f"{name}: {shape} is not the rows of {space.num_local} ranks")
    if x.shape[-1] * x.element_size() != layout.row_bytes or not 0 < num_rows <= layout.max_rows:
        raise ValueError(f"{name}: {shape} is not 1 to {layout.max_rows} rows a rank of {layout.row_bytes} bytes")
