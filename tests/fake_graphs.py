"""Graphs without a GPU: a replay runs its program again, on the inputs that stay in place."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dist_infer.decode_inputs import DecodeInputs
from dist_infer.graphs import DecodeGraphs, Program
from dist_infer.kv_cache import KVCache
from dist_infer.layers.step_inputs import StepInputs
from dist_infer.runner import Runner
from dist_infer.sampler import Sampler
from dist_infer.step_runner import StepRunner
from dist_infer.types import Batch, Int32Array


class HonestInputs(DecodeInputs):
    """Tells the host's true lengths also where a graph is told bounds: the reference kernels plan by them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._true_lens = np.zeros(self.max_num_seqs, np.int32)

    def fill(self, batch: Batch, *others: Any) -> None:
        super().fill(batch, *others)
        self._true_lens[:] = 0
        self._true_lens[: batch.num_seqs] = batch.kv_lens

    def step_inputs(self, num_rows: int, host_kv_lens: Int32Array | None = None) -> StepInputs:
        lens = self._true_lens[:num_rows].copy() if host_kv_lens is None else host_kv_lens
        return super().step_inputs(num_rows, lens)


class Recorder:
    """A capture that runs a program once, as a real one does at least, and counts replays."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def __call__(self, program: Program) -> Callable[[], None]:
        program()
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            program()

        return replay


def make_graph_runner(
    model: Any, kv_cache: KVCache, sampler: Sampler, *, max_num_seqs: int, sizes: Sequence[int], recorder: Recorder
) -> StepRunner:
    """A step runner on the CPU that replays decode steps. Ranks: collective where the model is."""
    inputs = HonestInputs(
        max_num_seqs=max_num_seqs,
        max_pages=kv_cache.num_blocks,
        block_size=kv_cache.block_size,
        device=torch.device("cpu"),
    )
    runner = Runner(model, kv_cache, max_num_seqs=max_num_seqs, device=torch.device("cpu"), decode_inputs=inputs)
    step_runner = StepRunner(runner, sampler, DecodeGraphs(sizes))
    step_runner.capture(recorder)
    return step_runner
