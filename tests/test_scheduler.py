"""The scheduler against a fake model whose next token is a hash of what attention reads."""

import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from dist_infer.config import SchedulerConfig
from dist_infer.errors import RequestError, UsageError
from dist_infer.pages import BlockPool, chain_hash
from dist_infer.scheduler import Scheduler, batch_digest, check_fits
from dist_infer.sequences import Plan, Sequence, State
from dist_infer.types import Admission, Batch, BatchKind, News, PageChanges, Request, SamplingParams
from tests.fake_model import ContentError, Driver, alone
from tests.page_mirror import PageMirror

CONFIG = SchedulerConfig(max_model_len=64, max_num_seqs=8, max_num_tokens=32, block_size=4, num_kv_blocks=32)
VOCAB_SIZE = 11


def make_request(request_id: int, prompt: int | list[int], max_tokens: int = 4, **sampling: Any) -> Request:
    """A prompt by its length (then it is unlike all others) or by its ids; stop tokens are off unless given."""
    prompt_ids = (
        tuple(prompt) if isinstance(prompt, list) else tuple(1000 * (request_id + 1) + i for i in range(prompt))
    )
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Request(request_id=request_id, prompt_ids=prompt_ids, sampling=params)


def never_stops(request_id: int, prompt: int, max_tokens: int) -> Request:
    return make_request(request_id, prompt, max_tokens)


def stops_after(request_id: int, prompt: int, num_tokens: int, max_tokens: int = 30) -> Request:
    """A request whose stop token is its `num_tokens`th token."""
    for first in range(request_id * 1000, request_id * 1000 + 1000):
        request = make_request(request_id, [first, *range(prompt - 1)], max_tokens)
        tokens, _ = alone(request, VOCAB_SIZE)
        if tokens.index(tokens[num_tokens - 1]) == num_tokens - 1:
            return make_request(
                request_id, [first, *range(prompt - 1)], max_tokens, stop_token_ids=(tokens[num_tokens - 1],)
            )
    raise AssertionError("no such prompt")


def random_requests(rng: random.Random, count: int, config: SchedulerConfig) -> list[Request]:
    """Mixed lengths, many shared prefixes, some with stop tokens; each fits."""
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 24))] for _ in range(4)]
    requests = list[Request]()
    while len(requests) < count:
        prefix = rng.choice(prefixes) if rng.random() < 0.6 else []
        prompt = prefix + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0 if prefix else 1, 20))]
        stops = tuple(rng.sample(range(VOCAB_SIZE), 1)) if rng.random() < 0.5 else ()
        request = make_request(
            len(requests),
            prompt,
            rng.randint(1, 24),
            stop_token_ids=stops,
            temperature=rng.choice([0.0, 0.7]),
            top_k=rng.choice([0, 3]),
            top_p=rng.choice([1.0, 0.9]),
            seed=rng.randrange(-(2**63), 2**63),
        )
        try:
            check_fits(request, config)
        except RequestError:
            continue
        requests.append(request)
    return requests


def serve(config: SchedulerConfig, *, seed: int, count: int, abort_rate: float = 0.1) -> Driver:
    """Requests that come in bursts, with aborts of any of them at any time, until all have ended."""
    rng = random.Random(seed)
    driver = Driver(config, VOCAB_SIZE)
    to_come = random_requests(rng, count, config)[::-1]
    while to_come or driver.scheduler.live or any(driver.in_flight):
        burst = [to_come.pop() for _ in range(min(len(to_come), rng.choice([0, 0, 0, 1, 2, 30])))]
        known = [*driver.requests, *(request.request_id for request in burst), 10**6]
        some = rng.choice(known if rng.random() < 0.5 else known[-20:])  # finished ones too, and one that is nobody's
        driver.step(*burst, aborts=[some] if rng.random() < abort_rate else [])
    driver.check_end()
    return driver


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_200_requests_with_far_too_few_blocks_give_what_they_give_alone(depth: int, prefix_cache: bool) -> None:
    config = replace(CONFIG, num_kv_blocks=16, depth=depth, prefix_cache=prefix_cache)
    driver = serve(config, seed=depth, count=200)
    counters = driver.scheduler.counters
    assert counters.preemptions > 10 and len(driver.aborted) > 3
    assert set(driver.finished.values()) == {"stop", "length"}
    assert (counters.cached_tokens > 100) == prefix_cache
    kinds = {batch.kind for batch in driver.batches if batch is not None}
    assert kinds == {BatchKind.PREFILL, BatchKind.EXTEND, BatchKind.DECODE}


