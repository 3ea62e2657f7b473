"""Steps that a rank runs before it is ready: all kernels are compiled then, and what the largest step takes is known.

The steps attend to page 0 of the cache and write nowhere, so a cache of one page is enough and nothing is left behind.
All ranks run the same ones, each group as many tokens, so that collectives agree.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice, pairwise, product

import numpy as np
import torch

from dist_infer.comm.agreement import Decision
from dist_infer.config import SchedulerConfig
from dist_infer.graphs import CudaCapture
from dist_infer.step_runner import StepRunner
from dist_infer.types import Batch, BatchKind, LogitEdits

_log = logging.getLogger(__name__)
_POLL_S = 1e-4
# Rows by turns: greedy, noisy, top-k, nucleus.
_WAYS = ((0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 5, 0.9), (1.0, 0, 0.9))
_GREEDY, _NUCLEUS = _WAYS[:1], _WAYS[3:]


def make_batch(
    parts: Sequence[tuple[int, int]],
    *,
    block_size: int,
    ways: Sequence[tuple[float, int, float]] = _GREEDY,
    edited: bool = False,
) -> Batch:
    """Sequences of (new tokens, tokens with what is cached) that are nobody's; each gets a next token.

    `ways` are temperature, top_k and top_p of the rows, by turns. If `edited` the logits of the first row are.
    """
    query_lens, kv_lens = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    query_start = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    num_tokens, num_seqs = int(query_start[-1]), len(parts)
    first_positions = np.repeat(kv_lens - query_lens - query_start[:-1], query_lens)
    temperature, top_k, top_p = zip(*islice(cycle(ways), num_seqs), strict=True)
    return Batch(
        kind=_kind(parts),
        request_ids=np.full(num_seqs, -1, np.int64),
        token_ids=np.zeros(num_tokens, np.int64),
        positions=np.arange(num_tokens) + first_positions,
        slots=np.full(num_tokens, -1, np.int64),
        query_start=query_start,
        kv_lens=kv_lens.astype(np.int32),
        pages=np.zeros((num_seqs, -(-int(kv_lens.max()) // block_size)), np.int32),
        state_rows=np.full(num_seqs, -1, np.int32),
        logit_rows=query_start[1:].astype(np.int64) - 1,
        logit_seqs=np.arange(num_seqs, dtype=np.int32),
        temperature=np.array(temperature, np.float64),
        top_k=np.array(top_k, np.int32),
        top_p=np.array(top_p, np.float64),
        seeds=np.zeros(num_seqs, np.int64),
        draw_positions=kv_lens,
        edits=_some_edits() if edited else None,
    )


def _some_edits() -> LogitEdits:
    """Of every kind, in row 0."""
    zero, one, half = np.zeros(1, np.int64), np.ones(1), np.full(1, 0.5)
    return LogitEdits(
        bias_rows=zero,
        bias_ids=zero,
        biases=half,
        penalty_rows=zero,
        repetition=one,
        frequency=half,
        presence=half,
        token_owners=zero,
        token_ids=zero,
        token_counts=zero + 1,
    )


def _kind(parts: Sequence[tuple[int, int]]) -> BatchKind:
    if any(new == whole for new, whole in parts):
        return BatchKind.PREFILL
    return BatchKind.DECODE if all(new == 1 for new, _ in parts) else BatchKind.EXTEND


def largest_batch(config: SchedulerConfig) -> Batch:
    """As many tokens and sequences as a step may have, all at the end of the longest sequence there may be.

    Its tokens are chosen in the way that takes most memory.
    """
    longest = config.max_model_len
    num_decodes = min(config.max_num_seqs, config.max_num_tokens) - 1
    chunk = min(config.max_num_tokens - num_decodes, longest)
    parts = [(1, longest)] * num_decodes + [(chunk, longest)]
    return make_batch(parts, block_size=config.block_size, ways=_NUCLEUS)


def mixed_batch(config: SchedulerConfig) -> Batch:
    """A prompt that fills the step but for one token, and one sequence that decodes."""
    prompt = max(1, min(config.max_num_tokens - 1, config.max_model_len))
    parts = [(prompt, prompt), (1, min(2, config.max_model_len))]
    num_seqs = min(config.max_num_seqs, config.max_num_tokens, 2)
    return make_batch(parts[:num_seqs], block_size=config.block_size)


def small_batches(config: SchedulerConfig) -> Iterator[Batch]:
    """Steps of the kinds of sizes that compilers tell apart: 1, a multiple of 16, others; each way of sampling.

    Edited logits have a dtype of their own, so all ways of sampling meet them once.
    And numbers of sequences in a mixed step and of the longest sequences of every power of two, and prompts of four
    sizes between two of these: one lies in each range of sizes for which a kernel has tiles of its own.
    """
    shapes = [[(1, 1)], [(1, 2)], [(3, 3)], [(16, 16)], [(16, 32)], [(5, 12), (1, 9)], [(1, 9)] * 3, [(1, 9)] * 16]
    for power in range(config.max_num_seqs.bit_length()):
        count = 1 << power
        longest = max(2, config.num_kv_blocks * config.block_size // count)  # so many that are longer never meet
        shapes += [[(2, 9)] + [(1, 9)] * (count - 1), [(1, longest)] * count]
    shapes += [[(2, 2)], [(4, 4)], [(8, 8)]]
    for power, quarters in product(range(3, config.max_num_tokens.bit_length() - 2), range(4, 8)):
        num_tokens = quarters << power
        starts = range(0, num_tokens, config.max_model_len)
        lens = [min(config.max_model_len, num_tokens - start) for start in starts]
        shapes.append([(prompt_len, prompt_len) for prompt_len in lens])
    for shape in shapes:
        parts = [
            (min(new, config.max_num_tokens), min(whole, config.max_model_len))
            for new, whole in shape[: config.max_num_seqs]
            if new <= config.max_model_len
        ]
        if parts and sum(new for new, _ in parts) <= config.max_num_tokens:
            for ways in (_GREEDY, _WAYS)[: len(parts)]:
                yield make_batch(parts, block_size=config.block_size, ways=ways)
    rows = [(1, 2)] * min(len(_WAYS), config.max_num_seqs, config.max_num_tokens)
    for num_ways in (len(_WAYS), 2):
        yield make_batch(rows, block_size=config.block_size, ways=_WAYS[:num_ways], edited=True)


def run_step(step_runner: StepRunner, batch: Batch, *, world_size: int) -> None:
    """A whole step as the engine runs it, to its end.

    Ranks: collective over the world; each rank runs as many tokens.
    """
    step = step_runner.prepare(batch)
    decision = Decision(
        step=0,
        failed_ranks=(),
        fault=None,
        drain=False,
        launched=True,
        quiet=False,
        over=False,
        kind=batch.kind,
        rank_tokens=(batch.num_tokens,) * world_size,
        graph_bucket=step_runner.graph_bucket(batch),
        woke=(),
    )
    tokens = step_runner.launch(step, decision)
    while not tokens.ready():
        time.sleep(_POLL_S)


def measure_bytes(
    step_runner: StepRunner,
    config: SchedulerConfig,
    device: torch.device,
    *,
    world_size: int,
    num_graphs: int,
    on_progress: Callable[[str], None],
) -> int:
    """What steps take on the device beside parameters and KV cache: the largest eager one, and all graphs.

    `step_runner` has a cache of one block, and graphs of the two largest of the `num_graphs` sizes (none where it runs
    eagerly). The first makes the pool of memory; those that are not captured are taken to need as much as the second.

    Ranks: collective over the world.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    for name, batch in (("first step", mixed_batch(config)), ("largest step", largest_batch(config))):
        on_progress(name)
        run_step(step_runner, batch, world_size=world_size)
    eager_bytes = torch.cuda.max_memory_reserved(device) - before
    free = [torch.cuda.mem_get_info(device)[0]]

    def note(size: int) -> None:
        on_progress(f"graph of {size}")
        free.append(torch.cuda.mem_get_info(device)[0])

    step_runner.capture(CudaCapture(device), on_size=note)
    taken = [max(0, earlier - later) for earlier, later in pairwise(free)]
    graph_bytes = sum(taken) + (num_graphs - len(taken)) * (taken[-1] if taken else 0)
    _log.debug("the largest step takes %d MiB, graphs %d MiB", eager_bytes >> 20, graph_bytes >> 20)
    return eager_bytes + graph_bytes


def warm_up(
    step_runner: StepRunner, config: SchedulerConfig, *, world_size: int, on_progress: Callable[[str], None]
) -> None:
    """Compile what is left, and leave the allocator with what the largest steps take.

    Ranks: collective over the world.
    """
    for idx, batch in enumerate(small_batches(config)):
        on_progress(f"small step {idx}")
        run_step(step_runner, batch, world_size=world_size)
    for name, batch in (("largest step", largest_batch(config)), ("mixed step", mixed_batch(config))):
        on_progress(name)
        run_step(step_runner, batch, world_size=world_size)
