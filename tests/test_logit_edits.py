"""Bans, biases and penalties against their formulas and against transformers, for any cut of the vocabulary."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives, SingleCollectives
from dist_infer.comm.mesh import split_range
from dist_infer.logit_edits import edit_logits
from dist_infer.sampler import Sampler
from dist_infer.types import LogitEdits
from tests.devices import DEVICES
from tests.fake_collectives import run_group
from tests.test_sampler import MIXED, chi_square, exact, make_logits, make_rows


@dataclass(frozen=True)
class Row:
    """What one row asks for. The last token of the answer is not known to the host where `hidden`."""

    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    hidden: bool = False
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    biases: Sequence[tuple[int, float]] = ()

    @property
    def is_penalised(self) -> bool:
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)


def make_edits(rows: Sequence[Row]) -> LogitEdits:
    biases = [(idx, token, bias) for idx, row in enumerate(rows) for token, bias in row.biases]
    penalised = [(idx, row) for idx, row in enumerate(rows) if row.is_penalised]
    history = [
        (owner, -1 if row.hidden and place == len(row.answer) - 1 else token, 1)
        for owner, (_, row) in enumerate(penalised)
        for place, token in enumerate(row.answer)
    ]
    history += [(owner, token, 0) for owner, (_, row) in enumerate(penalised) for token in sorted(set(row.prompt))]
    return LogitEdits(
        bias_rows=np.array([idx for idx, _, _ in biases], np.int64),
        bias_ids=np.array([token for _, token, _ in biases], np.int64),
        biases=np.array([bias for _, _, bias in biases], np.float64),
        penalty_rows=np.array([idx for idx, _ in penalised], np.int64),
        repetition=np.array([row.repetition for _, row in penalised], np.float64),
        frequency=np.array([row.frequency for _, row in penalised], np.float64),
        presence=np.array([row.presence for _, row in penalised], np.float64),
        token_owners=np.array([owner for owner, _, _ in history], np.int64),
        token_ids=np.array([token for _, token, _ in history], np.int64),
        token_counts=np.array([count for _, _, count in history], np.int64),
    )


def last_tokens(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([[*row.prompt, *row.answer, 0][len(row.prompt) + len(row.answer) - 1] for row in rows])


def expected(logits: Tensor, row: Row) -> list[float]:
    values = list(map(float, logits.tolist()))
    for token, bias in row.biases:
        values[token] += bias
    for token in {*row.prompt, *row.answer}:
        values[token] = values[token] / row.repetition if values[token] > 0 else values[token] * row.repetition
    for token in set(row.answer):
        values[token] -= row.frequency * list(row.answer).count(token) + row.presence
    return values


ROWS = [
    Row(),
    Row(prompt=[0, 5, 5], answer=[1, 1, 7], repetition=1.7),
    Row(prompt=[0, 5], answer=[1, 1, 7, 9], frequency=0.6, presence=-0.3),
    Row(prompt=[2], answer=[9, 9, 9], hidden=True, frequency=1.5),
    Row(prompt=[2], answer=[4], hidden=True, repetition=0.5, presence=2.0),
    Row(biases=[(3, 100.0), (0, -math.inf), (9, -2.5)]),
    Row(prompt=[3], answer=[8], repetition=1.2, biases=[(3, -100.0), (8, 0.25), (1, -math.inf)]),
    Row(prompt=[1, 2], answer=[], repetition=3.0, frequency=1.0),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_edits_are_their_formulas(dtype: torch.dtype, device: str) -> None:
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    logits = make_logits(len(ROWS), 10, dtype).to(device)
    before = logits.clone()
    edited = edit_logits(logits, range(10), make_edits(ROWS), last_tokens(ROWS).to(device))
    assert torch.equal(logits, before)
    assert edited.dtype == torch.promote_types(dtype, torch.float32)
    for row, own, values in zip(ROWS, before, edited.tolist(), strict=True):
        assert values == pytest.approx(expected(own, row), abs=tolerance)


@pytest.mark.parametrize("size", [2, 3, 4, 12])
def test_a_cut_vocabulary_gives_the_same_bits(size: int) -> None:
    logits, edits = make_logits(len(ROWS), 10), make_edits(ROWS)
    whole = edit_logits(logits, range(10), edits, last_tokens(ROWS))
    padded = torch.nn.functional.pad(logits, (0, 3), value=5.0)
    parts = []
    for rank in range(size):
        held = split_range(10, size, rank)
        own = edit_logits(padded[:, held.start : held.stop + 3], held, edits, last_tokens(ROWS))
        parts.append(own[:, : len(held)])
        # Padding is untouched but where it is another shard's columns.
        assert torch.equal(own[:, len(held) :], padded[:, held.stop : held.stop + 3])
    assert torch.equal(torch.cat(parts, 1), whole)


def test_repetition_as_transformers_does() -> None:
    transformers = pytest.importorskip("transformers")
    logits = make_logits(1, 50)
    row = Row(prompt=[1, 4, 4, 9], answer=[20, 4, 31], repetition=1.35)
    seen = torch.tensor([[*row.prompt, *row.answer]])
    due = transformers.RepetitionPenaltyLogitsProcessor(1.35)(seen, logits.clone())
    assert torch.equal(edit_logits(logits, range(50), make_edits([row]), last_tokens([row])), due)


def test_bans_as_transformers_does() -> None:
    transformers = pytest.importorskip("transformers")
    logits = make_logits(1, 50)
    processor = transformers.MinNewTokensLengthLogitsProcessor(3, 5, [7, 49], device="cpu")
    due = processor(torch.tensor([[1, 2, 3, 8]]), logits.clone())
    row = Row(biases=[(7, -math.inf), (49, -math.inf)])
    assert torch.equal(edit_logits(logits, range(50), make_edits([row]), last_tokens([row])), due)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_split_samples_the_same_tokens(size: int) -> None:
    """All ways, with a banned best token in every row and some penalties."""
    rows = MIXED * 3
    logits = make_logits(len(rows), 40)
    best = logits.argmax(1).tolist()
    asked = [
        Row(prompt=[1, 2, 3], answer=[4, 5, 4], hidden=idx % 2 == 0, frequency=idx % 3 / 2, biases=[(token, -math.inf)])
        for idx, token in enumerate(best)
    ]
    batch = replace(make_rows(rows), edits=make_edits(asked))
    alone = Sampler(SingleCollectives(), range(40), 40).sample(logits, batch, last_tokens(asked)).tolist()
    assert all(token != banned for token, banned in zip(alone, best, strict=True))

    def main(tp: Collectives) -> list[int]:
        held = split_range(40, size, tp.rank)
        own = logits[:, held.start : held.stop]
        return Sampler(tp, held, 40).sample(own, batch, last_tokens(asked)).tolist()

    assert run_group(size, main) == [alone] * size


@pytest.mark.parametrize("way", [(0.8, 0, 1.0), (1.2, 5, 1.0), (1.0, 0, 0.9)])
def test_draws_follow_the_exact_distribution_of_the_changed_logits(way: tuple[float, int, float]) -> None:
    num_draws, logits = 20_000, make_logits(1, 10)
    row = Row(
        prompt=[2, 8], answer=[1, 4, 4], repetition=1.5, frequency=0.4, presence=0.3, biases=[(0, 2.0), (9, -math.inf)]
    )
    edits = make_edits([row])
    shared = edit_logits(logits, range(10), edits, last_tokens([row]))
    changed = torch.tensor(expected(logits[0], row), dtype=torch.float64)
    batch = make_rows([way] * num_draws, [3] * num_draws, range(num_draws))
    drawn = Sampler(SingleCollectives(), range(10), 10).sample(shared.expand(num_draws, 10), batch)
    assert chi_square(drawn, exact(changed, way)) < 45
    with pytest.raises(AssertionError, match="no chance"):
        chi_square(drawn * 0 + 9, exact(changed, way))


def test_edits_of_a_row_leave_its_neighbours_alone() -> None:
    rows = MIXED * 2
    logits, plain = make_logits(len(rows), 30, torch.float32), make_rows(rows)
    sampler = Sampler(SingleCollectives(), range(30), 30)
    without = sampler.sample(logits, plain).tolist()
    asked = [Row(biases=[(token, -math.inf)]) if idx == 4 else Row() for idx, token in enumerate(without)]
    edited = sampler.sample(logits, replace(plain, edits=make_edits(asked)), last_tokens(asked)).tolist()
    assert edited[4] != without[4]
    assert edited[:4] + edited[5:] == without[:4] + without[5:]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(5))
def test_extreme_options_give_real_ids_and_finite_scores_for_every_split(seed: int, dtype: torch.dtype) -> None:
    """Known faults B38 and B40: nothing overflows, whatever is asked for and whatever the model gives."""
    source = np.random.default_rng(seed)
    ways = [(0.0, 0, 1.0), (1e-12, 0, 0.5), (1e-300, 3, 1.0), (2.0, 0, 1e-8), (1.0, 1, 1.0), (2.0, 30, 0.9)] * 3
    logits = make_logits(len(ways), 12, torch.float64) * float(10 ** source.integers(0, 5))
    for value in (math.nan, -math.inf, math.inf):
        logits[torch.from_numpy(source.random((len(ways), 12)) < 0.05)] = value
    logits = logits.to(dtype)
    asked = [
        Row(
            prompt=source.integers(0, 12, 3).tolist(),
            answer=source.integers(0, 12, 4).tolist(),
            hidden=bool(source.integers(0, 2)),
            repetition=float(source.choice([0.01, 1.0, 100.0])),
            frequency=float(source.choice([-2.0, 0.0, 2.0])),
            presence=float(source.choice([-2.0, 0.0, 2.0])),
            biases=[(int(token), float(source.choice([-math.inf, -100, 100]))) for token in source.integers(0, 12, 5)],
        )
        for _ in ways
    ]
    min_p = source.choice([0.0, 1e-300, 1.0], len(ways))
    batch = replace(make_rows(ways), edits=make_edits(asked), min_p=min_p)
    alone = Sampler(SingleCollectives(), range(12), 12).sample(logits, batch, last_tokens(asked))
    assert all(0 <= token < 12 for token in alone.tolist())
    scores = Sampler(SingleCollectives(), range(12), 12).score(logits, alone, 5)
    assert scores.isfinite().all() and (scores[:, 0] <= 0).all()

    def main(tp: Collectives) -> list[int]:
        held = split_range(12, 3, tp.rank)
        return Sampler(tp, held, 12).sample(logits[:, held.start : held.stop], batch, last_tokens(asked)).tolist()

    assert run_group(3, main) == [alone.tolist()] * 3


def test_edits_need_the_input_tokens() -> None:
    batch = replace(make_rows(MIXED[:1]), edits=make_edits([ROWS[5]]))
    with pytest.raises(ValueError, match="input tokens"):
        Sampler(SingleCollectives(), range(10), 10).sample(make_logits(1, 10), batch)
