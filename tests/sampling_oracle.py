"""Requests with every option of sampling, and what must come out: formulas over transformers in float64."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from dist_infer.types import Request, SamplingParams, TokenScore
from tests.serving import RequestList

VOCAB_SIZE = 131
TOLERANCE = 1e-9
PROMPT = [7, 3, 90, 11, 54, 3, 7, 7]
LONG_PROMPT = [(idx * idx) % 131 for idx in range(33)]


def ask(prompt: Sequence[int] = PROMPT, **options: Any) -> Request:
    sampling = {"max_tokens": 12, "temperature": 0.0} | options
    return Request(request_id=0, prompt_ids=tuple(prompt), sampling=SamplingParams(**sampling))


GREEDY = [
    ask(repetition_penalty=1.4),
    ask(frequency_penalty=1.5),
    ask(presence_penalty=2.0),
    ask(presence_penalty=-1.0, frequency_penalty=-0.5, repetition_penalty=0.8),
    ask(logit_bias=((5, 100.0), (9, -100.0)), max_tokens=4),
    ask(logit_bias=((17, 3.0), (130, 2.5)), repetition_penalty=1.2, frequency_penalty=0.3, logprobs=2),
    ask(stop_token_ids=tuple(range(0, 131, 2)), min_tokens=7),  # half of all ids are stop ids
    ask(stop_token_ids=(*range(65), *range(66, 131)), min_tokens=5),
    ask(logprobs=5, prompt_logprobs=3),
    ask(LONG_PROMPT, prompt_logprobs=1, max_tokens=3),
    ask(LONG_PROMPT, prompt_logprobs=1, max_tokens=3),
    ask([9], prompt_logprobs=0, logprobs=0),
]
SAMPLED = [
    ask(temperature=0.9, min_p=0.3, seed=3, frequency_penalty=0.7),
    ask(temperature=1.4, top_k=9, min_p=0.05, top_p=0.9, seed=4, repetition_penalty=1.3, logprobs=3),
    ask(temperature=1.0, seed=5, min_tokens=6, stop_token_ids=tuple(range(0, 131, 3)), presence_penalty=1.0),
    ask(temperature=0.7, top_p=0.8, seed=6, logit_bias=((3, 4.0),)),
    ask(temperature=1e-12, seed=7, frequency_penalty=1.0),
    ask(temperature=1e-5, top_p=1e-8, seed=8),
]


def numbered(requests: Sequence[Request]) -> list[Request]:
    return [replace(request, request_id=idx) for idx, request in enumerate(requests)]


def edited(logits: Sequence[float], request: Request, answer: Sequence[int]) -> list[float]:
    """The options in their order, by the book."""
    asked, values = request.sampling, list(logits)
    if len(answer) < asked.min_tokens:
        for token in asked.stop_token_ids:
            values[token] = -math.inf
    for token, bias in asked.logit_bias:
        values[token] += bias
    for token in {*request.prompt_ids, *answer}:
        factor = asked.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(answer):
        values[token] -= asked.frequency_penalty * list(answer).count(token) + asked.presence_penalty
    return values


class HasLogits(Protocol):
    """tiny_models.LiftedOracle, which needs transformers."""

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[T, V] in float64."""


class Oracle:
    """What must come out, replayed over the logits of transformers."""

    def __init__(self, model: HasLogits) -> None:
        self.logits = cache(model.logits)

    def check_greedy(self, request: Request, answer: list[int], reason: str) -> None:
        asked = request.sampling
        for idx, token in enumerate(answer):
            values = edited(self.row(request, answer[:idx]), request, answer[:idx])
            assert max(range(VOCAB_SIZE), key=lambda other: (values[other], -other)) == token, (asked, idx)
        self.check_end(request, answer, reason)

    def check_possible(self, request: Request, answer: list[int], reason: str) -> None:
        """A sampled token is among those that the options leave."""
        for idx, token in enumerate(answer):
            values = edited(self.row(request, answer[:idx]), request, answer[:idx])
            assert token in kept(values, request.sampling), (request.sampling, idx)
        self.check_end(request, answer, reason)

    def check_end(self, request: Request, answer: list[int], reason: str) -> None:
        asked = request.sampling
        stops = [idx for idx, token in enumerate(answer) if token in asked.stop_token_ids and idx >= asked.min_tokens]
        due = stops[0] + 1 if stops else asked.max_tokens
        assert (len(answer), reason) == (due, "stop" if stops else "length")

    def check_scores(self, request: Request, answer: list[int], scores: list[TokenScore], first: int) -> None:
        """One for each token from position `first` on; at most 1e-9 off."""
        tokens = [*request.prompt_ids, *answer]
        rows = torch.log_softmax(self.logits(tuple(tokens)), 1)
        assert [score.token_id for score in scores] == tokens[first : first + len(scores)]
        for idx, score in enumerate(scores):
            row = rows[first + idx - 1]
            order = row.sort(descending=True, stable=True).indices.tolist()
            assert abs(score.logprob - float(row[score.token_id])) <= TOLERANCE
            assert order[score.rank - 1] == score.token_id
            assert [token for token, _ in score.top] == order[: len(score.top)]
            assert all(abs(logprob - float(row[token])) <= TOLERANCE for token, logprob in score.top)

    def row(self, request: Request, answer: Sequence[int]) -> list[float]:
        row: list[float] = self.logits((*request.prompt_ids, *answer))[-1].tolist()
        return row


def kept(values: Sequence[float], asked: SamplingParams) -> set[int]:
    """By temperature, min-p, top-k, top-p; with a margin of rounding at each edge."""
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    weights = {token: math.exp((values[token] - values[order[0]]) / asked.temperature) for token in order}
    order = [token for token in order if weights[token] >= asked.min_p * (1 - 1e-9) and weights[token] > 0]
    order = order[: asked.top_k or None]
    total, before, result = sum(weights[token] for token in order), 0.0, set[int]()
    for token in order:
        if result and before >= asked.top_p * total * (1 + 1e-9):
            break
        result.add(token)
        before += weights[token]
    return result


def check_all(oracle: Oracle, requests: Sequence[Request], answers: RequestList) -> None:
    """Tokens, ends and scores of every request."""
    for request in requests:
        key, asked = request.request_id, request.sampling
        answer, reason = answers.tokens[key], answers.reasons[key]
        check = oracle.check_greedy if asked.temperature == 0 else oracle.check_possible
        check(request, answer, reason)
        scores, prompt_scores = answers.scores[key], answers.prompt_scores[key]
        assert len(scores) == (0 if asked.logprobs is None else len(answer))
        assert len(prompt_scores) == (0 if asked.prompt_logprobs is None else len(request.prompt_ids) - 1)
        assert {len(score.top) for score in scores} <= {asked.logprobs}
        assert {len(score.top) for score in prompt_scores} <= {asked.prompt_logprobs}
        oracle.check_scores(request, answer, scores, len(request.prompt_ids))
        oracle.check_scores(request, answer, prompt_scores, 1)
