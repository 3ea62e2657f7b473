"""Minimal kernels whose threads order accesses of shared memory, each in one of the ways of the kernels in CuTe DSL.

What racecheck says of them tells what its reports on those kernels mean. A CTA has three warpgroups; each thread writes
a word, and reads one that a thread of another warp has written.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import from_dlpack

CLEAN = (
    "whole_cta",
    "one_warpgroup",
    "two_warpgroups",
    "arrive_and_wait",
)
MISUNDERSTOOD = ("two_after_one", "elected_lane", "ring_of_barriers")
RACES = ("no_order",)
PATTERNS = CLEAN + MISUNDERSTOOD + RACES
_THREADS = 384


def run_pattern(name: str) -> torch.Tensor:
    """What the threads have read."""
    out = torch.zeros(_THREADS, device="cuda")
    launch = cute.compile(_Launch(name), from_dlpack(out))
    launch(from_dlpack(out))
    return out


class _Launch:
    def __init__(self, name: str) -> None:
        self.name = name

    @cute.jit
    def __call__(self, out: cute.Tensor) -> None:
        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2]
            words: cute.struct.MemRange[Float32, _THREADS]

        self.storage = Storage
        getattr(self, self.name)(out).launch(grid=[2, 1, 1], block=[_THREADS, 1, 1])

    def _shared(self):
        """(thread, its number as a fraction, words, barriers)."""
        thread, _, _ = cute.arch.thread_idx()
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        words = storage.words.get_tensor(cute.make_layout(_THREADS))
        return thread, Float32(1.0) * thread, words, storage.barriers.data_ptr()

    @cute.kernel
    def no_order(self, out: cute.Tensor) -> None:
        """A race."""
        thread, value, words, _ = self._shared()
        words[thread] = value
        out[thread] = words[(thread + 64) % _THREADS]

    @cute.kernel
    def whole_cta(self, out: cute.Tensor) -> None:
        """All threads wait for all."""
        thread, value, words, _ = self._shared()
        words[thread] = value
        cute.arch.sync_threads()
        out[thread] = words[(thread + 64) % _THREADS]

    @cute.kernel
    def one_warpgroup(self, out: cute.Tensor) -> None:
        """Each warpgroup has a barrier of its own."""
        thread, value, words, _ = self._shared()
        group = cute.arch.make_warp_uniform(thread // 128)
        words[thread] = value
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        out[thread] = words[group * 128 + (thread + 64) % 128]

    @cute.kernel
    def two_warpgroups(self, out: cute.Tensor) -> None:
        """Two of the three warpgroups wait for each other."""
        thread, value, words, _ = self._shared()
        if thread >= 128:
            words[thread] = value
            cute.arch.barrier(barrier_id=3, number_of_threads=256)
            out[thread] = words[128 + thread % 256]

    @cute.kernel
    def two_after_one(self, out: cute.Tensor) -> None:
        """The same, after one of them has waited for its own warps."""
        thread, value, words, _ = self._shared()
        if thread >= 128:
            if thread < 256:
                for _ in cutlass.range_constexpr(2):
                    cute.arch.barrier(barrier_id=1, number_of_threads=128)
            words[thread] = value
            cute.arch.barrier(barrier_id=3, number_of_threads=256)
            out[thread] = words[128 + thread % 256]

    @cute.kernel
    def arrive_and_wait(self, out: cute.Tensor) -> None:
        """A warp arrives at a barrier and goes on, two warpgroups wait there."""
        thread, value, words, _ = self._shared()
        if thread < 32:
            words[thread] = value
            cute.arch.barrier_arrive(barrier_id=6, number_of_threads=288)
        if thread >= 128:
            cute.arch.barrier(barrier_id=6, number_of_threads=288)
            out[thread] = words[thread % 32]

    @cute.kernel
    def elected_lane(self, out: cute.Tensor) -> None:
        """One lane arrives at an mbarrier for all that its warp has written."""
        thread, value, words, barriers = self._shared()
        if thread == 0:
            cute.arch.mbarrier_init(barriers, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if thread >= 128 and thread < 256:
            words[thread] = value
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers)
        if thread >= 256:
            cute.arch.mbarrier_wait(barriers, 0)
            out[thread] = words[128 + (thread + 64) % 128]

    @cute.kernel
    def ring_of_barriers(self, out: cute.Tensor) -> None:
        """The same again and again: the other warpgroup says when it has read."""
        thread, value, words, barriers = self._shared()
        if thread == 0:
            cute.arch.mbarrier_init(barriers, 4)
            cute.arch.mbarrier_init(barriers + 1, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if thread >= 128 and thread < 256:
            phase = Int32(1)
            for turn in cutlass.range(4, unroll=1):
                cute.arch.mbarrier_wait(barriers + 1, phase)
                words[thread] = value + turn
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(barriers)
                phase ^= 1
        if thread >= 256:
            phase = Int32(0)
            for _ in cutlass.range(4, unroll=1):
                cute.arch.mbarrier_wait(barriers, phase)
                out[thread] = words[128 + (thread + 64) % 128]
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(barriers + 1)
                phase ^= 1
