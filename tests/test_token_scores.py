"""Log probabilities against log_softmax, for any cut of the vocabulary, and always finite."""

import math

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives, SingleCollectives
from dist_infer.comm.mesh import split_range
from dist_infer.sampler import Sampler
from dist_infer.token_scores import score_tokens
from dist_infer.types import LEAST_LOGPROB
from tests.devices import DEVICES
from tests.fake_collectives import run_group
from tests.test_sampler import make_logits


def oracle(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """By sorting whole rows; of equal ones the smaller id is first."""
    logprobs = torch.log_softmax(logits.double(), 1)
    order = logprobs.sort(dim=1, descending=True, stable=True).indices
    ranks = 1 + (order == token_ids[:, None]).int().argmax(1)
    chosen = logprobs.gather(1, token_ids[:, None])[:, 0]
    tops = order[:, :num_top]
    return torch.cat([chosen[:, None], ranks[:, None].double(), tops.double(), logprobs.gather(1, tops)], 1)


def score(tp: Collectives, logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    held = split_range(logits.shape[1], tp.size, tp.rank)
    return score_tokens(logits[:, held.start : held.stop], held, token_ids, num_top, tp=tp)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 97])
def test_scores_are_those_of_log_softmax(num_top: int, device: str) -> None:
    logits = make_logits(9, 97).to(device)
    logits[3] = 1.5  # all equal
    logits[4, 10:20] = logits[4].max() + 1
    token_ids = torch.tensor([0, 96, 5, 40, 15, 7, 8, 9, 10], device=device)
    scores = score(SingleCollectives(), logits, token_ids, num_top)
    due = oracle(logits, token_ids, num_top)
    assert torch.equal(scores[:, 1 : 2 + num_top], due[:, 1 : 2 + num_top])
    assert (scores - due).abs().max() < 1e-12


@pytest.mark.parametrize(("vocab_size", "size"), [(97, 2), (97, 3), (10, 4), (3, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_split_gives_the_same_scores(vocab_size: int, size: int, dtype: torch.dtype) -> None:
    logits = make_logits(12, vocab_size, dtype)
    token_ids = torch.arange(12) % vocab_size
    num_top = min(5, vocab_size)
    parts = run_group(size, lambda tp: score(tp, logits, token_ids, num_top))
    due = oracle(logits, token_ids, num_top)
    for own in parts:
        assert torch.equal(own, parts[0]), "the ranks differ"
        assert torch.equal(own[:, 1 : 2 + num_top], due[:, 1 : 2 + num_top])
        assert (own - due).abs().max() < 1e-12


def test_all_is_finite() -> None:
    bad = torch.tensor(
        [
            [0.0, -math.inf, 1.0, -math.inf],
            [-math.inf] * 4,
            [math.nan] * 4,
            [0.0, math.nan, 1e300, -1e300],
            [math.inf, 0.0, 0.0, 0.0],
        ],
        dtype=torch.float64,
    )
    scores = score(SingleCollectives(), bad, torch.tensor([1, 0, 2, 3, 1]), 4)
    assert scores.isfinite().all()
    assert (scores[:, 0] == LEAST_LOGPROB).all()
    assert scores[0, 6:].tolist() == pytest.approx([-0.3132616875, -1.3132616875, LEAST_LOGPROB, LEAST_LOGPROB])
    assert scores[3, 6] == 0.0


def test_the_sampler_leaves_padding_out_and_asks_for_no_more_than_there_is() -> None:
    logits = torch.nn.functional.pad(make_logits(4, 10), (0, 6), value=50.0)
    token_ids = torch.arange(4)
    own = Sampler(SingleCollectives(), range(16), 10).score(logits, token_ids, 20)
    assert own.shape == (4, 22)
    assert (own - oracle(logits[:, :10], token_ids, 10)).abs().max() < 1e-12
