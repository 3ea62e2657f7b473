"""Collectives beside the computation: queued on a second stream where there are streams, done at once elsewhere."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Pending:
    """A tensor that is being made. It must be waited for, needed or not: until then its inputs are in use."""

    def __init__(self, value: Tensor, inputs: Sequence[Tensor] = (), done: torch.cuda.Event | None = None) -> None:
        self._value = value
        # The side stream reads memory that belongs to the main one: kept until the main one has waited.
        self._inputs = tuple(inputs)
        self._done = done

    def wait(self) -> Tensor:
        """The tensor, ready for the current stream; the host doesn't wait."""
        if self._done is not None:
            self._done.wait()
            self._done, self._inputs = None, ()
        return self._value


class Lane:
    """Runs work in the order of its calls, the same on all ranks, so several may share one communicator.

    Work begins after everything that is queued on the current stream by then. That also makes it safe to give a result
    back to the allocator while the current stream still reads it: the lane's next work waits for that.

    Stream: on CUDA a stream of its own, joined by `Pending.wait`; also inside a graph capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def overlaps(self) -> bool:
        """Work goes on while the current stream computes."""
        return self._stream is not None

    def start(self, work: Callable[[], Tensor], *inputs: Tensor) -> Pending:
        """Queues `work`, which reads `inputs`."""
        if self._stream is None:
            return Pending(work())
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            value = work()
            return Pending(value, inputs, self._stream.record_event())
