"""A step on this rank's device: forward, then sampling, then the token ids on their way to the host.

What the engine drives. All collectives of a step are inside `launch`; `prepare` and the copy back have none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_infer.comm.agreement import EAGER, Decision
from dist_infer.layers.step_inputs import StepInputs
from dist_infer.runner import Runner
from dist_infer.sampler import Sampler
from dist_infer.types import Batch, Int64Array


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A batch on the host and on the device."""

    batch: Batch
    inputs: StepInputs


class SampledIds:
    """Token ids that a step has sampled, copied to the host behind the step's kernels. Shapes: [L]."""

    def __init__(self, token_ids: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if token_ids.device.type != "cuda":
            self._on_host = token_ids
            return
        self._on_host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
        self._on_host.copy_(token_ids, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def ready(self) -> bool:
        """The copy has arrived; never waits."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def numpy(self) -> Int64Array:
        """Only once `ready`."""
        ids: Int64Array = self._on_host.numpy()
        return ids


class StepRunner:
    """Runner and sampler of one rank. Eager only so far, so it asks for no graph bucket."""

    def __init__(self, runner: Runner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler

    def graph_bucket(self, batch: Batch) -> int:
        """Rows of the graph that could run this batch."""
        return EAGER

    def prepare(self, batch: Batch) -> PreparedStep:
        """Start the copy of the inputs to the device. Ranks: local."""
        return PreparedStep(batch, self._runner.prepare(batch))

    def launch(self, step: PreparedStep, decision: Decision) -> SampledIds:
        """Forward and sampling. `decision` holds the sizes that all ranks agreed on; a dense model needs none of them.

        Ranks: collective over tp.
        """
        logits = self._runner.run(step.inputs)
        token_ids = self._sampler.sample(logits, step.batch)
        self._runner.remember(step.inputs, token_ids)
        return SampledIds(token_ids)
