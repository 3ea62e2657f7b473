"""What travels between intake, scheduler and runner. Host data only: no torch here.

Letters in comments: T tokens of a step, S sequences of a step, P pages of the longest sequence, L rows whose logits are
needed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Float64Array = npt.NDArray[np.float64]

FinishReason = Literal["stop", "length", "abort"]


class BatchKind(IntEnum):
    """What a group computes in a step. EXTEND has a chunk with cached history, even of one token."""

    NONE = 0
    DECODE = 1
    EXTEND = 2
    PREFILL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` is any int64. `stop_token_ids` holds
    the model's EOS ids too (intake adds them unless the request ignores EOS); a stop token is counted and ends the
    request with reason "stop". None of them is sampled before `min_tokens` tokens are there. `logprobs` asks for the
    log probability of each sampled token and of that many of the likeliest ones, `prompt_logprobs` for those of the
    prompt's tokens but the first. What the options do, and in which order: see sampler.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), no id twice
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """The tokens so far change the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that rank 0 has validated. `request_id` is unique in the job and grows with arrival."""

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request and the attention-data-parallel group that serves it."""

    group: int
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What rank 0 broadcasts once a step (rule 1): JSON bytes, never pickle."""

    admissions: tuple[Admission, ...] = ()
    aborts: tuple[int, ...] = ()
    end_of_input: bool = False

    def encode(self) -> bytes:
        """UTF-8 JSON; the empty news is two bytes."""
        if self == _EMPTY_NEWS:
            return b"{}"
        admissions: list[list[object]] = []
        prompt_ids: tuple[int, ...] | None = None
        for admission in self.admissions:
            request = admission.request
            # The n answers of a line follow one another and share a prompt, which may be long: it is sent once.
            sent = None if request.prompt_ids is prompt_ids else request.prompt_ids
            prompt_ids = request.prompt_ids
            admissions.append([admission.group, request.request_id, sent, _sampling_to_list(request.sampling)])
        return json.dumps({"admissions": admissions, "aborts": self.aborts, "end": self.end_of_input}).encode()

    @classmethod
    def decode(cls, data: bytes) -> "News":
        """The inverse of `encode`."""
        if data == b"{}":
            return _EMPTY_NEWS
        told = json.loads(data)
        admissions = []
        prompt_ids: tuple[int, ...] = ()
        for group, request_id, sent, sampling in told["admissions"]:
            prompt_ids = prompt_ids if sent is None else tuple(sent)
            request = Request(request_id=request_id, prompt_ids=prompt_ids, sampling=_sampling_from_list(sampling))
            admissions.append(Admission(group=group, request=request))
        return cls(admissions=tuple(admissions), aborts=tuple(told["aborts"]), end_of_input=told["end"])


_EMPTY_NEWS = News()


_SAMPLING_DEFAULTS = SamplingParams()
_SAMPLING_NAMES = tuple(option.name for option in fields(SamplingParams))
_NUM_ALWAYS_SENT = 6  # leading fields of every request; of the others only those that differ from their defaults


def _sampling_to_list(sampling: SamplingParams) -> list[object]:
    values = [getattr(sampling, name) for name in _SAMPLING_NAMES]
    defaults = [getattr(_SAMPLING_DEFAULTS, name) for name in _SAMPLING_NAMES]
    rare = zip(_SAMPLING_NAMES, values, defaults, strict=True)
    more = {name: value for name, value, default in list(rare)[_NUM_ALWAYS_SENT:] if value != default}
    return [*values[:_NUM_ALWAYS_SENT], *([more] if more else [])]


def _sampling_from_list(values: Sequence[Any]) -> SamplingParams:
    named = dict(zip(_SAMPLING_NAMES, values[:_NUM_ALWAYS_SENT], strict=False))
    for more in values[_NUM_ALWAYS_SENT:]:
        named |= more
    named["stop_token_ids"] = tuple(named["stop_token_ids"])
    named["logit_bias"] = tuple((token_id, bias) for token_id, bias in named.get("logit_bias", ()))
    return SamplingParams(**named)


@dataclass(slots=True, kw_only=True)
class LogitEdits:
    """What changes logits before a token is chosen. R rows with penalties, E single ids, H tokens so far.

    Rows count the batch's logit rows. A ban is a bias of -inf.
    """

    bias_rows: Int64Array  # [E]
    bias_ids: Int64Array  # [E]
    biases: Float64Array  # [E]
    penalty_rows: Int64Array  # [R]
    repetition: Float64Array  # [R] 1: off
    frequency: Float64Array  # [R] 0: off
    presence: Float64Array  # [R] 0: off
    token_owners: Int64Array  # [H] whose token it is: an index of penalty_rows
    token_ids: Int64Array  # [H] -1: the input token of the row, which the step in flight samples
    token_counts: Int64Array  # [H] 1: generated; 0: in the prompt, which counts for repetition only


@dataclass(slots=True, kw_only=True)
class ScoreRows:
    """Whose log probabilities a step gives. Q sampled tokens, P tokens of prompts."""

    logit_rows: Int64Array  # [Q] rows among the batch's logit rows
    token_rows: Int64Array  # [P] token rows of the batch
    next_ids: Int64Array  # [P] the prompt's token after each of them
    num_top: int  # likeliest tokens for each, the most that any request asks for

    def __len__(self) -> int:
        return len(self.logit_rows) + len(self.token_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageChanges:
    """The pages that sequences have got since the batch before: no cell of a state row and a column comes twice.

    Whoever runs batches keeps the pages of each state row. A sequence that starts in a row gets all of its pages anew.
    """

    rows: Int32Array  # [C] state rows
    columns: Int32Array  # [C] which page of the sequence
    page_ids: Int32Array  # [C]
    num_pages: int  # P, of the longest sequence of the batch


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step of one group as a structure of arrays.

    Sequences stand one after another; sequence s owns token rows query_start[s]:query_start[s+1]. A flat KV slot is
    page id * block size + offset. The pages are there in full or, from the scheduler, by their changes.
    """

    kind: BatchKind
    request_ids: Int64Array  # [S]
    token_ids: Int64Array  # [T] input ids; -1: the token that the step in flight samples for this sequence (depth 1)
    positions: Int64Array  # [T] position of each token in its sequence
    slots: Int64Array  # [T] where the token's KV is written; -1: nowhere
    query_start: Int32Array  # [S + 1]
    kv_lens: Int32Array  # [S] tokens that attention sees: cached ones + this step's
    pages: Int32Array | PageChanges  # [S, P] page ids, -1 beyond a sequence's pages
    state_rows: (
        Int32Array  # [S] the runner's row that keeps the last sampled token of a sequence, < max_num_seqs; -1: none
    )
    logit_rows: (
        Int64Array  # [L] token rows that get a next token: the last row of each sequence whose input is complete
    )
    logit_seqs: Int32Array  # [L] the sequence of each logit row
    temperature: Float64Array  # [L]
    top_k: Int32Array  # [L] 0: off
    top_p: Float64Array  # [L]
    seeds: Int64Array  # [L]
    draw_positions: Int64Array  # [L] position that the sampled token will have; keys the noise together with the seed
    min_p: Float64Array | None = None  # [L] 0: off; None: off in all rows
    edits: LogitEdits | None = None  # None: no request of the step asks for any
    scores: ScoreRows | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.request_ids)

    @property
    def num_pages(self) -> int:
        """P."""
        return self.pages.num_pages if isinstance(self.pages, PageChanges) else self.pages.shape[1]

    @classmethod
    def dummy(cls) -> "Batch":
        """One token that attends to nothing and is written nowhere: what a group without tokens runs (rule 6)."""
        return cls(
            kind=BatchKind.NONE,
            request_ids=np.full(1, -1, np.int64),
            token_ids=np.zeros(1, np.int64),
            positions=np.zeros(1, np.int64),
            slots=np.full(1, -1, np.int64),
            query_start=np.array([0, 1], np.int32),
            kv_lens=np.zeros(1, np.int32),
            pages=np.zeros((1, 0), np.int32),
            state_rows=np.full(1, -1, np.int32),
            logit_rows=np.zeros(1, np.int64),
            logit_seqs=np.zeros(1, np.int32),
            temperature=np.zeros(1, np.float64),
            top_k=np.zeros(1, np.int32),
            top_p=np.ones(1, np.float64),
            seeds=np.zeros(1, np.int64),
            draw_positions=np.zeros(1, np.int64),
        )


