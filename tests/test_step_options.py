"""Options of requests as arrays of a batch, and prompt scores that are complete however the prompt is computed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from dist_infer.config import SchedulerConfig
from dist_infer.scheduler import Scheduler, batch_digest
from dist_infer.sequences import Sequence as Seq
from dist_infer.types import Admission, Batch, Float64Array, Int64Array, News, Request, SamplingParams, StepOutput
from tests.fake_model import Driver

CONFIG = SchedulerConfig(
    max_model_len=100, max_num_seqs=8, max_num_tokens=64, block_size=16, num_kv_blocks=24, prefix_cache=True
)


def score_of(token_id: int, position: int) -> float:
    return -float(token_id) - position / 1000


@dataclass
class ScoredDriver(Driver):
    """Gives each score that a batch asks for a value that tells token and position."""

    prompt_scores: dict[int, list[Any]] = field(default_factory=dict)
    token_scores: dict[int, list[Any]] = field(default_factory=dict)

    def collect(self) -> list[StepOutput]:
        done = self.in_flight.popleft()
        outputs = self.scheduler.commit(*done, make_scores(*done)) if done is not None else []
        for output in outputs:
            self.outputs[output.request_id] += output.token_ids
            self.prompt_scores.setdefault(output.request_id, []).extend(output.prompt_scores)
            self.token_scores.setdefault(output.request_id, []).extend(output.scores)
            if output.finish_reason is not None:
                self.finished[output.request_id] = output.finish_reason
        return outputs


def make_scores(batch: Batch, token_ids: Int64Array) -> Float64Array | None:
    if batch.scores is None:
        return None
    rows = batch.scores
    ids = [*token_ids[rows.logit_rows].tolist(), *rows.next_ids.tolist()]
    positions = [*(batch.draw_positions[rows.logit_rows]).tolist(), *(batch.positions[rows.token_rows] + 1).tolist()]
    tops = [(list(range(rows.num_top)), [-float(idx) for idx in range(rows.num_top)])] * len(ids)
    return np.array(
        [
            [score_of(token, at), 1 + token, *top_ids, *top]
            for token, at, (top_ids, top) in zip(ids, positions, tops, strict=True)
        ]
    ).reshape(len(ids), 2 + 2 * rows.num_top)


def request(request_id: int, prompt: Sequence[int], **sampling: Any) -> Request:
    return Request(request_id=request_id, prompt_ids=tuple(prompt), sampling=SamplingParams(**sampling))


def check_prompt_scores(driver: ScoredDriver, asked: Request) -> None:
    scores = driver.prompt_scores[asked.request_id]
    prompt = asked.prompt_ids
    assert [score.token_id for score in scores] == list(prompt[1:])
    assert [score.logprob for score in scores] == [score_of(prompt[idx], idx) for idx in range(1, len(prompt))]
    assert {len(score.top) for score in scores} <= {asked.sampling.prompt_logprobs}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_num_tokens", [16, 7, 64])
def test_prompt_scores_are_complete_chunked_and_in_spite_of_the_prefix_cache(max_num_tokens: int, depth: int) -> None:
    driver = ScoredDriver(replace(CONFIG, depth=depth, max_num_tokens=max_num_tokens))
    prompt = [token % 11 for token in range(33)]
    asked = [request(idx, prompt, max_tokens=3, prompt_logprobs=1 + idx) for idx in range(2)]
    driver.step(asked[0])
    driver.run()
    driver.step(asked[1], request(2, prompt, max_tokens=3))  # all of its blocks are cached
    driver.run()
    driver.check_end()
    for own in asked:
        check_prompt_scores(driver, own)
    assert driver.prompt_scores[2] == []
    assert driver.scheduler.counters.cached_tokens == 32, "the request without prompt scores reuses two blocks"


@pytest.mark.parametrize("depth", [0, 1])
def test_prompt_scores_survive_a_preemption_in_the_second_chunk(depth: int) -> None:
    """An old request grows until the newest one, whose prompt is half computed, must give its blocks back."""
    config = replace(CONFIG, depth=depth, max_num_tokens=17, num_kv_blocks=6)
    driver = ScoredDriver(config)
    old = request(0, [1] * 15, max_tokens=40)
    asked = request(1, [token % 11 for token in range(64)], max_tokens=2, prompt_logprobs=0, logprobs=1)
    driver.step(old)
    driver.step(asked)
    driver.run()
    driver.check_end()
    assert driver.scheduler.counters.preemptions > 0
    check_prompt_scores(driver, asked)
    assert len(driver.token_scores[1]) == len(driver.outputs[1])


@pytest.mark.parametrize("seed", range(12))
def test_scores_of_random_loads(seed: int) -> None:
    random = np.random.default_rng(seed)
    depth = int(random.integers(0, 2))
    driver = ScoredDriver(
        replace(CONFIG, depth=depth, max_num_tokens=int(random.integers(5, 40)), num_kv_blocks=7, block_size=16)
    )
    asked = []
    for idx in range(12):
        prompt = random.integers(0, 3, int(random.integers(1, 50))).tolist()
        wanted = {
            "logprobs": [None, 0, 3][int(random.integers(0, 3))],
            "prompt_logprobs": [None, 0, 2][int(random.integers(0, 3))],
        }
        asked.append(request(idx, prompt, max_tokens=int(random.integers(1, 40)), stop_token_ids=(0,), **wanted))
        driver.step(asked[-1])
    driver.run()
    driver.check_end()
    for own in asked:
        if own.sampling.prompt_logprobs is None:
            assert driver.prompt_scores.get(own.request_id, []) == []
        else:
            check_prompt_scores(driver, own)
        scores = driver.token_scores[own.request_id]
        output = driver.outputs[own.request_id]
        if own.sampling.logprobs is None:
            assert scores == []
            continue
        first = len(own.prompt_ids)
        assert [(score.token_id, score.logprob) for score in scores] == [
            (token, score_of(token, first + idx)) for idx, token in enumerate(output)
        ]
        assert {len(score.top) for score in scores} == {own.sampling.logprobs}


def test_without_skipping_the_cache_scores_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a scheduler that reuses blocks whose positions were never scored."""
    monkeypatch.setattr(Seq, "num_to_score", property(lambda self: self.prompt_len - 1 if self.num_in_flight else 0))
    driver = ScoredDriver(CONFIG)
    prompt = list(range(11)) * 3
    driver.step(request(0, prompt, max_tokens=1, prompt_logprobs=0))
    driver.run()
    asked = request(1, prompt, max_tokens=1, prompt_logprobs=0)
    driver.step(asked)
    driver.run()
    with pytest.raises((AssertionError, KeyError)):
        check_prompt_scores(driver, asked)


