"""The step loop in an in-memory world: every request gets the tokens it gives alone, and every run ends."""

import itertools
import random

import pytest

from dist_infer.errors import ExitCode, PeerFailedError
from tests.memory_control import DiedError, VotedError
from tests.protocol_world import World, make_request, run_world

LAYOUTS = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]  # ranks, dp
POINTS = ["news", "prepare", "launch", "collect", "output", "close"]


@pytest.mark.parametrize(("ranks", "dp"), LAYOUTS)
@pytest.mark.parametrize("depth", [0, 1])
def test_all_requests_finish_with_their_own_tokens(ranks: int, dp: int, depth: int) -> None:
    requests = [make_request(idx, prompt_len=1 + 5 * idx % 13, max_tokens=1 + 3 * idx % 7) for idx in range(8)]
    world = run_world(
        ranks=ranks, dp=dp, depth=depth, arrivals=[requests[:3], [], requests[3:]], true_len={1: 1, 2: 2, 4: 3}
    )
    assert set(world.codes.values()) == {ExitCode.DONE}
    assert set(world.script.reasons) == set(range(8))
    assert world.script.reasons[1] == "stop"
    assert world.script.reasons[7] == "length"
    assert world.script.closed


@pytest.mark.parametrize("depth", [0, 1])
def test_input_without_requests_ends(depth: int) -> None:
    assert set(run_world(ranks=3, depth=depth).codes.values()) == {ExitCode.DONE}


@pytest.mark.parametrize("seed", range(30))
def test_random_traffic(seed: int) -> None:
    """Bursts, silences, aborts, early ends and delays, on random layouts and with few blocks."""
    rng = random.Random(seed)
    ranks, dp = rng.choice(LAYOUTS)
    requests = [make_request(i, rng.randint(1, 15), rng.randint(1, 9)) for i in range(rng.randint(1, 12))]
    arrivals: list[list[object]] = [[]]
    for request in requests:
        for _ in range(rng.choice([0, 0, 1, 3])):
            arrivals.append([])
        arrivals[-1].append(request)
    num_blocks = rng.choice([6, 8, 30])
    world = run_world(
        ranks=ranks,
        dp=dp,
        depth=rng.randint(0, 1),
        arrivals=arrivals,
        true_len={i: rng.randint(1, 6) for i in range(len(requests)) if rng.random() < 0.5},
        aborts_after={i: rng.randint(0, 3) for i in range(len(requests)) if rng.random() < 0.25},
        num_kv_blocks=lambda _: num_blocks,
        jitter_seed=seed,
    )
    assert set(world.codes.values()) == {ExitCode.DONE}
    assert world.script.reasons.keys() | world.script.aborted == set(range(len(requests)))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("ranks", "dp"), [(2, 1), (2, 2), (3, 1)])
def test_an_error_anywhere_ends_the_job_on_all_ranks(ranks: int, dp: int, depth: int) -> None:
    for point, rank, visit in itertools.product(POINTS, range(ranks), [1, 2]):
        if (rank != 0 and point in ("news", "output", "close")) or (point, visit) == ("close", 2):
            continue
        world = World(
            ranks=ranks,
            dp=dp,
            depth=depth,
            arrivals=[[make_request(i) for i in range(4)]],
            faults={(point, rank): (visit, RuntimeError("planted"))},
        ).run()
        assert set(world.codes.values()) == {ExitCode.ERROR}, (point, rank, visit)
        errors = world.errors.values()
        if point in ("news", "collect", "output"):  # before the record: voted, the same error everywhere
            assert all(isinstance(e, VotedError) and "planted" in str(e) for e in errors), (point, rank, visit, errors)
        elif point != "close":  # after it: this rank raises it, the others see a failed peer
            assert "planted" in str(world.errors[rank])
            assert all(isinstance(e, PeerFailedError) for r, e in world.errors.items() if r != rank)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_dead_rank_ends_the_job(rank: int, depth: int) -> None:
    for point, visit in itertools.product(["prepare", "launch", "collect"], [1, 3]):
        world = World(
            ranks=3,
            depth=depth,
            arrivals=[[make_request(i) for i in range(4)]],
            faults={(point, rank): (visit, DiedError())},
        ).run()
        assert world.codes == {r: ExitCode.ERROR for r in range(3) if r != rank}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_happens_while_the_pool_sleeps(rank: int, depth: int) -> None:
    for what, code in [("stop", ExitCode.DONE), ("error", ExitCode.ERROR), ("die", ExitCode.ERROR)]:
        world = World(ranks=3, depth=depth, arrivals=[[make_request(0)]], ends=False, when_idle=[(what, rank)]).run()
        assert set(world.codes.values()) == {code}, what
        assert world.script.reasons == {0: "length"}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_stop_drains(rank: int, depth: int) -> None:
    """What has started finishes, what has not is given back, and the code says so."""
    world = World(
        ranks=3,
        depth=depth,
        arrivals=[[make_request(i, prompt_len=8, max_tokens=6)] for i in range(12)],
        stops={("prepare", rank): 4},
    ).run()
    assert set(world.codes.values()) == {ExitCode.DRAINED}
    assert world.script.reasons
    assert len(world.script.reasons) < 12


def test_two_stops_and_errors_while_draining() -> None:
    for depth, rank in itertools.product([0, 1], [0, 1]):
        world = World(
            ranks=2,
            depth=depth,
            arrivals=[[make_request(i, prompt_len=8, max_tokens=6)] for i in range(6)],
            stops={("prepare", 0): 3, ("prepare", 1): 4},
            faults={("collect", rank): (6, RuntimeError("planted"))},
        ).run()
        assert set(world.codes.values()) == {ExitCode.ERROR}
