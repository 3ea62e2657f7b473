"""The sequences of a scheduler, one by one and as the arrays of a batch. Host data only: no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush

import numpy as np

from dist_infer.config import SchedulerConfig
from dist_infer.pages import chain_hash
from dist_infer.types import Batch, BatchKind, Int64Array, Request, SamplingParams

_UNKNOWN_TOKEN = -1
_NO_PAGE = -1
_MAX_INT32 = 2**31 - 1


class State(Enum):
    """Where a sequence is on its way."""

    WAITING = auto()  # never started, or preempted
    RUNNING = auto()
    PREEMPTING = auto()  # in flight: its token counts, then it waits
    ENDED = auto()  # finished or aborted: what is in flight is dropped


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request on its way. `tokens[:num_known]` are prompt and output; `num_unknown` more are sampled in flight."""

    request: Request
    arrival: int
    tokens: Int64Array
    prompt_len: int
    num_known: int
    max_len: int
    min_len: int
    stop_ids: frozenset[int]
    state: State = State.WAITING
    num_scheduled: int = 0  # tokens whose KV is computed, or will be by the steps in flight
    num_unknown: int = 0
    num_in_flight: int = 0  # steps
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    num_registered: int = 0  # leading blocks that the prefix cache has seen
    hashes: list[bytes] = field(default_factory=list)
    has_options: bool = False  # asks for more than a plain choice of tokens: see step_options
    prompt_ids_once: Int64Array | None = None  # made at the first use
    num_scored: int = 0  # prompt positions whose log probabilities have come

    @classmethod
    def arrive(cls, request: Request, arrival: int) -> "Sequence":
        """A request that has just come in."""
        prompt_len = len(request.prompt_ids)
        max_len = prompt_len + request.sampling.max_tokens
        tokens = np.empty(max_len, np.int64)
        tokens[:prompt_len] = request.prompt_ids
        return cls(
            request=request,
            arrival=arrival,
            tokens=tokens,
            prompt_len=prompt_len,
            num_known=prompt_len,
            max_len=max_len,
            min_len=prompt_len + request.sampling.min_tokens,
            stop_ids=frozenset(request.sampling.stop_token_ids),
            has_options=_has_options(request.sampling),
        )

    @property
    def num_to_score(self) -> int:
        """Prompt positions whose log probabilities are asked for: each but the last one scores its next token."""
        return 0 if self.request.sampling.prompt_logprobs is None else self.prompt_len - 1

    @property
    def target(self) -> int:
        """Tokens that have an id or get one from a step in flight."""
        return self.num_known + self.num_unknown

    def block_hash(self, idx: int, block_size: int) -> bytes:
        """The hash of block `idx`, which is full of known tokens."""
        while len(self.hashes) <= idx:
            start = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else b""
            self.hashes.append(chain_hash(parent, self.tokens[start : start + block_size]))
        return self.hashes[idx]


def _has_options(sampling: SamplingParams) -> bool:
    return bool(
        sampling.has_penalties
        or sampling.min_p
        or sampling.logit_bias
        or sampling.min_tokens
        or sampling.logprobs is not None
        or sampling.prompt_logprobs is not None
    )


@dataclass(slots=True)
class Plan:
    """The sequences of a step; sequence s computes its tokens starts[s] to ends[s]."""

    budget: int
    seqs: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    starved: bool = False  # somebody lacks a block: admit nobody

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """The next `num_tokens` tokens of a sequence."""
        start = seq.num_scheduled
        self.seqs.append(seq)
        self.starts.append(start)
        self.ends.append(start + num_tokens)
        self.budget -= num_tokens