@dataclass(frozen=True, slots=True)
class TokenScore:
    """How likely a token was by the model's own logits, before any option of sampling.

    `rank` counts from 1, the likeliest; `top` are the likeliest ids with their log probabilities. All are finite: what
    is impossible has -9999.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(slots=True)  # not frozen nor keyword-only, which take twice as long: each sequence gets one in each step
class StepOutput:
    """What a step gave one request: its new token ids and, when it ended, why.

    `scores` has one entry for each token if the request asks for logprobs; `prompt_scores` are those of the prompt's
    tokens from the second one on, in order, a part with each step that computes some.
    """

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()


def encode_outputs(outputs: Sequence[StepOutput]) -> bytes:
    """What a group's root sends rank 0 for a step: UTF-8 JSON, also for no outputs."""
    return json.dumps([_output_to_list(output) for output in outputs], allow_nan=False).encode()


def decode_outputs(data: bytes) -> list[StepOutput]:
    """The inverse of `encode_outputs`."""
    return [
        StepOutput(
            request_id=request_id,
            token_ids=tuple(token_ids),
            finish_reason=reason,
            scores=_scores_from_lists(scores[0]) if scores else (),
            prompt_scores=_scores_from_lists(scores[1]) if scores else (),
        )
        for request_id, token_ids, reason, *scores in json.loads(data)
    ]


def _output_to_list(output: StepOutput) -> list[object]:
    values: list[object] = [output.request_id, output.token_ids, output.finish_reason]
    if output.scores or output.prompt_scores:
        values += [_scores_to_lists(output.scores), _scores_to_lists(output.prompt_scores)]
    return values


def _scores_to_lists(scores: Sequence[TokenScore]) -> list[object]:
    return [[score.token_id, score.logprob, score.rank, score.top] for score in scores]


def _scores_from_lists(values: Sequence[Any]) -> tuple[TokenScore, ...]:
    return tuple(
        TokenScore(token_id, logprob, rank, tuple((top_id, top) for top_id, top in tops))
        for token_id, logprob, rank, tops in values
    )
