"""The sequences of a scheduler, one by one and as the arrays of a batch. Host data only: no torch."""

from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush

import numpy as np

from dist_infer.config import SchedulerConfig
from dist_infer.pages import chain_hash
from dist_infer.types import Batch, BatchKind, Int32Array, Int64Array, PageChanges, Request, SamplingParams

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
    last_id: int = _UNKNOWN_TOKEN  # the newest known token of the answer
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
    num_decodes: int = 0  # leading sequences that compute the one token after their newest one
    has_options: bool = False  # some sequence does

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """The next `num_tokens` tokens of a sequence."""
        start = seq.num_scheduled
        self.seqs.append(seq)
        self.starts.append(start)
        self.ends.append(start + num_tokens)
        self.budget -= num_tokens
        self.has_options = self.has_options or seq.has_options

    def add_decode(self, seq: Sequence) -> None:
        """The token that a sequence has just got, or gets from a step in flight; before any other `add`."""
        start = seq.num_scheduled
        self.seqs.append(seq)
        self.starts.append(start)
        self.ends.append(start + 1)
        self.budget -= 1
        self.num_decodes += 1
        if seq.has_options:
            self.has_options = True

    def input_ids(self) -> Int64Array:
        """The tokens that are computed, one sequence after another."""
        decodes = [_UNKNOWN_TOKEN if seq.num_unknown else seq.last_id for seq in self.seqs[: self.num_decodes]]
        parts = [np.array(decodes, np.int64)]
        others = slice(self.num_decodes, None)
        parts += [
            seq.tokens[start:end]
            for seq, start, end in zip(self.seqs[others], self.starts[others], self.ends[others], strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Rows:
    """What the runner and the sampler need of each running sequence, in arrays with a row per sequence."""

    def __init__(self, config: SchedulerConfig) -> None:
        max_pages = min(ceil_div(config.max_model_len, config.block_size), config.num_kv_blocks)
        self._block_size = config.block_size
        self._free = list(range(config.max_num_seqs))  # a heap: the smallest row first
        self._pages = np.full((config.max_num_seqs, max_pages), _NO_PAGE, np.int32)
        # Pages that rows have got since the last batch.
        self._new_rows: list[int] = []
        self._new_columns: list[int] = []
        self._new_ids: list[int] = []
        self._temperature = np.zeros(config.max_num_seqs, np.float64)
        self._top_k = np.zeros(config.max_num_seqs, np.int32)
        self._top_p = np.ones(config.max_num_seqs, np.float64)
        self._seeds = np.zeros(config.max_num_seqs, np.int64)
        self._request_ids = np.zeros(config.max_num_seqs, np.int64)
        self._prompt_lens = np.zeros(config.max_num_seqs, np.int64)

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
        self._request_ids[row] = request.request_id
        self._prompt_lens[row] = len(request.prompt_ids)
        return row

    def give_back(self, row: int, num_pages: int) -> None:
        """The row of a sequence that has left; its first `num_pages` pages were set."""
        self._pages[row, :num_pages] = _NO_PAGE
        if row in self._new_rows:
            self._forget_new(row)
        heappush(self._free, row)

    def set_pages(self, row: int, first: int, blocks: list[int]) -> None:
        """More blocks for a sequence, from its page `first` on."""
        self._pages[row, first : first + len(blocks)] = blocks
        self._new_rows += [row] * len(blocks)
        self._new_columns += range(first, first + len(blocks))
        self._new_ids += blocks

    def fill(self, plan: Plan) -> Batch:
        """The batch of a plan, before the plan's sequences are advanced."""
        num_seqs = len(plan.seqs)
        rows = np.array([seq.row for seq in plan.seqs], np.int32)
        starts, ends = np.array(plan.starts, np.int64), np.array(plan.ends, np.int64)
        targets = np.array([seq.num_known + seq.num_unknown for seq in plan.seqs], np.int64)
        query_start = np.zeros(num_seqs + 1, np.int32)
        if plan.num_decodes == num_seqs:
            query_start[1:] = np.arange(1, num_seqs + 1)
            token_rows, positions = rows, starts
            logit_seqs = np.arange(num_seqs, dtype=np.int32)
        else:
            lens = ends - starts
            np.cumsum(lens, out=query_start[1:])
            token_seqs = np.repeat(np.arange(num_seqs), lens)
            token_rows = rows[token_seqs]
            positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[token_seqs]
            logit_seqs = np.flatnonzero(ends == targets).astype(np.int32)
        pages = self._pages[token_rows, positions // self._block_size]
        logit_state_rows = rows[logit_seqs]
        return Batch(
            kind=self._kind_of(plan, rows, starts, ends, targets),
            request_ids=self._request_ids[rows],
            token_ids=plan.input_ids(),
            positions=positions,
            slots=pages.astype(np.int64) * self._block_size + positions % self._block_size,
            query_start=query_start,
            kv_lens=ends.astype(np.int32),
            pages=self._take_changes(ceil_div(int(ends.max()), self._block_size)),
            state_rows=rows,
            logit_rows=query_start[1:][logit_seqs].astype(np.int64) - 1,
            logit_seqs=logit_seqs,
            temperature=self._temperature[logit_state_rows],
            top_k=self._top_k[logit_state_rows],
            top_p=self._top_p[logit_state_rows],
            seeds=self._seeds[logit_state_rows],
            draw_positions=ends[logit_seqs],
        )

    def _take_changes(self, num_pages: int) -> PageChanges:
        changes = PageChanges(
            rows=np.array(self._new_rows, np.int32),
            columns=np.array(self._new_columns, np.int32),
            page_ids=np.array(self._new_ids, np.int32),
            num_pages=num_pages,
        )
        self._new_rows, self._new_columns, self._new_ids = [], [], []
        return changes

    def _forget_new(self, row: int) -> None:
        kept = [idx for idx, other in enumerate(self._new_rows) if other != row]
        self._new_rows = [self._new_rows[idx] for idx in kept]
        self._new_columns = [self._new_columns[idx] for idx in kept]
        self._new_ids = [self._new_ids[idx] for idx in kept]

    def _kind_of(
        self, plan: Plan, rows: Int32Array, starts: Int64Array, ends: Int64Array, targets: Int64Array
    ) -> BatchKind:
        if plan.num_decodes == len(rows):
            return BatchKind.DECODE
        if not starts.all():
            return BatchKind.PREFILL
        is_chunk = (starts < self._prompt_lens[rows]) | (ends - starts > 1) | (ends < targets)
        return BatchKind.EXTEND if is_chunk.any() else BatchKind.DECODE


def ceil_div(value: int, divisor: int) -> int:
    """The number of parts of `divisor` that hold `value`."""
    return -(-value // divisor)
