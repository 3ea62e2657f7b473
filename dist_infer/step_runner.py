"""A step on this rank's device: forward, then sampling, then the token ids on their way to the host.

What the engine drives. All collectives of a step are inside `launch`; `prepare` and the copy back have none.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dist_infer.comm.agreement import EAGER, Decision
from dist_infer.layers.step_inputs import StepInputs
from dist_infer.runner import Runner
from dist_infer.sampler import Sampler
from dist_infer.types import Batch, BatchKind, Float64Array, Int64Array, ScoreRows

_SCORED_ELEMENTS = 2**23  # logits of a prompt that are scored at a time: 64 MiB of float64 over all shards


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A batch on the host and on the device."""

    batch: Batch
    inputs: StepInputs


class SampledIds:
    """Token ids that a step has sampled, and scores, copied to the host behind the step's kernels.

    Shapes: ids [L], scores [Q + P, 2 + 2 K] float64 (see `types.ScoreRows`).
    """

    def __init__(self, token_ids: Tensor, scores: Tensor | None = None) -> None:
        self._on_host = _start_copy(token_ids)
        self._scores_on_host = None if scores is None else _start_copy(scores)
        self._event: torch.cuda.Event | None = None
        if token_ids.device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def ready(self) -> bool:
        """The copy has arrived; never waits."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def numpy(self) -> Int64Array:
        """Only once `ready`."""
        ids: Int64Array = self._on_host.numpy()
        return ids

    def scores(self) -> Float64Array | None:
        """Only once `ready`; None if the step gives none."""
        return None if self._scores_on_host is None else self._scores_on_host.numpy()


def _start_copy(x: Tensor) -> Tensor:
    if x.device.type != "cuda":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


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
        """Forward and sampling. `decision` holds the sizes that all ranks agreed on, which experts need.

        Ranks: collective over tp, and over the world where there are experts.
        """
        prefills = decision.kind in (BatchKind.PREFILL, BatchKind.EXTEND)
        inputs = step.inputs.agreed(decision.rank_tokens, eager_prefill=prefills and decision.graph_bucket == EAGER)
        hidden = self._runner.forward(inputs)
        logits = self._runner.logits(hidden, step.inputs.logit_rows)
        input_ids = None
        if step.batch.edits is not None:
            input_ids = step.inputs.token_ids.index_select(0, step.inputs.logit_rows)
        token_ids = self._sampler.sample(logits, step.batch, input_ids)
        self._runner.remember(step.inputs, token_ids)
        if step.batch.scores is None:
            return SampledIds(token_ids)
        return SampledIds(token_ids, self._score(step.batch.scores, hidden, logits, token_ids))

    def _score(self, wanted: ScoreRows, hidden: Tensor, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Prompts are scored a part at a time: the logits of a long one fill more memory than all else.

        Shapes: -> [Q + P, 2 + 2 K].
        """
        rows = torch.from_numpy(wanted.logit_rows).to(hidden.device)
        parts = [self._sampler.score(logits[rows], token_ids[rows], wanted.num_top)]
        token_rows, next_ids = torch.from_numpy(np.stack([wanted.token_rows, wanted.next_ids])).to(hidden.device)
        step = max(1, _SCORED_ELEMENTS // self._sampler.vocab_size)  # not of the shard: all ranks take equal parts
        for first in range(0, len(token_rows), step):
            own = self._runner.logits(hidden, token_rows[first : first + step])
            parts.append(self._sampler.score(own, next_ids[first : first + step], wanted.num_top))
        return torch.cat(parts)
