"""All-reduce through memory that all GPUs of a host map, with what follows it: residual addition, RMSNorm, quantiser.

Each rank has one piece of such memory, laid out alike on all (`PeerLayout`); kernels write into the peers' pieces and
read their own. comm/symmetric makes the memory and comm/all_reduce decides when these kernels run. N ranks, T rows, D
columns.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.carriers import ExpertOutputs, Fp8Scaling, Fp8Tensor, QuantizedTensor
from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.moe_finalize import check_outputs
from dist_infer.kernels.multiprocessors import num_multiprocessors
from dist_infer.kernels.quantize import QuantFormat

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SENTINEL = -(2**31)  # an int32 that no row sent holds: what has it has not arrived yet

MAX_PARTS = 4  # programs that share a row
TURN_BYTES = 4 * MAX_PARTS  # of a row: a word for each part
SHARE_BYTES = 16 * MAX_PARTS  # of a row: four words for each part

_LINE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLayout:
    """Where things stand in each rank's piece of peer memory. Units: bytes, from its start.

    One shot: turns of each row, what its parts tell each other, then N - 1 slots of rows, twice. Two shots: flags and
    counters of row tiles, then N - 1 slots of the parts of this rank's rows, then the sums of all rows.
    """

    num_ranks: int
    row_bytes: int  # of the widest row, a multiple of 16
    one_shot_rows: int
    two_shot_rows: int

    def __post_init__(self) -> None:
        if self.num_ranks < 2 or self.row_bytes <= 0 or self.row_bytes % 16 or self.one_shot_rows < 1:
            raise ValueError(f"no layout of peer memory: {self}")

    @property
    def slot_bytes(self) -> int:
        """Of one source's rows of one shot."""
        return self.one_shot_rows * self.row_bytes

    @property
    def shares(self) -> int:
        """Where the sums of parts of rows begin."""
        return _aligned(TURN_BYTES * self.one_shot_rows)

    @property
    def slots(self) -> int:
        """Where the rows of one shot begin."""
        return _aligned(self.shares + SHARE_BYTES * self.one_shot_rows)

    @property
    def max_tiles(self) -> int:
        """Tiles of one rank's share of the rows, at most."""
        return -(-self.two_shot_rows // self.num_ranks)

    @property
    def flags(self) -> int:
        """Where the flags begin: a tile's parts have come, by source, then its sum has, by owner."""
        return _aligned(self.slots + 2 * (self.num_ranks - 1) * self.slot_bytes)

    @property
    def counters(self) -> int:
        """Where the counters begin: calls that used a tile, by peer that it was sent to, by owner of its sum, own."""
        return _aligned(self.flags + 8 * (self.num_ranks - 1) * self.max_tiles)

    @property
    def parts(self) -> int:
        """Where the parts of this rank's rows begin."""
        return _aligned(self.counters + 4 * (2 * self.num_ranks - 1) * self.max_tiles)

    @property
    def part_bytes(self) -> int:
        """Of one source's parts."""
        return self.max_tiles * self.row_bytes

    @property
    def sums(self) -> int:
        """Where the sums begin."""
        return _aligned(self.parts + (self.num_ranks - 1) * self.part_bytes)

    @property
    def num_bytes(self) -> int:
        """Of the whole piece."""
        return _aligned(self.sums + self.two_shot_rows * self.row_bytes)

    def prepare(self, memory: Tensor) -> None:
        """The state before the first call. No peer may write before all ranks have done this.

        Shapes: memory [num_bytes] uint8.
        """
        memory.zero_()
        memory[self.shares : self.flags].view(torch.int32).fill_(SENTINEL)


def _aligned(offset: int) -> int:
    return -(-offset // _LINE) * _LINE


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpace:
    """Peer memory as a kernel sees it.

    One launch is one rank's, or that of several ranks whose pieces are one tensor on one device (for tests of protocols
    with more ranks than GPUs): then all its programs must fit on the device together.

    Shapes: memory [num_bytes] or [ranks, num_bytes] uint8; table [N] int64, the address of every rank's piece.
    """

    layout: PeerLayout
    memory: Tensor
    table: Tensor
    rank: int  # the first one of this launch
    max_programs: int  # of one rank: programs wait for each other's peers
    shares_device: bool = False  # with other launches' ranks: then no kernel behind this one may take their place early

    @property
    def num_local(self) -> int:
        """Ranks of one launch."""
        return 1 if self.memory.dim() == 1 else self.memory.shape[0]


def space_on_one_device(layout: PeerLayout, device: torch.device) -> PeerSpace:
    """All ranks of a group in one launch, whose programs share the device's multiprocessors."""
    memory = torch.empty(layout.num_ranks, layout.num_bytes, dtype=torch.uint8, device=device)
    for piece in memory:
        layout.prepare(piece)
    table = torch.tensor([piece.data_ptr() for piece in memory], dtype=torch.int64, device=device)
    num_sms = num_multiprocessors(device)
    return PeerSpace(layout=layout, memory=memory, table=table, rank=0, max_programs=num_sms // layout.num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What follows the sum. `weight` asks for the norm, `quant_format` for its quantised form, with the norm or not."""

    residual: Tensor | None = None
    weight: Tensor | None = None
    eps: float = 0.0
    quant_format: QuantFormat | None = None
    scale: Tensor | None = None  # of FP8, or the global scale of NVFP4
    keeps_norm: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """Results of an all-reduce, of each rank of the launch.

    Shapes: total (the sum, with the residual where there is one) and normed as x.
    """

    total: Tensor
    normed: Tensor | None
    quantized: tuple[QuantizedTensor, ...]


AllReduceFunction: TypeAlias = Callable[[Tensor | ExpertOutputs, Epilogue, PeerSpace], Reduced]


def _triton(name: str) -> tuple[Library[AllReduceFunction], ...]:
    function = deferred("dist_infer.kernels.triton.all_reduce", name)
    return (Library(name="triton", function=function, is_available=on_triton, graph_safe=True),)


ONE_SHOT_LIBRARIES = _triton("one_shot")
TWO_SHOT_LIBRARIES = _triton("two_shot")


def one_shot(
    x: Tensor | ExpertOutputs, epilogue: Epilogue, space: PeerSpace, *, library: Library[AllReduceFunction]
) -> Reduced:
    """Every rank writes its rows into all peers and adds up all rows itself: one way over the wire, (N - 1) T D there.

    The sum is that of comm/collectives: in rank order from +0.0 in float32, rounded once. total = sum + residual,
    rounded; normed and quantised as kernels/rms_norm and kernels/quantize have it, byte for byte. Experts' outputs are
    first added up on each rank, as kernels/moe_finalize does. Sizes may differ from call to call; a call without rows
    does nothing.

    Shapes: x and residual [T, D], or [ranks of the launch, T, D]; weight [D]; ExpertOutputs likewise.
    Ranks: all of `space`, with the same shapes and the same sequence of calls, one stream a space.
    Errors: ValueError for shapes, dtypes or sizes that don't fit each other or the space.
    """
    _check("one_shot", x, epilogue, space, space.layout.one_shot_rows)
    return library.function(x, epilogue, space)


def two_shot(
    x: Tensor | ExpertOutputs, epilogue: Epilogue, space: PeerSpace, *, library: Library[AllReduceFunction]
) -> Reduced:
    """Each rank adds up its share of the rows and sends the sums to all: 2 (N - 1) / N T D on the wire in two ways.

    In all else as one_shot.
    """
    _check("two_shot", x, epilogue, space, space.layout.two_shot_rows)
    return library.function(x, epilogue, space)


def _check(name: str, x: Tensor | ExpertOutputs, epilogue: Epilogue, space: PeerSpace, max_rows: int) -> None:
    shape = list(x.shape)
    parts = [x] if isinstance(x, Tensor) else [x.outputs, x.ids, x.weights, *([] if x.shared is None else [x.shared])]
    if not isinstance(x, Tensor):
        check_outputs(name, x)
    rows = parts[0]
    aligned = not any(part.data_ptr() % 16 for part in (rows, *parts[3:]))
    if rows.dtype not in DTYPES or not all(part.is_contiguous() for part in parts) or not aligned:
        raise ValueError(f"{name}: x {rows.dtype} {shape} is no contiguous 16-byte aligned tensor of a float type")
    if len(shape) != space.memory.dim() + 1 or (len(shape) == 3 and shape[0] != space.num_local):
        raise ValueError(f"{name}: x {shape} is not the rows of {space.num_local} ranks")
    row_bytes = shape[-1] * rows.element_size()
    if row_bytes % 16 or row_bytes > space.layout.row_bytes or shape[-2] > max_rows:
        raise ValueError(
            f"{name}: {shape[-2]} rows of {row_bytes} bytes are not up to {max_rows} rows of up to"
            f" {space.layout.row_bytes} bytes, a multiple of 16"
        )
    residual, weight = epilogue.residual, epilogue.weight
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != rows.dtype or not residual.is_contiguous()
    ):
        raise ValueError(
            f"{name}: residual {residual.dtype} {list(residual.shape)} differs from x {rows.dtype} {shape}"
        )
    if weight is not None and (list(weight.shape) != shape[-1:] or not weight.is_contiguous()):
        raise ValueError(f"{name}: weight {list(weight.shape)} does not fit x {shape}")
    if epilogue.quant_format is not None and weight is None:
        raise ValueError(f"{name}: what is quantised is the norm, which needs a weight")


def empty_reduced(x: Tensor | ExpertOutputs, epilogue: Epilogue) -> Reduced:
    """Results of that form, not filled."""
    total = torch.empty_like(x) if isinstance(x, Tensor) else x.outputs.new_empty(x.shape)
    quantized: tuple[QuantizedTensor, ...] = ()
    if epilogue.quant_format is not None:
        rows, width = total.shape[-2:]
        first = epilogue.quant_format.empty(rows, width, device=total.device, scale=epilogue.scale)
        quantized = (first,) if total.dim() == 2 else _stacked(first, total.shape[0])
    has_norm = epilogue.weight is not None and (epilogue.keeps_norm or epilogue.quant_format is None)
    return Reduced(total=total, normed=torch.empty_like(total) if has_norm else None, quantized=quantized)


def _stacked(first: QuantizedTensor, num: int) -> tuple[QuantizedTensor, ...]:
    """Matrices of that form, one behind the other in memory."""
    data = first.data.new_empty((num, *first.data.shape))
    if isinstance(first, Fp8Tensor) and first.scaling is Fp8Scaling.TENSOR:
        return tuple(replace(first, data=data[idx]) for idx in range(num))
    scales = first.scales.new_empty((num, *first.scales.shape))
    return tuple(replace(first, data=data[idx], scales=scales[idx]) for idx in range(num))