@pytest.mark.parametrize("seed", range(40))
def test_random_configurations(seed: int) -> None:
    rng = random.Random(1000 + seed)
    config = SchedulerConfig(
        max_model_len=rng.choice([20, 48, 64]),
        max_num_seqs=rng.choice([1, 2, 5, 16]),
        max_num_tokens=rng.choice([1, 3, 16, 17, 64]),
        block_size=rng.choice([1, 3, 4, 16]),
        num_kv_blocks=rng.choice([4, 16, 20, 64]),
        prefix_cache=rng.random() < 0.7,
        depth=seed % 2,
    )
    serve(config, seed=seed, count=40, abort_rate=rng.choice([0.0, 0.1, 0.5]))


def test_equal_calls_give_equal_digests_and_other_calls_others() -> None:
    config = replace(CONFIG, num_kv_blocks=16, depth=1)
    first, second, other = (serve(config, seed=seed, count=60).digests for seed in (5, 5, 6))
    assert first == second != other
    assert len(set(first)) > 0.9 * len(first) and min(first) >= 0


# Planted faults: the checks above can fail.


def register_before_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_chunk = Scheduler._plan_chunk

    def plan_and_register(self: Scheduler, seq: Sequence, plan: Plan) -> None:
        plan_chunk(self, seq, plan)
        self._register(seq, plan.ends[-1] // self._config.block_size)

    monkeypatch.setattr(Scheduler, "_plan_chunk", plan_and_register)


def release_aborted_in_flight_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    leave, released = Scheduler._leave, set[int]()

    def leave_early(self: Scheduler, seq: Sequence) -> None:
        if seq.state is not State.ENDED:
            leave(self, seq)
        elif seq.arrival not in released:
            released.add(seq.arrival)
            self._pool.release(seq.blocks)
            self._rows.give_back(seq.row, len(seq.blocks))

    monkeypatch.setattr(Scheduler, "_leave", leave_early)


def hash_blocks_without_their_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist_infer.sequences.chain_hash", lambda parent, token_ids: chain_hash(b"", token_ids))


def share_without_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(self: BlockPool, blocks: list[int]) -> None:
        for block in blocks:
            self._cached.pop(block, None)
            self._num_holders[block] = 1

    monkeypatch.setattr(BlockPool, "share", share)


def forget_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    arrive = Sequence.arrive

    def arrive_longer(request: Request, arrival: int) -> Sequence:
        sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens + 1)
        return arrive(replace(request, sampling=sampling), arrival)

    monkeypatch.setattr(Sequence, "arrive", arrive_longer)


def ignore_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Scheduler._append_token

    def append_and_go_on(self: Scheduler, seq: Sequence, *args: Any) -> object:
        output = append(self, seq, *args)
        if output.finish_reason == "stop":
            seq.state = State.RUNNING
            self._running[seq.request.request_id] = seq
        return output

    monkeypatch.setattr(Scheduler, "_append_token", append_and_go_on)


