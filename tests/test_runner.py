"""The runner below the scheduler: a sequence's logits depend neither on how it was cut into steps nor on company."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_infer.comm.mesh import split_heads
from dist_infer.kv_cache import KVCache
from dist_infer.runner import Runner
from dist_infer.types import Batch
from tests.batches import Part, make_batch
from tests.devices import DEVICES
from tests.tiny_models import LiftedOracle, load_tiny_model, make_tiny_llama

BLOCK_SIZE = 4
PROMPT = [(7 * i * i + 3 * i + 1) % 131 for i in range(23)]
PAGES = [9, 2, 13, 0, 5, 11, 7]
FIRST_FREE_PAGE = 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), 4, 2, attention_bias=True)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tensor:
    """Logits of every token of the prompt."""
    return LiftedOracle(folder).logits(PROMPT)


def make_runner(
    folder: Path, *, max_num_seqs: int = 4, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Runner:
    model = load_tiny_model(folder, dtype=dtype, device=device)
    shard = split_heads(model.config.num_heads, model.config.num_kv_heads, 1, 0)
    kv_cache = KVCache(model.config, shard, 40, BLOCK_SIZE, dtype, torch.device(device))
    return Runner(model, kv_cache, max_num_seqs=max_num_seqs, device=torch.device(device))


@pytest.fixture
def runner(folder: Path) -> Runner:
    return make_runner(folder)


def run(runner: Runner, *parts: Part) -> Tensor:
    return runner.run(runner.prepare(make_batch(parts, block_size=BLOCK_SIZE)))


def chunks(lens: Sequence[int]) -> list[Part]:
    """The prompt in chunks of these lengths, one step each."""
    starts = np.concatenate(([0], np.cumsum(lens))).tolist()
    return [
        Part(token_ids=PROMPT[start : start + n], start=start, pages=PAGES)
        for start, n in zip(starts, lens, strict=False)
    ]


def close(ours: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-9)


@pytest.mark.parametrize("lens", [[23], [1] * 23, [22, 1], [1, 22], [4, 4, 4, 4, 4, 3], [5, 1, 1, 9, 7], [3, 17, 3]])
def test_chunked_is_whole(runner: Runner, expected: Tensor, lens: list[int]) -> None:
    """Prefill, extend and one-token chunks give the logits of the whole prompt, at every chunk's end."""
    for part in chunks(lens):
        close(run(runner, part)[0], expected[part.start + len(part.token_ids) - 1])


def test_cached_prefix_is_cold(runner: Runner, expected: Tensor) -> None:
    """A second sequence that shares the first's full pages and computes only the rest."""
    run(runner, Part(token_ids=PROMPT, start=0, pages=PAGES))
    for num_shared in (1, 3, 5):
        pages = [*PAGES[:num_shared], *range(FIRST_FREE_PAGE, FIRST_FREE_PAGE + 6)]
        start = num_shared * BLOCK_SIZE
        close(run(runner, Part(token_ids=PROMPT[start:], start=start, pages=pages))[0], expected[-1])


def test_a_prefix_that_was_never_computed_shows(runner: Runner, expected: Tensor) -> None:
    """The tests above can fail: with pages of zeros for a prefix the logits are far off."""
    logits = run(runner, Part(token_ids=PROMPT[4:], start=4, pages=PAGES))
    assert (logits[0] - expected[-1]).abs().max() > 1e-3


def test_alone_is_in_company(runner: Runner, expected: Tensor) -> None:
    """A decode, a chunk with history, a whole prompt and a dummy-like sequence in one step."""
    run(runner, Part(token_ids=PROMPT[:22], start=0, pages=PAGES))
    run(runner, Part(token_ids=PROMPT[:6], start=0, pages=range(20, 27)))
    logits = run(
        runner,
        Part(token_ids=PROMPT[6:20], start=6, pages=range(20, 27)),
        Part(token_ids=PROMPT[22:], start=22, pages=PAGES),
        Part(token_ids=[5, 6, 7], start=0, pages=[38], wants_logits=False),
        Part(token_ids=PROMPT, start=0, pages=range(28, 35)),
    )
    close(logits, torch.stack([expected[19], expected[22], expected[22]]))


def test_pages_of_a_former_sequence_do_not_show(runner: Runner, expected: Tensor) -> None:
    run(runner, Part(token_ids=[130] * 28, start=0, pages=PAGES))
    close(run(runner, Part(token_ids=PROMPT, start=0, pages=PAGES))[0], expected[-1])