class Rows:
    """What the runner and the sampler need of each running sequence, in arrays with a row per sequence."""

    def __init__(self, config: SchedulerConfig) -> None:
        max_pages = min(ceil_div(config.max_model_len, config.block_size), config.num_kv_blocks)
        self._block_size = config.block_size
        self._free = list(range(config.max_num_seqs))  # a heap: the smallest row first
        self._pages = np.full((config.max_num_seqs, max_pages), _NO_PAGE, np.int32)
        self._temperature = np.zeros(config.max_num_seqs, np.float64)
        self._top_k = np.zeros(config.max_num_seqs, np.int32)
        self._top_p = np.ones(config.max_num_seqs, np.float64)
        self._seeds = np.zeros(config.max_num_seqs, np.int64)

    @property
    def num_free(self) -> int:
        """How many sequences may still start."""
        return len(self._free)

    def take(self, request: Request) -> int:
        """The row of a sequence that starts."""
        row = heappop(self._free)
        sampling = request.sampling
        self._temperature[row] = sampling.temperature
        self._top_k[row] = min(sampling.top_k, _MAX_INT32)
        self._top_p[row] = sampling.top_p
        self._seeds[row] = sampling.seed
        return row

    def give_back(self, row: int, num_pages: int) -> None:
        """The row of a sequence that has left; its first `num_pages` pages were set."""
        self._pages[row, :num_pages] = _NO_PAGE
        heappush(self._free, row)

    def set_pages(self, row: int, first: int, blocks: list[int]) -> None:
        """More blocks for a sequence, from its page `first` on."""
        self._pages[row, first : first + len(blocks)] = blocks

    def fill(self, plan: Plan) -> Batch:
        """The batch of a plan, before the plan's sequences are advanced."""
        num_seqs = len(plan.seqs)
        rows = np.array([seq.row for seq in plan.seqs], np.int32)
        starts, ends = np.array(plan.starts, np.int64), np.array(plan.ends, np.int64)
        lens = ends - starts
        query_start = np.zeros(num_seqs + 1, np.int32)
        np.cumsum(lens, out=query_start[1:])
        token_seqs = np.repeat(np.arange(num_seqs), lens)
        positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[token_seqs]
        pages = self._pages[rows[token_seqs], positions // self._block_size]
        targets = np.array([seq.target for seq in plan.seqs], np.int64)
        logit_seqs = np.flatnonzero(ends == targets).astype(np.int32)
        logit_state_rows = rows[logit_seqs]
        return Batch(
            kind=_kind_of(plan),
            request_ids=np.array([seq.request.request_id for seq in plan.seqs], np.int64),
            token_ids=np.concatenate(list(_input_ids(plan))),
            positions=positions,
            slots=pages.astype(np.int64) * self._block_size + positions % self._block_size,
            query_start=query_start,
            kv_lens=ends.astype(np.int32),
            page_table=self._pages[rows, : ceil_div(int(ends.max()), self._block_size)],
            state_rows=rows,
            logit_rows=query_start[1:][logit_seqs].astype(np.int64) - 1,
            logit_seqs=logit_seqs,
            temperature=self._temperature[logit_state_rows],
            top_k=self._top_k[logit_state_rows],
            top_p=self._top_p[logit_state_rows],
            seeds=self._seeds[logit_state_rows],
            draw_positions=ends[logit_seqs],
        )


def _input_ids(plan: Plan) -> Iterator[Int64Array]:
    unknown = np.full(1, _UNKNOWN_TOKEN, np.int64)
    for seq, start, end in zip(plan.seqs, plan.starts, plan.ends, strict=True):
        yield seq.tokens[start:end] if end <= seq.num_known else unknown


def _kind_of(plan: Plan) -> BatchKind:
    kind = BatchKind.DECODE
    for seq, start, end in zip(plan.seqs, plan.starts, plan.ends, strict=True):
        if start == 0:
            return BatchKind.PREFILL
        if start < seq.prompt_len or end - start > 1 or end < seq.target:
            kind = BatchKind.EXTEND
    return kind


def ceil_div(value: int, divisor: int) -> int:
    """The number of parts of `divisor` that hold `value`."""
    return -(-value // divisor)
