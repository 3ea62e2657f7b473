"""Decode steps as graphs: everything of a step that runs on the device, launched by a call or two of the host.

A step of one token a sequence has hundreds of small kernels; launched one by one they take the host longer than the
device. So for a few batch sizes all of it is captured once, at start, and replayed afterwards. A batch takes the
smallest graph that it fits into; the rows behind it are inert (see decode_inputs).

A graph is captured in parts, replayed one after another: the forward pass, and each way in which tokens may be chosen
afterwards. So what is long is captured once a size, and a step whose tokens are chosen in a rare way, outside of any
graph, still has its forward pass in one. Between two parts the device waits for about 2 us.

Sizes are captured from the largest down and share one pool of memory, so that smaller ones find what larger ones have
given back. What a part leaves for what comes after it lies in tensors outside of that pool. Nothing is ever captured
after the start: on one rank alone, with collectives inside, it would hang the others.
"""

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import torch

from dist_infer.comm.agreement import EAGER

_log = logging.getLogger(__name__)

Program: TypeAlias = Callable[[], object]
"""Work of the device that reads and writes memory that stays in place."""


class Capture(Protocol):
    """Runs a program once or twice and gives back what runs it again."""

    def __call__(self, program: Program) -> Callable[[], None]:
        """Ranks: collective where the program is."""
        ...


class CudaCapture:
    """Captures programs in CUDA graphs that share one pool of memory.

    A program runs once before it is captured, so that nothing is compiled, tuned or allocated for good inside.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, program: Program) -> Callable[[], None]:
        """See Capture."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), _no_collection():
            program()
            torch.cuda.synchronize(self._stream.device)
            # Other threads (a watchdog) may call CUDA meanwhile; this one may not do what can't be captured.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                program()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """A tensor that the collector finds during a capture would be freed inside."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DecodeGraphs:
    """The graphs of all sizes. `sizes` are rows of a batch, in any order."""

    def __init__(self, sizes: Collection[int]) -> None:
        self.sizes = tuple(sorted(set(sizes)))
        if not self.sizes or self.sizes[0] < 1:
            raise ValueError(f"sizes of graphs must be at least 1, one or more of them, not {list(sizes)}")
        self._replays: dict[tuple[int, str], Callable[[], None]] = {}
        self._is_captured = False
        self._has_warned = False

    def bucket(self, num_rows: int) -> int:
        """Rows of the smallest graph that a batch of `num_rows` fits into; EAGER, and one warning, where none is."""
        fitting = next((size for size in self.sizes if size >= num_rows), EAGER)
        if fitting == EAGER and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a batch of %d sequences is larger than the largest graph (%d): such steps are launched kernel by"
                " kernel; raise --graph-batch-sizes or lower --max-num-seqs",
                num_rows,
                self.sizes[-1],
            )
        return fitting

    def capture(
        self,
        parts: Callable[[int], Mapping[str, Program]],
        capture: Capture,
        *,
        on_size: Callable[[int], None] = lambda size: None,
    ) -> None:
        """Capture the parts of every size, once and for all. `on_size` hears of each size that is done.

        Ranks: collective where the parts are, in one order on all.
        """
        if self._is_captured:
            raise RuntimeError("graphs are captured once, at start")
        self._is_captured = True
        for size in reversed(self.sizes):
            for name, program in parts(size).items():
                self._replays[size, name] = capture(program)
            on_size(size)

    def replay(self, size: int, part: str) -> None:
        """Launch a part of a graph.

        Ranks: collective where the part is.
        Stream: the current one.
        """
        self._replays[size, part]()


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then by 8 up to 64, by 16 up to 256, by 32 up to `max_num_seqs`, which is always among them."""
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max(257, max_num_seqs), 32))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)
