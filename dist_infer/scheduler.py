"""Which tokens a group computes in a step: continuous batching, chunked prefill, paged KV. Host data only.

The ranks of a group hold one schedule, because everything here is a pure function of the news and of what `commit`
has shown. Rule numbers are those of docs/protocol.md.

Order of a step: sequences that decode, oldest first; then prompts under way; then new ones while tokens, rows and
blocks last. A prompt gets all of its blocks when it is admitted, so only decoding asks for more. Where none is
free, the newest sequence is preempted (its tokens are kept, its KV is computed again later), unless a step in
flight gives blocks back anyway. A sequence never preempts an older one nor itself: it waits. So the oldest always
goes on, alone if it must, and `check_fits` has made sure that it can.

At depth 1 `schedule(n)` runs before `commit(n-1)`: the token that n-1 samples has a position and a KV slot, but no
id yet (-1). What leaves while in flight (finished, aborted, preempted) keeps its blocks until the commit of its
last step.
"""

import zlib
from bisect import insort
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np

from dist_infer.config import SchedulerConfig
from dist_infer.errors import RequestError, UsageError
from dist_infer.pages import BlockPool
from dist_infer.sequences import Plan, Rows, Sequence, State, ceil_div
from dist_infer.step_options import add_options, option_arrays, read_scores
from dist_infer.types import (
    Batch,
    FinishReason,
    Float64Array,
    Int32Array,
    Int64Array,
    News,
    PageChanges,
    Request,
    StepOutput,
)

# An admission leaves a free block to each so many running sequences, so that it isn't preempted at once. On loads that
# are preempted often, 2 computes 3 to 10 % fewer tokens than no such rule in as many steps; 1 begins to cost steps.
_RUNNING_PER_SPARE_BLOCK = 2


def check_fits(request: Request, config: SchedulerConfig) -> None:
    """Refuse a request that this configuration can never serve.

    Errors: RequestError that names the numbers and the option to change.
    """
    prompt_len, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
    if prompt_len == 0:
        raise RequestError("the prompt has no tokens: give at least one", param="prompt")
    if max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens}: ask for at least 1", param="max_tokens")
    if prompt_len >= config.max_model_len:
        raise RequestError(
            f"the prompt has {prompt_len} tokens and leaves no room for an answer within {config.max_model_len}: "
            f"shorten it or raise --max-model-len",
            param="prompt",
            code="context_length_exceeded",
        )
    if prompt_len + max_tokens > config.max_model_len:
        raise RequestError(
            f"the prompt has {prompt_len} tokens and max_tokens is {max_tokens}, {prompt_len + max_tokens} together, "
            f"but a sequence has at most {config.max_model_len}: lower max_tokens or raise --max-model-len",
            param="max_tokens",
            code="context_length_exceeded",
        )
    num_blocks = ceil_div(prompt_len + max_tokens - 1, config.block_size)  # the last token's KV is never needed
    if num_blocks > config.num_kv_blocks:
        raise RequestError(
            f"the prompt of {prompt_len} tokens with max_tokens {max_tokens} needs {num_blocks} KV blocks of "
            f"{config.block_size} tokens, but there are {config.num_kv_blocks}: "
            f"lower max_tokens or raise --num-kv-blocks",
            param="max_tokens",
            code="context_length_exceeded",
        )


def batch_digest(batch: Batch) -> int:
    """A cheap non-negative number that differs when two schedules differ; compared between the ranks of a group."""
    crc = zlib.crc32(bytes((batch.kind,)))
    for array in (
        batch.request_ids,
        batch.token_ids,
        batch.positions,
        batch.slots,
        batch.query_start,
        batch.kv_lens,
        batch.state_rows,
        batch.logit_rows,
        batch.logit_seqs,
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.seeds,
        batch.draw_positions,
    ):
        crc = zlib.crc32(array.data, crc)
    for array in _page_arrays(batch):
        crc = zlib.crc32(array.data, crc)
    for array in option_arrays(batch):
        crc = zlib.crc32(array.data, crc)
    return crc