def plan_one(depth: int, **sampling: Any) -> tuple[Scheduler, Driver]:
    driver = Driver(replace(CONFIG, depth=depth))
    driver.step(request(0, [7, 3, 7, 5], max_tokens=9, **sampling))
    return driver.scheduler, driver


@pytest.mark.parametrize("depth", [0, 1])
def test_the_history_holds_what_the_host_knows_and_a_gap_for_the_token_in_flight(depth: int) -> None:
    _, driver = plan_one(depth, repetition_penalty=1.5, frequency_penalty=0.5)
    for _ in range(3):
        driver.step()
    answer = driver.outputs[0]
    first, *_, last = [batch.edits for batch in driver.batches if batch is not None]
    assert first is not None and last is not None
    assert (first.token_ids.tolist(), first.token_counts.tolist()) == ([3, 5, 7], [0, 0, 0])
    known = [*answer[:3]] if depth == 0 else [*answer[:2], -1]
    assert last.token_ids.tolist() == [*known, 3, 5, 7]
    assert last.token_counts.tolist() == [1, 1, 1, 0, 0, 0]
    assert (last.repetition.tolist(), last.frequency.tolist(), last.presence.tolist()) == ([1.5], [0.5], [0.0])


def test_penalties_of_the_answer_alone_leave_the_prompt_out() -> None:
    _, driver = plan_one(0, presence_penalty=0.5)
    assert driver.batches[0] is not None and driver.batches[0].edits is not None
    assert driver.batches[0].edits.token_ids.tolist() == []


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_ids_are_banned_until_min_tokens_are_there_and_nothing_else_is(depth: int) -> None:
    """Counted without the prompt; all stop ids; no id -1."""
    _, driver = plan_one(depth, min_tokens=3, stop_token_ids=(8, 9), logit_bias=((2, 1.5),))
    driver.step()
    driver.step()
    driver.step()
    bans = [batch.edits for batch in driver.batches if batch is not None]
    due = [(2, 1.5), (8, -np.inf), (9, -np.inf)]
    for edits in bans[:3]:
        assert edits is not None and list(zip(edits.bias_ids, edits.biases, strict=True)) == due
    assert bans[3] is not None and bans[3].bias_ids.tolist() == [2]


def test_a_stop_id_before_min_tokens_does_not_end_the_request() -> None:
    """Even where a vocabulary of nothing but stop ids left no other choice."""
    driver = Driver(CONFIG, vocab_size=2)
    driver.step(request(0, [0], max_tokens=9, min_tokens=5, stop_token_ids=(0, 1)))
    driver.run()
    assert len(driver.outputs[0]) == 6 and driver.finished[0] == "stop"


def test_plain_requests_cost_nothing_and_digests_see_options() -> None:
    driver = Driver(CONFIG)
    plain = driver.step(request(0, [1, 2], max_tokens=2))
    assert plain is not None and (plain.edits, plain.scores, plain.min_p) == (None, None, None)
    digests = set()
    for sampling in ({"min_p": 0.2}, {"min_p": 0.3}, {"logit_bias": ((1, 1.0),)}, {"logprobs": 1}, {"logprobs": 2}, {}):
        batch = ScoredDriver(CONFIG).step(request(0, [1, 2], max_tokens=2, **sampling))
        assert batch is not None
        digests.add(batch_digest(batch))
    assert len(digests) == 5, "all differ but for the number of likeliest tokens, which is no array"


def test_scores_that_are_missing_are_noticed() -> None:
    scheduler = Scheduler(CONFIG, group=0)
    asked = request(0, [1, 2], max_tokens=2, logprobs=1)
    scheduler.apply(News(admissions=(Admission(group=0, request=asked),)), drain=False)
    planned = scheduler.schedule()
    assert planned is not None
    with pytest.raises(ValueError, match="1 scores are due, not 0"):
        scheduler.commit(planned, np.zeros(1, np.int64))
