"""Whole jobs of models with experts on 1 to 4 ranks, against transformers in float64.

Every job mixes prompts with common beginnings that end around the edges of blocks, answers of other lengths (so groups
fall idle at other times), chunked prompts and reused blocks.
"""

import json
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dist_infer.comm import expert
from dist_infer.comm.expert_all_to_all import AllToAll
from dist_infer.errors import UsageError
from dist_infer.launch import mpirun
from dist_infer.launch.world import World
from dist_infer.types import Request, SamplingParams
from tests.serving import Served, load, on_rank_0

FAMILIES = ("deepseek-v3", "deepseek-v2-lite", "deepseek-v2", "qwen3-moe", "mixtral", "minimax-m2")

# (family, tp, dp, ep, --moe-max-tokens, --max-num-tokens, depth)
JOBS: dict[int, list[tuple[str, int, int, int, int | None, int, int]]] = {
    1: [
        ("deepseek-v3", 1, 1, 1, 7, 7, 1),
        ("qwen3-moe", 1, 1, 1, 100, 13, 0),
    ],
    2: [
        ("deepseek-v3", 2, 1, 2, 7, 7, 0),
        ("deepseek-v3", 1, 2, 2, 1, 256, 1),
        ("deepseek-v2-lite", 1, 2, 1, 100, 7, 1),
        ("deepseek-v2", 2, 1, 1, None, 13, 1),
        ("qwen3-moe", 1, 2, 2, None, 7, 0),
        ("mixtral", 2, 1, 2, 1, 256, 0),
        ("minimax-m2", 1, 2, 2, 7, 13, 0),
    ],
    3: [
        ("deepseek-v3", 1, 3, 3, 100, 256, 0),
        ("deepseek-v2-lite", 3, 1, 3, 7, 13, 1),
        ("deepseek-v2", 1, 3, 1, 1, 7, 0),
        ("qwen3-moe", 3, 1, 1, None, 256, 0),
        ("minimax-m2", 3, 1, 3, 1, 7, 1),
    ],
    4: [
        ("deepseek-v3", 2, 2, 4, 7, 7, 1),
        ("deepseek-v3", 1, 4, 4, None, 13, 0),
        ("deepseek-v2-lite", 4, 1, 4, 1, 256, 0),
        ("deepseek-v2", 2, 2, 2, 100, 13, 0),
        ("qwen3-moe", 2, 2, 4, 1, 256, 1),
        ("qwen3-moe", 4, 1, 2, 7, 7, 0),
        ("mixtral", 1, 4, 1, 7, 256, 1),
        ("minimax-m2", 4, 1, 4, None, 7, 1),
        ("minimax-m2", 2, 2, 4, 100, 7, 0),
    ],
}
BASE = [(7 * i * i + 5 * i + 3) % 131 for i in range(60)]
# Blocks have 4 tokens: beginnings that end before, at and behind an edge, alone and far on.
LENGTHS = [41, 7, 8, 9, 1, 40, 3]


@pytest.fixture(scope="session")
def shared_folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 0's temporary folder, for all ranks of this launch."""
    own = str(tmp_path_factory.mktemp("moe-job"))
    return Path(world.vote("folder", None, {"path": own})[0]["path"])


def requests() -> list[Request]:
    return [
        Request(
            request_id=idx,
            prompt_ids=(*BASE[:length], 100 + idx),
            sampling=SamplingParams(max_tokens=(32, 3, 7, 12, 5, 1, 9)[idx], temperature=0.0),
        )
        for idx, length in enumerate(LENGTHS)
    ]


@cache
def oracle_tokens(folder: Path) -> dict[int, list[int]]:
    """What transformers gives each request."""
    tiny_models = pytest.importorskip("tests.tiny_models")
    oracle = tiny_models.LiftedOracle(folder)
    return {
        request.request_id: oracle.greedy(request.prompt_ids, request.sampling.max_tokens)[0] for request in requests()
    }


def make_folder(world: World, shared_folder: Path, family: str) -> Path:
    """The same files whenever it is called. Ranks: collective over the world."""
    tiny_families = pytest.importorskip("tests.tiny_families")
    folder = shared_folder / family
    on_rank_0(world, lambda: tiny_families.make_tiny(folder, family, mtp=family == "deepseek-v3"))
    return folder


def check_job(served: Served, folder: Path, case: object, **limits: int) -> None:
    """The job's tokens are those of transformers. Ranks: collective over the world."""
    answers = served.run(requests(), block_size=4, num_kv_blocks=120, **limits)
    if served.world.rank == 0:
        assert answers.tokens == oracle_tokens(folder), case


@pytest.mark.ranks(1, 2, 3, 4, timeout=200)
def test_jobs_in_every_layout_equal_the_oracle(world: World, shared_folder: Path) -> None:
    for idx, (family, tp, dp, ep, max_moe_tokens, max_num_tokens, depth) in enumerate(JOBS[world.size]):
        folder = make_folder(world, shared_folder, family)
        served = load(world, folder, tp=tp, dp=dp, ep=ep, max_moe_tokens=max_moe_tokens)
        # In company; then every second job one after another too, so that blocks are found again: all families come up.
        for max_num_seqs in (8,) if idx % 2 else (8, 1):
            case = (family, tp, dp, ep, max_moe_tokens, max_num_tokens, max_num_seqs)
            check_job(served, folder, case, depth=depth, max_num_tokens=max_num_tokens, max_num_seqs=max_num_seqs)


