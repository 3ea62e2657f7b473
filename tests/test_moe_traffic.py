"""Random traffic on 2 and 4 ranks with experts: no pattern may hang the pool or change a token.

Bursts and silences (in which the pool sleeps), prompts and answers of very different lengths, aborts in flight, groups
that are full or idle, one rank delayed at random points. Each request gives what it gives alone on one rank.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from dist_infer.comm.mesh import split_heads
from dist_infer.dispatcher import Incoming
from dist_infer.errors import ExitCode
from dist_infer.kv_cache import KVCache
from dist_infer.launch.world import World
from dist_infer.runner import Runner
from dist_infer.types import Request, SamplingParams, StepOutput
from tests.batches import Part, make_batch
from tests.serving import Served, load, make_config, on_rank_0

MAX_TOKENS = 12
# (family, tp, dp, --moe-max-tokens) by world size
LAYOUTS: dict[int, list[tuple[str, int, int, int | None]]] = {
    2: [("mixtral", 1, 2, 3), ("deepseek-v3", 1, 2, None), ("mixtral", 2, 1, 5)],
    4: [("mixtral", 2, 2, 3), ("deepseek-v3", 1, 4, 7), ("deepseek-v3", 2, 2, None)],
}


def make_prompts() -> list[tuple[int, ...]]:
    """Mostly short, some long, some with a common beginning."""
    choose = random.Random(0)
    lengths = [choose.choice((1, 2, 3, 5, 9, 17, 40)) for _ in range(24)]
    return [
        (*(range(12) if idx % 3 == 0 else ()), *(choose.randrange(131) for _ in range(length)))
        for idx, length in enumerate(lengths)
    ]


PROMPTS = make_prompts()


@dataclass
class Traffic:
    """A frontend that gives its requests in bursts and aborts some once they have so many tokens."""

    bursts: list[list[Request]]
    silences_s: list[float]  # before each burst
    abort_after: Mapping[int, int]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    next_at: float | None = None

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.DONE

    @property
    def exhausted(self) -> bool:
        return not self.bursts and not self.waiting and self.tokens.keys() == self.reasons.keys()

    def ready(self) -> bool:
        return not self.bursts or time.monotonic() >= self._due()

    def _due(self) -> float:
        if self.next_at is None:
            self.next_at = time.monotonic() + self.silences_s[-len(self.bursts)]
        return self.next_at

    def poll(self, room: int) -> Incoming:
        if self.bursts and time.monotonic() >= self._due():
            self.waiting += self.bursts.pop(0)
            self.next_at = None
        taken, self.waiting = self.waiting[:room], self.waiting[room:]
        self.tokens.update({request.request_id: [] for request in taken})
        aborts = [
            request_id
            for request_id, count in self.abort_after.items()
            if request_id in self.tokens and request_id not in self.reasons and len(self.tokens[request_id]) >= count
        ]
        for request_id in aborts:
            self.reasons[request_id] = "abort"
        return Incoming(requests=taken, aborts=aborts, end_of_input=not self.bursts and not self.waiting)

    def deliver(self, output: StepOutput) -> None:
        if output.request_id in self.reasons:
            return
        self.tokens[output.request_id].extend(output.token_ids)
        if output.finish_reason is not None:
            self.reasons[output.request_id] = output.finish_reason

    def fail_open(self, message: str) -> None:
        raise AssertionError(message)

    def close(self) -> None:
        return None


def make_traffic(seed: int) -> Traffic:
    choose = random.Random(seed)
    chosen = choose.sample(range(len(PROMPTS)), choose.randint(1, 10))
    requests = [
        Request(
            request_id=idx,
            prompt_ids=PROMPTS[idx],
            sampling=SamplingParams(max_tokens=choose.choice((1, 2, 5, MAX_TOKENS)), temperature=0.0),
        )
        for idx in sorted(chosen)
    ]
    bursts: list[list[Request]] = []
    while requests:
        size = choose.randint(1, len(requests))
        bursts.append(requests[:size])
        requests = requests[size:]
    aborts = {idx: choose.randint(0, 4) for idx in chosen if choose.random() < 0.2}
    return Traffic(bursts, [choose.choice((0.0, 0.0, 0.002, 0.02)) for _ in bursts], aborts)


def make_delay(seed: int, rank: int, size: int) -> Callable[[], None]:
    """Sleeps before some launches of one rank."""
    choose = random.Random(seed)
    if choose.randrange(size) != rank:
        return lambda: None
    return lambda: time.sleep(choose.choice((0.0, 0.0, 0.001, 0.006)))


def alone(folder: Path, prompt: Sequence[int]) -> list[int]:
    """Greedy tokens on one rank, token by token."""
    tiny_models = pytest.importorskip("tests.tiny_models")
    model = tiny_models.load_tiny_model(folder)
    heads = split_heads(model.config.num_heads, model.config.num_kv_heads, 1, 0)
    cpu = torch.device("cpu")
    runner = Runner(model, KVCache(model.config, heads, 20, 4, torch.float64, cpu), max_num_seqs=1, device=cpu)
    ids = list(prompt)
    for step in range(MAX_TOKENS):
        new = ids if step == 0 else ids[-1:]
        batch = make_batch([Part(token_ids=new, start=len(ids) - len(new), pages=range(20))], block_size=4)
        ids.append(int(runner.run(runner.prepare(batch))[0].argmax()))
    return ids[len(prompt) :]


def check(traffic: Traffic, expected: Mapping[int, list[int]]) -> None:
    assert traffic.exhausted
    for request_id, tokens in traffic.tokens.items():
        assert tokens == expected[request_id][: len(tokens)], request_id
        if traffic.reasons[request_id] == "abort":
            assert len(tokens) >= traffic.abort_after[request_id]
        else:
            assert traffic.reasons[request_id] == "length"


def run_patterns(world: World, folder: Path, seeds: range) -> None:
    tiny_families = pytest.importorskip("tests.tiny_families")
    expected: dict[str, dict[int, list[int]]] = {}

    def prepare() -> None:
        for family in ("mixtral", "deepseek-v3"):
            tiny_families.make_tiny(folder / family, family, num_hidden_layers=2)
            expected[family] = {idx: alone(folder / family, prompt) for idx, prompt in enumerate(PROMPTS)}

    on_rank_0(world, prepare)
    layouts: list[tuple[str, Served]] = [
        (family, load(world, folder / family, tp=tp, dp=dp, max_moe_tokens=max_moe_tokens))
        for family, tp, dp, max_moe_tokens in LAYOUTS[world.size]
    ]
    for seed in seeds:
        family, served = layouts[seed % len(layouts)]
        traffic = make_traffic(seed)
        config = make_config(
            depth=seed % 2,
            block_size=4,
            num_kv_blocks=(16, 40, 200)[seed // 2 % 3],
            max_num_tokens=(5, 64)[seed // 3 % 2],
            max_num_seqs=(2, 8)[seed // 4 % 2],
            max_model_len=64,
        )
        served.serve(traffic, config, make_delay(seed, world.rank, world.size))
        if world.rank == 0:
            check(traffic, expected[family])


@pytest.fixture(scope="session")
def shared_folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 0's temporary folder, for all ranks of this launch."""
    own = str(tmp_path_factory.mktemp("traffic"))
    return Path(world.vote("folder", None, {"path": own})[0]["path"])


@pytest.mark.ranks(2, 4, timeout=150)
def test_25_patterns(world: World, shared_folder: Path) -> None:
    run_patterns(world, shared_folder, range(25))


@pytest.mark.soak
@pytest.mark.ranks(2, 4, timeout=1800)
def test_500_patterns(world: World, shared_folder: Path) -> None:
    run_patterns(world, shared_folder, range(500))


def test_a_wrong_token_or_a_lost_request_is_noticed() -> None:
    expected = {0: [1, 2, 3]}
    good = Traffic([], [], {}, tokens={0: [1, 2]}, reasons={0: "length"})
    check(good, expected)
    for bad in (
        Traffic([], [], {}, tokens={0: [1, 3]}, reasons={0: "length"}),
        Traffic([], [], {}, tokens={0: [1, 2]}),
        Traffic([], [], {0: 3}, tokens={0: [1, 2]}, reasons={0: "abort"}),
    ):
        with pytest.raises(AssertionError):
            check(bad, expected)