def test_no_logits_wanted_gives_no_rows(runner: Runner) -> None:
    assert run(runner, Part(token_ids=PROMPT, start=0, pages=PAGES, wants_logits=False)).shape == (0, 131)


def test_dummy_runs_and_touches_no_page(runner: Runner) -> None:
    """Rule 6: what a group without tokens runs. It also leaves all state rows as they are."""
    before = [tensor.clone() for layer in runner.kv_cache.layers for tensor in layer.tensors]
    inputs = runner.prepare(Batch.dummy())
    logits = runner.run(inputs)
    assert logits.shape == (1, 131)
    assert bool(logits.isfinite().all())
    runner.remember(inputs, torch.tensor([99]))
    after = [tensor for layer in runner.kv_cache.layers for tensor in layer.tensors]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert runner.prepare(unknown(0, 1, 2, 3)).token_ids.tolist() == [0, 0, 0, 0]


def unknown(*state_rows: int) -> Batch:
    """One decoding sequence for each state row, its token not known to the host."""
    parts = [Part(token_ids=[-1], start=0, pages=[row], state_row=row) for row in state_rows]
    return make_batch(parts, block_size=BLOCK_SIZE)


def test_unknown_tokens_are_the_remembered_ones(runner: Runner, expected: Tensor) -> None:
    """Depth 1: the host schedules -1, the device puts in what it sampled; a chunk without logits keeps its row."""
    first = runner.prepare(
        make_batch(
            [
                Part(token_ids=PROMPT[:22], start=0, pages=PAGES, state_row=2),
                Part(token_ids=[1, 2], start=0, pages=[20], state_row=1, wants_logits=False),
                Part(token_ids=[3, 4], start=0, pages=[21], state_row=0),
            ],
            block_size=BLOCK_SIZE,
        )
    )
    runner.run(first)
    runner.remember(first, torch.tensor([PROMPT[22], 50]))
    assert runner.prepare(unknown(0, 1, 2)).token_ids.tolist() == [50, 0, PROMPT[22]]
    mixed = make_batch(
        [
            Part(token_ids=[8, 9], start=0, pages=[22], state_row=1, wants_logits=False),
            Part(token_ids=[-1], start=22, pages=PAGES, state_row=2),
        ],
        block_size=BLOCK_SIZE,
    )
    inputs = runner.prepare(mixed)
    assert inputs.token_ids.tolist() == [8, 9, PROMPT[22]]
    assert mixed.token_ids.tolist() == [8, 9, -1]
    close(runner.run(inputs)[0], expected[22])


def test_state_rows_are_checked(runner: Runner) -> None:
    with pytest.raises(ValueError, match="state row 4 is not below max_num_seqs 4"):
        runner.prepare(unknown(4))
    lost = dataclasses.replace(unknown(0), state_rows=np.array([-1], np.int32), request_ids=np.array([77]))
    with pytest.raises(ValueError, match=r"requests \[77\] have a token that is not known yet"):
        runner.prepare(lost)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_and_device_is_near_float64(folder: Path, dtype: torch.dtype, device: str) -> None:
    """Teacher-forced, chunked: the error is some units of the dtype, and the argmax equal where the margin allows."""
    truth = make_runner(folder)
    runner = make_runner(folder, dtype=dtype, device=device)
    for part in chunks([9, 1, 13]):
        row = run(truth, part)[0]
        ours = run(runner, part)[0].double().cpu()
        tolerance = 60 * torch.finfo(dtype).eps * row.abs().max().item()
        assert (ours - row).abs().max().item() < tolerance
        best, second = row.topk(2).values.tolist()
        if best - second > 2 * tolerance:
            assert ours.argmax() == row.argmax()


@pytest.mark.parametrize("device", DEVICES)
def test_unknown_tokens_on_any_device(folder: Path, device: str) -> None:
    runner = make_runner(folder, device=device)
    first = runner.prepare(
        make_batch([Part(token_ids=PROMPT, start=0, pages=PAGES, state_row=2)], block_size=BLOCK_SIZE)
    )
    token_ids = runner.run(first).argmax(1)
    runner.remember(first, token_ids)
    assert runner.prepare(unknown(2)).token_ids.tolist() == token_ids.tolist()
    assert runner.run(runner.prepare(Batch.dummy())).shape == (1, 131)