def _page_arrays(batch: Batch) -> tuple[Int32Array, ...]:
    pages = batch.pages
    if isinstance(pages, PageChanges):
        return pages.rows, pages.columns, pages.page_ids
    return (np.ascontiguousarray(pages),)


@dataclass(slots=True)
class _Step:
    """A batch in flight."""

    batch: Batch
    seqs: list[Sequence]


@dataclass(slots=True)
class SchedulerCounters:
    """What has happened since the start. A sequence that was preempted is admitted, and counted, again."""

    steps: int = 0
    admissions: int = 0
    preemptions: int = 0
    admitted_tokens: int = 0
    cached_tokens: int = 0  # those of the admitted ones that the prefix cache gave


class Scheduler:
    """The schedule of one group: `apply` the news, `schedule` a batch, `commit` what it sampled.

    Batches are committed in the order in which they were scheduled, at most `depth` of them late.
    Ranks: local; equal on all ranks of a group.
    """

    def __init__(self, config: SchedulerConfig, group: int) -> None:
        _check_config(config)
        self.counters = SchedulerCounters()
        self._config = config
        self._group = group
        self._pool = BlockPool(config.num_kv_blocks, prefix_cache=config.prefix_cache)
        self._rows = Rows(config)
        self._num_arrived = 0
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()  # never started, oldest first
        self._preempted: list[Sequence] = []  # newest first; all are older than the waiting
        self._running: dict[int, Sequence] = {}  # oldest first; all are older than the preempted
        self._preempting: dict[int, Sequence] = {}
        self._leaving: set[int] = set()  # requests whose blocks come back at the commit of a step in flight
        self._in_flight: deque[_Step] = deque()

    @property
    def live(self) -> int:
        """Requests that are not known to be finished or aborted (rule 9)."""
        return len(self._waiting) + len(self._preempted) + len(self._running) + len(self._preempting)

    @property
    def peak_blocks(self) -> int:
        """Most KV blocks that sequences have held at once."""
        return self._pool.counters.peak_held

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no sequence holds."""
        return self._pool.num_free

    def apply(self, news: News, *, drain: bool) -> None:
        """Rule 2: admissions, then aborts, then drain, which gives back what has never started (rule 14)."""
        for admission in news.admissions:
            if admission.group == self._group:
                check_fits(admission.request, self._config)  # rank 0 has done so; a misfit would wait for ever
                self._num_arrived += 1
                self._waiting[admission.request.request_id] = Sequence.arrive(admission.request, self._num_arrived)
        for request_id in news.aborts:
            self._abort(request_id)
        if drain:
            self._waiting.clear()

    def schedule(self) -> Batch | None:
        """The next batch, or None when there is nothing to run or no block to run it with.

        Errors: RuntimeError when more than `depth` batches wait for their commit.
        """
        if len(self._in_flight) > self._config.depth:
            raise RuntimeError(f"{len(self._in_flight)} steps are in flight: commit the oldest one first")
        plan = Plan(self._config.max_num_tokens)
        self._plan_running(plan)
        self._plan_admissions(plan)
        if not plan.seqs:
            return None
        batch = self._rows.fill(plan)
        if plan.has_options:
            add_options(batch, plan)
        for seq, end in zip(plan.seqs, plan.ends, strict=True):
            seq.num_scheduled = end
            seq.num_in_flight += 1
        for idx in batch.logit_seqs.tolist():
            plan.seqs[idx].num_unknown += 1
        self._in_flight.append(_Step(batch, plan.seqs))
        self.counters.steps += 1
        return batch

    def commit(self, batch: Batch, token_ids: Int64Array, scores: Float64Array | None = None) -> list[StepOutput]:
        """Take what the oldest batch in flight has sampled; tokens of requests that have ended meanwhile are dropped.

        `scores` are there if the batch asks for any: a row each of `Batch.scores`, as the sampler gives them.

        Shapes: token_ids [L], scores [Q + P, 2 + 2 K].
        Errors: RuntimeError for another batch, ValueError for another number of tokens or scores.
        """
        if not self._in_flight or self._in_flight[0].batch is not batch:
            raise RuntimeError("this batch is not the oldest one in flight")
        if token_ids.shape != batch.logit_rows.shape:
            raise ValueError(f"{len(batch.logit_rows)} tokens are due, the shape given is {token_ids.shape}")
        seqs = self._in_flight.popleft().seqs
        for seq in seqs:
            seq.num_in_flight -= 1
        self._register_blocks(batch, seqs)
        outputs: dict[int, StepOutput] = {}
        for idx, token_id in zip(batch.logit_seqs.tolist(), token_ids.tolist(), strict=True):
            seq = seqs[idx]
            seq.num_unknown -= 1
            if seq.state is not State.ENDED:
                outputs[idx] = self._append_token(seq, token_id)
        if batch.scores is not None:
            outputs = read_scores(batch, batch.scores, seqs, token_ids, scores).added_to(outputs, seqs)
        for seq in seqs:
            if seq.state is not State.RUNNING:
                self._leave(seq)
        return list(outputs.values())

    # Parts of schedule.

    def _plan_running(self, plan: Plan) -> None:
        """Decodes first, oldest first; then the chunks of prompts under way."""
        chunked, block_size = [], self._config.block_size
        for seq in list(self._running.values()):
            target = seq.num_known + seq.num_unknown
            if seq.state is not State.RUNNING or target == seq.max_len:
                continue  # preempted a moment ago; or its last token is in flight
            if target - seq.num_scheduled > 1 or seq.num_scheduled < seq.prompt_len:
                chunked.append(seq)
            elif plan.budget and (seq.num_scheduled < len(seq.blocks) * block_size or self._grow(seq, plan)):
                plan.add_decode(seq)
                if target + 1 == seq.max_len:
                    self._leaving.add(seq.request.request_id)
        for seq in chunked:
            if plan.budget and seq.state is State.RUNNING:
                self._plan_chunk(seq, plan)

    def _plan_chunk(self, seq: Sequence, plan: Plan) -> None:
        num_todo = seq.num_known - seq.num_scheduled
        plan.add(seq, min(num_todo, plan.budget))
        if seq.num_known + 1 == seq.max_len and plan.ends[-1] == seq.num_known:
            self._leaving.add(seq.request.request_id)

    def _grow(self, seq: Sequence, plan: Plan) -> bool:
        """One more block for a sequence whose blocks are full; false when it must wait for one."""
        while not self._pool.num_free:
            plan.starved = True
            newest = next(reversed(self._running.values()))
            if self._leaving or newest is seq:
                return False
            self._preempt(newest)
        self._hold(seq, self._pool.allocate(1))
        return True

    def _preempt(self, seq: Sequence) -> None:
        request_id = seq.request.request_id
        del self._running[request_id]
        seq.state = State.PREEMPTING
        self._preempting[request_id] = seq
        self.counters.preemptions += 1
        self._leave(seq)

    def _plan_admissions(self, plan: Plan) -> None:
        """The preempted, then the waiting, each in order of arrival: nobody overtakes."""
        while plan.budget and not plan.starved and self._rows.num_free:
            if self._preempted:
                seq = self._preempted[-1]
            elif self._waiting:
                seq = next(iter(self._waiting.values()))
            else:
                return
            if not self._place(seq):
                return
            if self._preempted:
                self._preempted.pop()
            else:
                self._waiting.popitem(last=False)
            seq.state = State.RUNNING
            self._running[seq.request.request_id] = seq
            self._plan_chunk(seq, plan)

    def _place(self, seq: Sequence) -> bool:
        """A row and blocks for all tokens of a sequence. The last token's KV is never reused: its logits are due."""
        block_size = self._config.block_size
        num_reusable = (seq.num_known - 1) // block_size if self._config.prefix_cache else 0
        if seq.num_scored < seq.num_to_score:  # what isn't computed is not scored
            num_reusable = min(num_reusable, seq.num_scored // block_size)
        cached = self._pool.match(seq.block_hash(idx, block_size) for idx in range(num_reusable))
        num_new = ceil_div(seq.num_known, block_size) - len(cached)
        spare = len(self._running) // _RUNNING_PER_SPARE_BLOCK
        if num_new + spare > self._pool.num_free - self._pool.num_free_among(cached):
            return False
        self._pool.share(cached)
        seq.row = self._rows.take(seq.request)
        self._hold(seq, cached + self._pool.allocate(num_new))
        seq.num_registered = len(cached)
        seq.num_scheduled = len(cached) * block_size
        self.counters.admissions += 1
        self.counters.admitted_tokens += seq.num_known
        self.counters.cached_tokens += seq.num_scheduled
        return True

    def _hold(self, seq: Sequence, blocks: list[int]) -> None:
        self._rows.set_pages(seq.row, len(seq.blocks), blocks)
        seq.blocks += blocks

    # Parts of apply and commit.

    def _abort(self, request_id: int) -> None:
        """Unknown ids are of other groups, or have finished before the abort came."""
        if self._waiting.pop(request_id, None) is not None:
            return
        self._preempted = [seq for seq in self._preempted if seq.request.request_id != request_id]
        seq = self._running.pop(request_id, None) or self._preempting.pop(request_id, None)
        if seq is not None:
            seq.state = State.ENDED
            self._leave(seq)

    def _register_blocks(self, batch: Batch, seqs: list[Sequence]) -> None:
        """The KV of a step is there: blocks that it has filled may be shared from now on."""
        if not self._config.prefix_cache:
            return
        num_full = batch.kv_lens // self._config.block_size
        num_before = (batch.kv_lens - np.diff(batch.query_start)) // self._config.block_size
        for idx in np.flatnonzero(num_full > num_before).tolist():
            self._register(seqs[idx], int(num_full[idx]))

    def _register(self, seq: Sequence, num_full: int) -> None:
        block_size = self._config.block_size
        for idx in range(seq.num_registered, num_full):
            self._pool.register(seq.blocks[idx], seq.block_hash(idx, block_size))
            seq.num_registered = idx + 1

    def _append_token(self, seq: Sequence, token_id: int) -> StepOutput:
        seq.tokens[seq.num_known] = seq.last_id = token_id
        seq.num_known += 1
        reason: FinishReason | None = None
        if token_id in seq.stop_ids and seq.num_known > seq.min_len:
            reason = "stop"
        elif seq.num_known == seq.max_len:
            reason = "length"
        request_id = seq.request.request_id
        if reason is not None:
            seq.state = State.ENDED
            self._running.pop(request_id, None)
            self._preempting.pop(request_id, None)
        return StepOutput(request_id, (token_id,), reason)

    def _leave(self, seq: Sequence) -> None:
        """Take row and blocks from a sequence that no longer runs, as soon as none of its steps is in flight."""
        request_id = seq.request.request_id
        if seq.num_in_flight:
            self._leaving.add(request_id)
            return
        self._leaving.discard(request_id)
        self._pool.release(seq.blocks)
        self._rows.give_back(seq.row, len(seq.blocks))
        seq.blocks, seq.row, seq.num_registered, seq.num_scheduled = [], -1, 0, 0
        if seq.state is State.PREEMPTING:
            del self._preempting[request_id]
            seq.state = State.WAITING
            insort(self._preempted, seq, key=lambda other: -other.arrival)


def _check_config(config: SchedulerConfig) -> None:
    for name, least in (
        ("max_model_len", 2),
        ("max_num_seqs", 1),
        ("max_num_tokens", 1),
        ("block_size", 1),
        ("num_kv_blocks", 1),
    ):
        value = getattr(config, name)
        if value < least:
            raise UsageError(f"{name} is {value}: it must be at least {least}")
    if config.depth not in (0, 1):
        raise UsageError(f"depth is {config.depth}: it must be 0 or 1")
