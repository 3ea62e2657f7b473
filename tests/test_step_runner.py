"""Forward and sampling as one step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_infer.comm.agreement import EAGER, Decision
from dist_infer.comm.collectives import SingleCollectives
from dist_infer.comm.mesh import HeadShard
from dist_infer.config import SchedulerConfig
from dist_infer.sampler import Sampler
from dist_infer.step_runner import SampledIds, StepRunner, build_step_runner
from dist_infer.types import Batch, BatchKind, LogitEdits, ScoreRows
from dist_infer.upload import HostArray
from tests.batches import Part, make_batch
from tests.devices import DEVICES
from tests.tiny_models import load_tiny_model, make_tiny_llama

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


@dataclass
class Inputs:
    token_ids: torch.Tensor
    logit_rows: torch.Tensor
    told: tuple[object, ...] = ()

    def agreed(self, rank_tokens: tuple[int, ...], *, eager_prefill: bool) -> "Inputs":
        return replace(self, told=(rank_tokens, eager_prefill))


class FixedRunner:
    """A model whose logits are its hidden states, the same for every batch; keeps what it is told to remember."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden
        self.remembered: list[list[int]] = []
        self.told: list[tuple[object, ...]] = []
        self.decode_inputs = None
        self.last_token_ids = torch.zeros(5, dtype=torch.int64)

    def takes(self, batch: Batch) -> bool:
        return False

    def prepare_with(self, batch: Batch, more: Mapping[str, HostArray]) -> tuple[Inputs, dict[str, torch.Tensor]]:
        inputs = Inputs(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.logit_rows))
        return inputs, {name: torch.from_numpy(array) for name, array in more.items()}

    def forward(self, inputs: Inputs) -> torch.Tensor:
        self.told.append(inputs.told)
        return self.hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return hidden.index_select(0, rows)

    def remember(self, inputs: Inputs, token_ids: torch.Tensor) -> None:
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
    assert tokens.scores() is None


@pytest.mark.parametrize(
    ("kind", "bucket", "eager_prefill"),
    [
        (BatchKind.PREFILL, EAGER, True),
        (BatchKind.EXTEND, EAGER, True),
        (BatchKind.DECODE, EAGER, False),
    ],
)
def test_the_model_learns_what_the_ranks_agreed_on(kind: BatchKind, bucket: int, eager_prefill: bool) -> None:
    runner = FixedRunner(torch.tensor([[0.0, 3.0, 1.0]]))
    step_runner = StepRunner(runner, Sampler(SingleCollectives(), range(3), 3))  # type: ignore[arg-type]
    decision = replace(DECISION, kind=kind, rank_tokens=(3, 0, 5), graph_bucket=bucket)
    step_runner.launch(step_runner.prepare(Batch.dummy()), decision)
    assert runner.told == [((3, 0, 5), eager_prefill)]


def test_scores_of_the_token_and_of_a_prompt_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist_infer.step_runner._SCORED_ELEMENTS", 7)  # two rows of three at a time
    hidden = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step_runner = StepRunner(FixedRunner(hidden), Sampler(SingleCollectives(), range(3), 3))  # type: ignore[arg-type]
    batch = replace(
        make_batch([Part(token_ids=[2, 1, 0, 2, 1, 1], start=0, pages=[0])], block_size=16),
        scores=ScoreRows(
            logit_rows=np.array([0]),
            token_rows=np.arange(5),
            next_ids=np.array([1, 0, 2, 1, 1]),
            num_top=2,
        ),
    )
    tokens = step_runner.launch(step_runner.prepare(batch), DECISION)
    scores = tokens.scores()
    assert scores is not None and scores.shape == (6, 6)
    logprobs = torch.log_softmax(hidden, 1)[[5, 0, 1, 2, 3, 4]]
    ids = torch.tensor([*tokens.numpy().tolist(), 1, 0, 2, 1, 1])
    assert torch.allclose(torch.from_numpy(scores[:, 0]), logprobs.gather(1, ids[:, None])[:, 0], atol=1e-12)
    order = logprobs.argsort(1, descending=True)
    assert scores[:, 2:4].tolist() == order[:, :2].tolist()
    assert scores[:, 1].tolist() == (1 + (order == ids[:, None]).int().argmax(1)).tolist()
    assert torch.allclose(torch.from_numpy(scores[:, 4:]), logprobs.gather(1, order[:, :2]), atol=1e-12)


def test_penalties_see_the_input_token_that_the_host_does_not_know() -> None:
    runner = FixedRunner(torch.tensor([[0.0, 3.0, 2.0]]))
    step_runner = StepRunner(runner, Sampler(SingleCollectives(), range(3), 3))  # type: ignore[arg-type]
    none, one, first = np.zeros(0, np.int64), np.ones(1), np.zeros(1, np.int64)
    edits = LogitEdits(
        bias_rows=none,
        bias_ids=none,
        biases=np.zeros(0),
        penalty_rows=first,
        repetition=one,
        frequency=one * 0,
        presence=one * 1.5,
        token_owners=first,
        token_ids=np.array([-1]),
        token_counts=np.ones(1, np.int64),
    )
    batch = replace(make_batch([Part(token_ids=[1], start=4, pages=[0])], block_size=16), edits=edits)
    assert step_runner.launch(step_runner.prepare(batch), DECISION).numpy().tolist() == [2]


@pytest.mark.parametrize("device", DEVICES)
def test_ids_arrive_on_the_host(device: str) -> None:
    sampled = SampledIds(torch.arange(5, device=device))
    if device != "cpu":
        torch.cuda.synchronize()
    assert sampled.ready()
    assert sampled.numpy().dtype == np.int64
    assert sampled.numpy().tolist() == [0, 1, 2, 3, 4]


def test_padding_of_the_vocabulary_is_never_chosen(tmp_path: Path) -> None:
    """Rows of the head that belong to no token win by far, were they asked."""
    model = load_tiny_model(make_tiny_llama(tmp_path, 4, 2))
    model.config = replace(model.config, num_token_ids=100)
    model.head.weight[100:] = 100 * model.head.weight[:31]
    limits = SchedulerConfig(max_model_len=16, max_num_seqs=4, max_num_tokens=64, block_size=16, num_kv_blocks=4)
    runner = build_step_runner(
        model,
        limits,
        heads=HeadShard(range(4), range(2)),
        tp=SingleCollectives(),
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    parts = [Part(token_ids=[idx, 2, 3], start=0, pages=[idx]) for idx in range(4)]
    batch = make_batch(parts, block_size=16)
    batch.temperature[2:] = 5.0
    sampled = runner.launch(runner.prepare(batch), DECISION).numpy()
    assert len(sampled) == 4 and sampled.max() < 100