@pytest.mark.parametrize(
    ("plant", "depth", "symptom"),
    [
        (register_before_computed, 0, "reads foreign KV|is written by"),
        (register_before_computed, 1, "reads foreign KV|is written by"),
        (release_aborted_in_flight_at_once, 1, "is written by|reads foreign KV"),
        (share_without_counting, 0, "is written by|is released but"),
        (forget_the_limit, 0, "a token beyond the limit"),
        (ignore_the_end, 1, "after the end"),
    ],
)
def test_planted_faults_are_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], depth: int, symptom: str
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ContentError, ValueError), match=symptom):
        serve(replace(CONFIG, num_kv_blocks=16, depth=depth), seed=depth, count=200, abort_rate=0.3)


def test_equal_blocks_of_different_prefixes_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_three() -> None:
        driver = Driver(CONFIG, VOCAB_SIZE)
        first, second, third = ([block] * 4 for block in (1, 2, 3))
        for request_id, prompt in enumerate(([*first, *second], [*second, *third], [*first, *third])):
            driver.step(make_request(request_id, [*prompt, 7]))
            driver.run()
        driver.check_end()
        assert driver.scheduler.counters.cached_tokens == 4

    serve_three()
    hash_blocks_without_their_prefix(monkeypatch)
    with pytest.raises(ContentError):
        serve_three()


# Chunks and reuse at their boundaries (known faults B19 and B20).


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 31, 32, 33])
def test_chunk_and_block_boundaries(prompt_len: int, depth: int) -> None:
    config = replace(CONFIG, block_size=16, max_num_tokens=16, depth=depth)
    driver = Driver(config, VOCAB_SIZE)
    driver.step(make_request(0, prompt_len, 20), make_request(1, 5, 20))
    driver.run()
    driver.check_end()


def test_a_last_chunk_of_one_token_is_no_decode() -> None:
    driver = Driver(replace(CONFIG, block_size=16, max_num_tokens=16), VOCAB_SIZE)
    batches = [driver.step(make_request(0, 17)), driver.step(), driver.step()]
    assert [batch and (batch.num_tokens, batch.kind) for batch in batches] == [
        (16, BatchKind.PREFILL),
        (1, BatchKind.EXTEND),
        (1, BatchKind.DECODE),
    ]


def test_decodes_go_first_and_prompts_fill_the_rest_in_order() -> None:
    driver = Driver(replace(CONFIG, max_num_tokens=16), VOCAB_SIZE)
    driver.step(make_request(0, 3), make_request(1, 20), make_request(2, 8))
    batch = driver.step()
    assert batch is not None
    assert batch.request_ids.tolist() == [0, 1, 2] and np.diff(batch.query_start).tolist() == [1, 7, 8]


def test_tokens_stay_within_the_budget_when_prefixes_are_shared() -> None:
    config = replace(CONFIG, max_model_len=128, max_num_tokens=64, block_size=32)
    prefix = list(range(64))
    requests = [make_request(i, prefix + [100 * (i + 1) + k for k in range(40)]) for i in range(3)]
    driver = Driver(config, VOCAB_SIZE)
    batches = [driver.step(*requests), driver.step()]
    assert [batch and np.diff(batch.query_start).tolist() for batch in batches] == [[64], [40, 24]]
    driver.run()
    driver.check_end()
    assert driver.scheduler.counters.cached_tokens == 128
    cold = Driver(replace(config, prefix_cache=False), VOCAB_SIZE)
    cold.step(*requests)
    cold.run()
    assert cold.outputs == driver.outputs and cold.scheduler.counters.cached_tokens == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_block_is_not_reused_in_the_step_that_computes_it(depth: int) -> None:
    driver = Driver(replace(CONFIG, depth=depth), VOCAB_SIZE)
    first = driver.step(make_request(0, list(range(9))), make_request(1, list(range(9))))
    assert first is not None and first.num_tokens == 18
    second = driver.step(make_request(2, list(range(9))))
    assert second is not None and second.kv_lens.tolist()[-1] == 9
    assert np.diff(second.query_start).tolist()[-1] == (1 if depth == 0 else 9)  # at depth 1 nothing is committed yet
    driver.run()
    driver.check_end()