@pytest.mark.soak
@pytest.mark.ranks(1, 2, 3, 4, timeout=3000)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_layouts_and_chunk_limits_equal_the_oracle(world: World, shared_folder: Path, family: str) -> None:
    """The full product; in `make test` it is pairwise here, and in one process in tests/models/test_decoder.py."""
    divisors = [size for size in range(1, world.size + 1) if world.size % size == 0]
    folder = make_folder(world, shared_folder, family)
    for dp, ep, max_moe_tokens in product(divisors, divisors, (1, 7, 100, None)):
        served = load(world, folder, dp=dp, ep=ep, max_moe_tokens=max_moe_tokens)
        for depth, max_num_tokens, max_num_seqs in product((0, 1), (5, 256), (1, 8)):
            case = (family, dp, ep, max_moe_tokens, depth, max_num_tokens, max_num_seqs)
            check_job(served, folder, case, depth=depth, max_num_tokens=max_num_tokens, max_num_seqs=max_num_seqs)


def test_the_full_product_has_all_families() -> None:
    assert set(FAMILIES) == set(pytest.importorskip("tests.tiny_families").CONFIGS)


@pytest.mark.ranks(2, 4, timeout=100)
def test_logits_equal_the_oracle(world: World, shared_folder: Path) -> None:
    tiny_models = pytest.importorskip("tests.tiny_models")
    tiny_families = pytest.importorskip("tests.tiny_families")
    for family in tiny_families.CONFIGS:
        folder = make_folder(world, shared_folder, family)
        expected = tiny_models.LiftedOracle(folder).logits(BASE[:33]) if world.rank == 0 else None
        for tp in (world.size, world.size // 2):
            logits = load(world, folder, tp=tp, dp=world.size // tp, max_moe_tokens=20).logits(BASE[:33])
            if expected is not None:
                assert (logits - expected).abs().max().item() <= 1e-9, (family, tp)


@pytest.mark.ranks(2, 4)
def test_large_prefills_go_by_all_to_all_and_give_the_same(
    world: World, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(world, shared_folder, "mixtral")
    prompts = [tuple((11 * i * i + 3 * i + idx) % 131 for i in range(70 + 20 * idx)) for idx in range(5)]
    long_requests = [
        Request(request_id=idx, prompt_ids=prompt, sampling=SamplingParams(max_tokens=6, temperature=0.0))
        for idx, prompt in enumerate(prompts)
    ]
    calls: list[int] = []
    run = AllToAll.run

    def counted(self: AllToAll, *args: Any) -> Any:
        calls.append(len(calls))
        return run(self, *args)

    monkeypatch.setattr(AllToAll, "run", counted)
    monkeypatch.setattr(expert, "_MIN_SELECTIVE_ROWS", 256)
    monkeypatch.setattr(expert, "_MIN_SAVING", 0.0)  # too few ranks to be worth it, but enough to be right
    served = load(world, folder, dp=world.size, max_moe_tokens=150)
    answers = served.run(long_requests, max_num_tokens=512)
    assert calls
    calls.clear()
    monkeypatch.setattr(expert, "_MIN_SELECTIVE_ROWS", 10**9)
    gathered = served.run(long_requests, max_num_tokens=512)
    assert not calls
    assert answers.tokens == gathered.tokens


@pytest.mark.ranks(4)
def test_layouts_without_an_expert_for_a_rank_are_refused(world: World, shared_folder: Path) -> None:
    tiny_families = pytest.importorskip("tests.tiny_families")
    folder = shared_folder / "three-experts"
    on_rank_0(world, lambda: tiny_families.make_tiny(folder, "mixtral", num_local_experts=3))
    with pytest.raises(UsageError, match="--ep 4 leaves ranks without an expert: the model has 3; .* --ep 2"):
        load(world, folder, tp=1, dp=4)


def test_the_command_serves_experts_in_two_groups(tmp_path: Path) -> None:
    """`dist-infer run` as a user starts it: the options reach the layers."""
    tiny_families = pytest.importorskip("tests.tiny_families")
    folder = tiny_families.make_tiny(tmp_path / "model", "deepseek-v3", mtp=True)
    lines = [
        {
            "custom_id": str(request.request_id),
            "prompt": request.prompt_ids,
            "max_tokens": request.sampling.max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        for request in requests()
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--dtype", "float64", "--num-kv-blocks", "100", "--dp", "2", "--ep", "2", "--moe-max-tokens", "3"]
    files = ["--model", folder, "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl"]
    launch = mpirun.command(
        2,
        [sys.executable, "-P", "-m", "dist_infer", "run", *map(str, files), *options],
        launcher=mpirun.find_launcher(),
        oversubscribe=True,
        extra_env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
    )
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = mpirun.start(launch, output=output)
        try:
            code = process.wait(100)
        finally:
            mpirun.stop(process)
    assert code == 0, log.read_text()
    assert "tp=1 dp=2 ep=2" in log.read_text()
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    choices = {int(record["custom_id"]): record["response"]["body"]["choices"][0] for record in records}
    assert {idx: choice["token_ids"] for idx, choice in choices.items()} == oracle_tokens(folder)
