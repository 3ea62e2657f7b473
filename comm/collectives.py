"""The collectives that layers and the sampler call.

Numeric class of every sum (strategy GATHER): the parts of all ranks are added in rank order, from +0.0, in float32
(float64 for float64), and rounded once to the dtype of the input. So all ranks hold the same bits, the result does not
depend on sizes or timing, and it is never -0.0. A ring or tree as the library's own all-reduce takes has another order
for each element and rounds at each hop.

An all-reduce of b bytes on N ranks goes one of two ways that give the same bytes, chosen by b and N alone:
    whole   every rank gets all N tensors and adds them itself: (N - 1) b bytes a rank, one exchange
    sliced  rank p gets slice p of all, adds it, and sends the sum to all: 2 (N - 1) / N b bytes a rank, two exchanges
Over gloo on one host whole is faster up to 1 MB, sliced from 8 MB on (benchmarks/bench_collectives.py).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dist_infer.comm.mesh import split_sizes
from dist_infer.comm.wire import NcclWire, Wire
from dist_infer.errors import PeerFailedError

_ACCUMULATE_DTYPE = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
_TAGS = {"all_reduce": 0, "all_gather": 1, "reduce_scatter": 2, "broadcast": 3, "all_to_all": 4}
_TAG_ROUNDS = 64


class Collectives(Protocol):
    """What the ranks of an axis do together: all call the same methods in the same order with agreeing shapes.

    The inputs are contiguous, are not changed, and may share memory with the result.
    """

    @property
    def rank(self) -> int:
        """This rank's place on the axis."""
        ...

    @property
    def size(self) -> int:
        """Ranks of the axis."""
        ...

    @property
    def wire_bytes(self) -> dict[str, int]:
        """Bytes that this rank has sent so far, by collective."""
        ...

    @property
    def capturable(self) -> bool:
        """All of these can run inside the capture of a CUDA graph and be replayed with it; the same on all ranks."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, bit-identical on all of them, never -0.0.

        Shapes: any; the same on all ranks.
        Errors: ValueError unless float64, float32, bfloat16 or float16, contiguous and on the group's device.
        """
        ...

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """The rows of all ranks in rank order. `sizes` are the rows of every rank; without it all have as many as `x`.

        Shapes: [sizes[rank], ...] -> [sum(sizes), ...], any dtype.
        Errors: ValueError naming the numbers that don't fit.
        """
        ...

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """This rank's rows of the sum over the ranks.

        `sizes` are the rows of every rank; without it the rows are split contiguously, ceil then floor.

        Shapes: [sum(sizes), ...] -> [sizes[rank], ...]; dtypes as all_reduce.
        Errors: ValueError naming the numbers that don't fit.
        """
        ...

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """What rank `root` of the axis holds in `x`; on the others only shape and dtype of `x` count.

        Shapes: any; any dtype.
        """
        ...

    def all_to_all(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        """The next `send_sizes[p]` rows of `x` go to rank p; back come `recv_sizes[p]` rows of each, in rank order.

        Shapes: [sum(send_sizes), ...] -> [sum(recv_sizes), ...], any dtype.
        Errors: ValueError naming the numbers that don't fit.
        """
        ...


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """Adds the parts in their order, from +0.0, in float32 (float64 for float64) and rounds once."""
    dtype = parts[0].dtype
    total = torch.zeros_like(parts[0], dtype=_ACCUMULATE_DTYPE[dtype])
    for part in parts:
        total += part
    return total.to(dtype)


class SingleCollectives:
    """An axis with one rank: nothing is sent, but inputs are checked and sums rounded as on many."""

    rank = 0
    size = 1
    capturable = True

    def __init__(self) -> None:
        self.wire_bytes = dict.fromkeys(_TAGS, 0)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Collectives."""
        _check_summable("all_reduce", x)
        return x + 0.0  # the ordered sum of one part: only -0.0 changes

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """See Collectives."""
        _check_gather(x, sizes, rank=0, size=1)
        return x

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """See Collectives."""
        _check_scatter(x, sizes, size=1)
        return x + 0.0  # the ordered sum of one part: only -0.0 changes

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """See Collectives."""
        _check_broadcast(x, root, size=1)
        return x

    def all_to_all(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        """See Collectives."""
        _check_all_to_all(x, send_sizes, recv_sizes, rank=0, size=1)
        return x


class TorchCollectives:
    """Collectives over a wire of torch.distributed. One caller at a time; on CUDA in the order of one stream."""

    def __init__(self, wire: Wire, *, axis: str, max_whole_bytes: int = 512 * 1024) -> None:
        """`max_whole_bytes`: the largest tensor that is reduced whole; the same number on all ranks."""
        self.rank = wire.rank
        self.size = wire.size
        self.wire_bytes = dict.fromkeys(_TAGS, 0)
        self.wire = wire
        self.capturable = isinstance(wire, NcclWire)
        self.axis = axis
        self.max_whole_bytes = max_whole_bytes
        self._num_exchanges = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Collectives."""
        _check_summable("all_reduce", x)
        self._check_device("all_reduce", x)
        flat = x.view(-1)
        if flat.nbytes <= self.max_whole_bytes:
            received = self._receive_slices("all_reduce", [flat] * self.size)
            return ordered_sum(received).view(x.shape)
        sizes = split_sizes(flat.numel(), self.size)
        own = ordered_sum(self._receive_slices("all_reduce", torch.split(flat, sizes)))
        return self._gather("all_reduce", own, sizes).view(x.shape)

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """See Collectives."""
        rows = _check_gather(x, sizes, rank=self.rank, size=self.size)
        self._check_device("all_gather", x)
        return self._gather("all_gather", x, rows)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """See Collectives."""
        rows = _check_scatter(x, sizes, size=self.size)
        self._check_device("reduce_scatter", x)
        return ordered_sum(self._receive_slices("reduce_scatter", torch.split(x, rows)))

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """See Collectives."""
        _check_broadcast(x, root, size=self.size)
        self._check_device("broadcast", x)
        nothing = x.new_empty(0)
        if self.rank == root:
            self._exchange("broadcast", [x] * self.size, [nothing] * self.size)
            return x
        received = torch.empty_like(x)
        recvs = [received if peer == root else nothing for peer in range(self.size)]
        self._exchange("broadcast", [nothing] * self.size, recvs)
        return received

    def all_to_all(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        """See Collectives."""
        _check_all_to_all(x, send_sizes, recv_sizes, rank=self.rank, size=self.size)
        self._check_device("all_to_all", x)
        sends = torch.split(x, list(send_sizes))
        out = x.new_empty((sum(recv_sizes), *x.shape[1:]))
        recvs = torch.split(out, list(recv_sizes))
        recvs[self.rank].copy_(sends[self.rank])
        self._exchange("all_to_all", sends, recvs)
        return out

    def _receive_slices(self, name: str, slices: Sequence[Tensor]) -> list[Tensor]:
        """Slice p of this rank goes to rank p; back come all ranks' slices for this rank, in rank order."""
        own = slices[self.rank]
        received = [own if peer == self.rank else torch.empty_like(own) for peer in range(self.size)]
        self._exchange(name, slices, received)
        return received

    def _gather(self, name: str, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows of all ranks, each received where it belongs."""
        out = x.new_empty((sum(sizes), *x.shape[1:]))
        parts = torch.split(out, list(sizes))
        parts[self.rank].copy_(x)
        self._exchange(name, [_as_bytes(x)] * self.size, parts)
        return out

    def _exchange(self, name: str, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> None:
        # The tag tells calls apart: a rank that has left the common order waits for its time-out instead of taking
        # another call's bytes.
        tag = self._num_exchanges % _TAG_ROUNDS * len(_TAGS) + _TAGS[name]
        self._num_exchanges += 1
        self.wire_bytes[name] += sum(x.nbytes for peer, x in enumerate(sends) if peer != self.rank)
        try:
            self.wire.exchange([_as_bytes(x) for x in sends], [_as_bytes(x) for x in recvs], tag)
        except RuntimeError as error:
            raise PeerFailedError(
                f"{name} over axis {self.axis} failed on its rank {self.rank} of {self.size}: {error}"
            ) from error

    def _check_device(self, name: str, x: Tensor) -> None:
        if x.device != self.wire.device:
            raise ValueError(
                f"{name}: the tensor is on {x.device}, the group of axis {self.axis} works on {self.wire.device}"
            )


def _as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor: whatever the dtype, any backend can carry it."""
    return x if x.dtype == torch.uint8 and x.dim() == 1 else x.view(-1).view(torch.uint8)


def _check_contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{name}: a tensor of shape {list(x.shape)} and strides {list(x.stride())} is not contiguous")


def _check_summable(name: str, x: Tensor) -> None:
    if x.dtype not in _ACCUMULATE_DTYPE:
        summable = ", ".join(_name(dtype) for dtype in _ACCUMULATE_DTYPE)
        raise ValueError(f"{name}: {_name(x.dtype)} cannot be summed, only {summable}")
    _check_contiguous(name, x)


def _check_rows(name: str, x: Tensor, sizes: Sequence[int], size: int) -> None:
    if len(sizes) != size or any(rows < 0 for rows in sizes):
        raise ValueError(f"{name}: sizes {list(sizes)} must be {size} row counts >= 0, one a rank")
    if x.dim() == 0:
        raise ValueError(f"{name}: a tensor without dimensions has no rows")


def _check_gather(x: Tensor, sizes: Sequence[int] | None, *, rank: int, size: int) -> list[int]:
    """The rows of every rank."""
    _check_contiguous("all_gather", x)
    rows = [x.shape[0] if x.dim() else 0] * size if sizes is None else list(sizes)
    _check_rows("all_gather", x, rows, size)
    if x.shape[0] != rows[rank]:
        raise ValueError(f"all_gather: rank {rank} has {x.shape[0]} rows, but sizes {rows} give it {rows[rank]}")
    return rows


def _check_scatter(x: Tensor, sizes: Sequence[int] | None, *, size: int) -> list[int]:
    """The rows of every rank."""
    _check_summable("reduce_scatter", x)
    rows = split_sizes(x.shape[0] if x.dim() else 0, size) if sizes is None else list(sizes)
    _check_rows("reduce_scatter", x, rows, size)
    if x.shape[0] != sum(rows):
        raise ValueError(f"reduce_scatter: the tensor has {x.shape[0]} rows, but sizes {rows} are {sum(rows)} together")
    return rows


def _check_broadcast(x: Tensor, root: int, *, size: int) -> None:
    _check_contiguous("broadcast", x)
    if not 0 <= root < size:
        raise ValueError(f"broadcast: root {root} is not one of {size} ranks")


def _check_all_to_all(x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], *, rank: int, size: int) -> None:
    _check_contiguous("all_to_all", x)
    _check_rows("all_to_all", x, send_sizes, size)
    _check_rows("all_to_all", x, recv_sizes, size)
    if x.shape[0] != sum(send_sizes) or send_sizes[rank] != recv_sizes[rank]:
        raise ValueError(
            f"all_to_all: rank {rank} has {x.shape[0]} rows to send as {list(send_sizes)} and receives"
            f" {list(recv_sizes)}: the sum or its own entry does not fit"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