@pytest.mark.parametrize("prompt_len", [1, 4, 5, 8])
def test_a_prompt_that_is_all_cached_still_computes_its_last_token(prompt_len: int) -> None:
    driver = Driver(CONFIG, VOCAB_SIZE)
    for request_id in range(2):
        driver.step(make_request(request_id, list(range(prompt_len))))
        driver.run()
    driver.check_end()
    assert driver.scheduler.counters.cached_tokens == (prompt_len - 1) // 4 * 4


# Depth 1 (rule 10).


def test_a_token_in_flight_is_scheduled_without_its_id() -> None:
    driver = Driver(replace(CONFIG, depth=1), VOCAB_SIZE)
    request = never_stops(0, 4, 3)
    batches = [driver.step(request), driver.step(), driver.step(), driver.step()]
    assert [batch and batch.token_ids.tolist() for batch in batches] == [list(request.prompt_ids), [-1], [-1], None]
    assert [batch and batch.draw_positions.tolist() for batch in batches] == [[4], [5], [6], None]
    assert driver.finished == {0: "length"} and driver.scheduler.num_free_blocks == 32


def test_the_token_after_a_stop_is_dropped_and_the_blocks_go_at_its_commit() -> None:
    driver = Driver(replace(CONFIG, depth=1), VOCAB_SIZE)
    request = stops_after(0, 5, 2)
    driver.step(request)
    driver.step()
    driver.step()  # the third token goes out, then the second comes in: it is the stop
    assert driver.finished == {0: "stop"} and driver.scheduler.live == 0
    assert driver.scheduler.num_free_blocks == 30
    assert driver.step() is None
    assert driver.scheduler.num_free_blocks == 32
    driver.check_end()


def test_an_abort_in_flight_drops_the_token_and_releases_at_its_commit() -> None:
    driver = Driver(replace(CONFIG, depth=1), VOCAB_SIZE)
    driver.step(make_request(0, 5))
    driver.scheduler.apply(News(aborts=(0,)), drain=False)
    assert driver.scheduler.live == 0 and driver.scheduler.schedule() is None
    assert driver.scheduler.num_free_blocks == 30
    assert driver.collect() == []
    assert driver.scheduler.num_free_blocks == 32


def test_an_abort_of_a_sequence_that_is_not_in_flight_releases_at_once() -> None:
    driver = Driver(CONFIG, VOCAB_SIZE)
    driver.step(make_request(0, 40, 8))
    driver.scheduler.apply(News(aborts=(0, 0, 77)), drain=False)
    assert driver.scheduler.live == 0 and driver.scheduler.num_free_blocks == 32


def test_an_abort_of_a_waiting_request_holds_nothing() -> None:
    driver = Driver(replace(CONFIG, max_num_seqs=1), VOCAB_SIZE)
    driver.step(make_request(0, 4), make_request(1, 4))
    driver.step(aborts=[1])
    driver.run()
    driver.check_end()
    assert driver.outputs[1] == [] and driver.scheduler.counters.admissions == 1


@pytest.mark.parametrize("abort", [False, True])
def test_a_preempted_sequence_in_flight_keeps_its_token_unless_it_is_aborted(abort: bool) -> None:
    config = replace(CONFIG, num_kv_blocks=4, depth=1)
    driver = Driver(config, VOCAB_SIZE)
    driver.step(never_stops(0, 7, 8), never_stops(1, 7, 8))  # two blocks each: the pool is full
    driver.step()  # position 7
    in_flight = driver.batches[-1]
    batch = driver.step()  # position 8: request 0 needs a block, request 1 is preempted, its blocks are still held
    assert in_flight is not None and in_flight.request_ids.tolist() == [0, 1]
    assert batch is None
    assert driver.scheduler.counters.preemptions == 1 and len(driver.outputs[1]) == 2
    batch = driver.step(aborts=[1] if abort else [])
    assert batch is not None and batch.request_ids.tolist() == [0]
    driver.run()
    driver.check_end()
    assert len(driver.outputs[1]) == (2 if abort else 8)


