"""Forward and sampling as one step."""

import numpy as np
import pytest
import torch

from dist_infer.comm.agreement import EAGER, Decision
from dist_infer.comm.collectives import SingleCollectives
from dist_infer.sampler import Sampler
from dist_infer.step_runner import SampledIds, StepRunner
from dist_infer.types import Batch, BatchKind
from tests.devices import DEVICES

DECISION = Decision(
    step=1,
    failed_ranks=(),
    fault=None,
    drain=False,
    launched=True,
    quiet=False,
    over=False,
    kind=BatchKind.NONE,
    rank_tokens=(0,),
    graph_bucket=EAGER,
    woke=(),
)


class FixedRunner:
    """Gives the same logits for every batch and keeps what it is told to remember."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.remembered: list[list[int]] = []

    def prepare(self, batch: Batch) -> str:
        return f"{batch.num_tokens} tokens"

    def run(self, inputs: str) -> torch.Tensor:
        return self.logits

    def remember(self, inputs: str, token_ids: torch.Tensor) -> None:
        self.remembered.append(token_ids.tolist())


def test_a_step_samples_from_the_logits_and_remembers_the_token() -> None:
    runner = FixedRunner(torch.tensor([[0.0, 3.0, 1.0]]))
    step_runner = StepRunner(runner, Sampler(SingleCollectives(), range(3), 3))  # type: ignore[arg-type]
    prepared = step_runner.prepare(Batch.dummy())
    assert step_runner.graph_bucket(Batch.dummy()) == EAGER
    tokens = step_runner.launch(prepared, DECISION)
    assert tokens.ready()
    assert tokens.numpy().tolist() == [1]
    assert runner.remembered == [[1]]


@pytest.mark.parametrize("device", DEVICES)
def test_ids_arrive_on_the_host(device: str) -> None:
    sampled = SampledIds(torch.arange(5, device=device))
    if device != "cpu":
        torch.cuda.synchronize()
    assert sampled.ready()
    assert sampled.numpy().dtype == np.int64
    assert sampled.numpy().tolist() == [0, 1, 2, 3, 4]
