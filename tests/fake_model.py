"""A model without weights for scheduler tests: the next token is a hash of what attention reads from a fake KV store.

The store remembers for each slot which token of which prefix was written there, so a wrong page, a block that is reused
too early or written while shared is found when it is read, even where the next token would be the same by chance.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from dist_infer.config import SchedulerConfig
from dist_infer.scheduler import Scheduler, batch_digest
from dist_infer.types import (
    Admission,
    Batch,
    BatchKind,
    FinishReason,
    Int32Array,
    Int64Array,
    News,
    PageChanges,
    Request,
    StepOutput,
)
from tests.page_mirror import PageMirror

_MODULUS = 2**61 - 1


class ContentError(AssertionError):
    """Attention would have read or written the wrong KV."""


def extend_hash(prefix: int, token_id: int) -> int:
    return (prefix * 1_000_003 + token_id + 1) % _MODULUS


def token_of(prefix: int, vocab_size: int) -> int:
    return (prefix * 6_364_136_223_846_793_005 >> 20) % vocab_size


def alone(request: Request, vocab_size: int) -> tuple[list[int], FinishReason]:
    """What a request gives without any scheduler."""
    prefix, output = 0, list[int]()
    for token_id in request.prompt_ids:
        prefix = extend_hash(prefix, token_id)
    while True:
        output.append(token_of(prefix, vocab_size))
        prefix = extend_hash(prefix, output[-1])
        if output[-1] in request.sampling.stop_token_ids and len(output) > request.sampling.min_tokens:
            return output, "stop"
        if len(output) == request.sampling.max_tokens:
            return output, "length"


class FakeModel:
    """Runs batches in launch order, as a device stream does."""

    def __init__(self, config: SchedulerConfig, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._block_size = config.block_size
        self._kv: dict[int, int] = {}  # slot -> hash of the prefix that ends with its token
        self._sampled = [-1] * config.max_num_seqs

    def launch(self, batch: Batch) -> Int64Array:
        """`batch` has all of its pages."""
        prefixes = [self._read(batch, seq) for seq in range(batch.num_seqs)]  # before this step writes anything
        for seq, (first, last) in enumerate(spans(batch)):
            row = int(batch.state_rows[seq])
            for idx in range(first, last):
                token_id = int(batch.token_ids[idx])
                prefixes[seq] = extend_hash(prefixes[seq], self._sampled[row] if token_id == -1 else token_id)
                self._kv[int(batch.slots[idx])] = prefixes[seq]
        tokens = [token_of(prefixes[seq], self.vocab_size) for seq in batch.logit_seqs.tolist()]
        for seq, token_id in zip(batch.logit_seqs.tolist(), tokens, strict=True):
            self._sampled[int(batch.state_rows[seq])] = token_id
        return np.array(tokens, np.int64)

    def history(self, batch: Batch, seq: int) -> list[int | None]:
        """The KV that a sequence has from earlier steps, slot by slot."""
        first, last = spans(batch)[seq]
        history_len = int(batch.kv_lens[seq]) - (last - first)
        pages = table(batch)[seq].tolist()
        return [
            self._kv.get(pages[position // self._block_size] * self._block_size + position % self._block_size)
            for position in range(history_len)
        ]

    def _read(self, batch: Batch, seq: int) -> int:
        history = self.history(batch, seq)
        return (history[-1] or 0) if history else 0


def table(batch: Batch) -> Int32Array:
    assert not isinstance(batch.pages, PageChanges)
    return batch.pages


def spans(batch: Batch) -> list[tuple[int, int]]:
    starts = batch.query_start.tolist()
    return list(pairwise(starts))


@dataclass
class Driver:
    """The order of events of one group: news, schedule, launch, collect of step n - depth. Checks every batch."""

    config: SchedulerConfig
    vocab_size: int = 11
    scheduler: Scheduler = field(init=False)
    model: FakeModel = field(init=False)
    requests: dict[int, Request] = field(default_factory=dict)
    expected: dict[int, tuple[list[int], FinishReason]] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    batches: list[Batch | None] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    full_batches: list[Batch | None] = field(default_factory=list)  # those above with all of their pages
    in_flight: deque[tuple[Batch, Int64Array] | None] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, group=0)
        self.model = FakeModel(self.config, self.vocab_size)
        self.mirror = PageMirror(self.config.max_num_seqs, self.config.num_kv_blocks)

    def step(self, *requests: Request, aborts: Sequence[int] = (), drain: bool = False) -> Batch | None:
        """One step; what it scheduled."""
        for request in requests:
            self.requests[request.request_id] = request
            self.expected[request.request_id] = alone(request, self.vocab_size)
            self.outputs[request.request_id] = []
        self.aborted.update(request_id for request_id in aborts if request_id not in self.finished)
        admissions = tuple(Admission(group=0, request=request) for request in requests)
        self.scheduler.apply(News(admissions=admissions, aborts=tuple(aborts)), drain=drain)
        batch = self.scheduler.schedule()
        self.batches.append(batch)
        self.digests.append(batch_digest(batch) if batch else 0)
        full = None if batch is None else replace(batch, pages=self.mirror.table_of(batch))
        if full is not None:
            self._check(full)
        self.full_batches.append(full)
        self.in_flight.append((batch, self.model.launch(full)) if batch is not None and full is not None else None)
        if len(self.in_flight) > self.config.depth:
            self.collect()
        return batch

    def collect(self) -> list[StepOutput]:
        """The oldest step in flight."""
        done = self.in_flight.popleft()
        outputs = self.scheduler.commit(*done) if done is not None else []
        for output in outputs:
            assert output.request_id not in self.finished, "a token after the end"
            assert output.request_id not in self.aborted, "a token of an aborted request"
            self.outputs[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.finished[output.request_id] = output.finish_reason
        return outputs

    def run(self, limit: int = 100_000) -> None:
        """Steps until nothing lives and nothing is in flight."""
        while self.scheduler.live or any(self.in_flight):
            assert len(self.batches) < limit, "no end in sight"
            self.step()

    def check_end(self) -> None:
        """Every request has the tokens that it gives alone, all blocks are free."""
        for request_id, (tokens, reason) in self.expected.items():
            if request_id in self.aborted:
                assert self.outputs[request_id] == tokens[: len(self.outputs[request_id])]
            else:
                assert (self.outputs[request_id], self.finished[request_id]) == (tokens, reason)
        assert self.scheduler.num_free_blocks == self.config.num_kv_blocks

    # What every batch must be.

    def _check(self, batch: Batch) -> None:
        assert 0 < batch.num_tokens <= self.config.max_num_tokens
        assert 0 < batch.num_seqs <= self.config.max_num_seqs
        assert len(set(batch.request_ids.tolist())) == batch.num_seqs
        assert len(set(batch.state_rows.tolist())) == batch.num_seqs
        assert batch.state_rows.min() >= 0 and batch.state_rows.max() < self.config.max_num_seqs
        assert batch.num_pages * self.config.block_size >= batch.kv_lens.max()
        assert not set(batch.request_ids.tolist()) & (self.aborted | set(self.finished)), "scheduled after the end"
        for seq, check in (
            (seq, check) for seq in range(batch.num_seqs) for check in (self._check_rows, self._check_kv)
        ):
            check(batch, seq)
        assert batch.kind == max(self._kind(batch, seq) for seq in range(batch.num_seqs))
        self._check_writes(batch)

    def _check_rows(self, batch: Batch, seq: int) -> None:
        first, last = spans(batch)[seq]
        request = self.requests[int(batch.request_ids[seq])]
        known = [*request.prompt_ids, *self.outputs[request.request_id]]
        end = int(batch.kv_lens[seq])
        start = end - (last - first)
        assert batch.positions[first:last].tolist() == list(range(start, end))
        expected = [known[position] if position < len(known) else -1 for position in range(start, end)]
        assert batch.token_ids[first:last].tolist() == expected and expected.count(-1) <= self.config.depth
        assert end < len(request.prompt_ids) + request.sampling.max_tokens, "a token beyond the limit"
        logit = np.flatnonzero(batch.logit_seqs == seq)
        assert len(logit) == (end >= len(known))
        for idx in logit:
            sampling = request.sampling
            assert batch.logit_rows[idx] == last - 1 and batch.draw_positions[idx] == end
            assert (batch.temperature[idx], batch.top_k[idx]) == (sampling.temperature, sampling.top_k)
            assert (batch.top_p[idx], batch.seeds[idx]) == (sampling.top_p, sampling.seed)

    def _check_kv(self, batch: Batch, seq: int) -> None:
        """The slots are those of the page table, and the history that attention reads is that of this request."""
        first, last = spans(batch)[seq]
        request = self.requests[int(batch.request_ids[seq])]
        block_size = self.config.block_size
        for idx in range(first, last):
            page, offset = divmod(int(batch.positions[idx]), block_size)
            assert batch.slots[idx] == table(batch)[seq, page] * block_size + offset
        history = self.model.history(batch, seq)
        prefix, tokens = 0, iter([*request.prompt_ids, *self.expected[request.request_id][0]])
        for position, stored in enumerate(history):
            prefix = extend_hash(prefix, next(tokens))
            if stored != prefix:
                raise ContentError(f"request {request.request_id} reads foreign KV at position {position}")

    def _check_writes(self, batch: Batch) -> None:
        """No block that this step writes belongs to another sequence of this step or of one still in flight."""
        owner = dict(self._pages(batch, written=True))
        in_flight = self.full_batches[len(self.full_batches) - len(self.in_flight) :]
        steps = [batch, *(earlier for earlier in in_flight if earlier is not None)]
        for page, request_id in (pair for step in steps for pair in self._pages(step, written=False)):
            if owner.get(page, request_id) != request_id:
                raise ContentError(f"block {page} is written by {owner[page]} and held by {request_id}")

    def _pages(self, batch: Batch, *, written: bool) -> Iterator[tuple[int, int]]:
        for seq, (first, last) in enumerate(spans(batch)):
            pages = batch.slots[first:last] // self.config.block_size if written else table(batch)[seq]
            yield from ((page, int(batch.request_ids[seq])) for page in set(pages.tolist()) if page >= 0)

    def _kind(self, batch: Batch, seq: int) -> BatchKind:
        first, last = spans(batch)[seq]
        end, num_new = int(batch.kv_lens[seq]), last - first
        if end == num_new:
            return BatchKind.PREFILL
        samples = bool((batch.logit_seqs == seq).any())
        prompt_len = len(self.requests[int(batch.request_ids[seq])].prompt_ids)
        return BatchKind.DECODE if num_new == 1 and samples and end > prompt_len else BatchKind.EXTEND