def test_a_preempted_sequence_in_flight_may_end_with_its_token() -> None:
    config = replace(CONFIG, num_kv_blocks=4, depth=1)
    driver = Driver(config, VOCAB_SIZE)
    driver.step(never_stops(0, 7, 8), stops_after(1, 7, 2, max_tokens=8))
    driver.step()
    driver.step()
    assert driver.finished == {1: "stop"} and driver.scheduler.counters.preemptions == 1
    driver.run()
    driver.check_end()


def test_nobody_is_preempted_when_a_step_in_flight_gives_blocks_back() -> None:
    config = replace(CONFIG, num_kv_blocks=4, depth=1)
    driver = Driver(config, VOCAB_SIZE)
    driver.step(never_stops(0, 7, 8), never_stops(1, 7, 2))
    driver.step()
    assert driver.step() is None  # request 0 waits for the end of request 1
    driver.run()
    driver.check_end()
    assert driver.scheduler.counters.preemptions == 0


# Waiting, draining, refusing.


def test_the_newest_is_preempted_and_nobody_overtakes() -> None:
    driver = Driver(replace(CONFIG, num_kv_blocks=6), VOCAB_SIZE)
    driver.step(*(never_stops(i, 7, 8) for i in range(4)))
    order = list[int]()
    while driver.scheduler.live:
        driver.step()
        order += [request_id for request_id in driver.finished if request_id not in order]
    assert order == [0, 1, 2, 3] and driver.scheduler.counters.preemptions > 0
    driver.check_end()


def test_no_block_for_a_live_request_is_no_error() -> None:
    driver = Driver(replace(CONFIG, num_kv_blocks=4, depth=1), VOCAB_SIZE)
    driver.step(never_stops(0, 12, 1))
    assert driver.step(never_stops(1, 12, 1)) is None
    assert driver.scheduler.live == 1  # request 0 ended at this step's collect; request 1 got no block before it
    driver.run()
    driver.check_end()


@pytest.mark.parametrize("depth", [0, 1])
def test_drain_gives_back_what_never_started_and_finishes_the_rest(depth: int) -> None:
    config = replace(CONFIG, num_kv_blocks=7, max_num_seqs=3, depth=depth)
    driver = Driver(config, VOCAB_SIZE)
    requests = [never_stops(i, 7, 8) for i in range(5)]
    driver.step(*requests)
    while not driver.scheduler.counters.preemptions:
        driver.step()
    driver.step(drain=True)
    while driver.scheduler.live or any(driver.in_flight):
        driver.step(drain=True)
    assert sorted(driver.finished) == [0, 1, 2]
    assert driver.scheduler.num_free_blocks == 7


def test_live_counts_what_is_not_known_to_have_ended() -> None:
    driver = Driver(replace(CONFIG, max_num_seqs=2, depth=1), VOCAB_SIZE)
    driver.step(*(never_stops(i, 4, 2) for i in range(3)))
    assert driver.scheduler.live == 3
    driver.scheduler.apply(News(aborts=(0,)), drain=False)
    assert driver.scheduler.live == 2
    driver.scheduler.apply(News(), drain=True)
    assert driver.scheduler.live == 1


def test_requests_of_other_groups_are_theirs() -> None:
    scheduler = Scheduler(CONFIG, group=1)
    scheduler.apply(News(admissions=(Admission(group=0, request=make_request(0, 4)),), aborts=(0,)), drain=False)
    assert scheduler.live == 0 and scheduler.schedule() is None


def test_a_budget_below_the_running_sequences_starves_nobody() -> None:
    driver = Driver(replace(CONFIG, max_num_tokens=2), VOCAB_SIZE)
    driver.step(*(never_stops(i, 3, 6) for i in range(5)))
    driver.run()
    driver.check_end()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make_request(0, 0), ["no tokens"]),
        (make_request(0, 4, 0), ["max_tokens is 0"]),
        (make_request(0, 64), ["64 tokens", "within 64", "--max-model-len"]),
        (make_request(0, 60, 5), ["60 tokens", "max_tokens is 5", "65 together", "--max-model-len"]),
        (make_request(0, 30, 12), ["11 KV blocks", "there are 10", "--num-kv-blocks"]),
    ],
)
def test_what_can_never_fit_is_refused_with_numbers(request_: Request, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        check_fits(request_, replace(CONFIG, num_kv_blocks=10))
    assert all(word in str(caught.value) for word in words)
    assert caught.value.param in ("prompt", "max_tokens")


@pytest.mark.parametrize("depth", [0, 1])
def test_the_largest_request_that_fits_finishes(depth: int) -> None:
    config = replace(CONFIG, num_kv_blocks=10, max_num_tokens=7, depth=depth)
    driver = Driver(config, VOCAB_SIZE)
    driver.step(never_stops(0, 30, 11), never_stops(1, 1, 40))
    driver.run()
    driver.check_end()


@pytest.mark.parametrize(
    "name", ["max_model_len", "max_num_seqs", "max_num_tokens", "block_size", "num_kv_blocks", "depth"]
)
def test_a_configuration_that_cannot_run_is_refused(name: str) -> None:
    wrong: dict[str, Any] = {name: -1}
    with pytest.raises(UsageError, match=name):
        Scheduler(replace(CONFIG, **wrong), group=0)


def test_batches_are_committed_in_order_with_their_number_of_tokens() -> None:
    driver = Driver(replace(CONFIG, depth=1), VOCAB_SIZE)
    scheduler = driver.scheduler
    first = driver.step(make_request(0, 4))
    second = scheduler.schedule()
    assert first is not None and second is not None
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        scheduler.schedule()
    with pytest.raises(RuntimeError, match="not the oldest"):
        scheduler.commit(second, np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="1 tokens are due"):
        scheduler.commit(first, np.zeros(2, np.int64))


def test_the_digest_sees_every_field() -> None:
    batch = Driver(CONFIG, VOCAB_SIZE).step(make_request(0, 5), make_request(1, 40, 2))
    assert batch is not None
    digests = {batch_digest(batch), batch_digest(replace(batch, kind=BatchKind.DECODE))}
    options = {"min_p", "edits", "scores"}  # test_step_options
    names = {entry.name for entry in fields(Batch)} - {"kind", "pages", *options}
    for name in names:
        digests.add(batch_digest(replace(batch, **{name: changed(getattr(batch, name))})))
    assert isinstance(batch.pages, PageChanges)
    for name in ("rows", "columns", "page_ids"):
        pages = replace(batch.pages, **{name: changed(getattr(batch.pages, name))})
        digests.add(batch_digest(replace(batch, pages=pages)))
    table = PageMirror(CONFIG.max_num_seqs, CONFIG.num_kv_blocks).table_of(batch)
    digests |= {batch_digest(replace(batch, pages=pages)) for pages in (table, changed(table))}
    assert len(digests) == 2 + len(names) + 3 + 2


def changed(array: Any) -> Any:
    other = array.copy()
    other.flat[-1] += 1
    return other


def test_an_admission_leaves_blocks_to_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without spare blocks the same load is preempted more often."""
    config = replace(CONFIG, num_kv_blocks=24, max_num_seqs=8)
    spared = serve(config, seed=3, count=150, abort_rate=0).scheduler.counters.preemptions
    monkeypatch.setattr("dist_infer.scheduler._RUNNING_PER_SPARE_BLOCK", 10**9)
    assert serve(config, seed=3, count=150, abort_rate=0).scheduler.counters.preemptions > spared
