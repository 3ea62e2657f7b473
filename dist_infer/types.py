"""What travels between intake, scheduler and runner. Host data only: no torch here.

Letters in comments: T tokens of a step, S sequences of a step, P pages of the longest sequence, L rows whose logits are
needed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

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

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. `seed` is any int64. `stop_token_ids` holds the model's
    EOS ids too (intake adds them unless the request ignores EOS); a stop token is counted and ends the request with
    reason "stop".
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


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
        admissions = [
            [a.group, a.request.request_id, a.request.prompt_ids, _sampling_to_list(a.request.sampling)]
            for a in self.admissions
        ]
        return json.dumps({"admissions": admissions, "aborts": self.aborts, "end": self.end_of_input}).encode()

    @classmethod
    def decode(cls, data: bytes) -> "News":
        """The inverse of `encode`."""
        if data == b"{}":
            return _EMPTY_NEWS
        fields = json.loads(data)
        admissions = tuple(
            Admission(
                group=group,
                request=Request(
                    request_id=request_id, prompt_ids=tuple(prompt_ids), sampling=_sampling_from_list(sampling)
                ),
            )
            for group, request_id, prompt_ids, sampling in fields["admissions"]
        )
        return cls(admissions=admissions, aborts=tuple(fields["aborts"]), end_of_input=fields["end"])


_EMPTY_NEWS = News()


def _sampling_to_list(s: SamplingParams) -> list[object]:
    return [s.max_tokens, s.temperature, s.top_k, s.top_p, s.seed, s.stop_token_ids]


def _sampling_from_list(values: Sequence[object]) -> SamplingParams:
    max_tokens, temperature, top_k, top_p, seed, stop_token_ids = values
    return SamplingParams(
        max_tokens=max_tokens,  # type: ignore[arg-type]
        temperature=temperature,  # type: ignore[arg-type]
        top_k=top_k,  # type: ignore[arg-type]
        top_p=top_p,  # type: ignore[arg-type]
        seed=seed,  # type: ignore[arg-type]
        stop_token_ids=tuple(stop_token_ids),  # type: ignore[arg-type]
    )


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step of one group as a structure of arrays.

    Sequences stand one after another; sequence s owns token rows query_start[s]:query_start[s+1]. A flat KV slot is
    page id * block size + offset.
    """

    kind: BatchKind
    request_ids: Int64Array  # [S]
    token_ids: Int64Array  # [T] input ids; -1: the token that the step in flight samples for this sequence (depth 1)
    positions: Int64Array  # [T] position of each token in its sequence
    slots: Int64Array  # [T] where the token's KV is written; -1: nowhere
    query_start: Int32Array  # [S + 1]
    kv_lens: Int32Array  # [S] tokens that attention sees: cached ones + this step's
    page_table: Int32Array  # [S, P] page ids, -1 beyond a sequence's pages
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

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.request_ids)

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
            page_table=np.zeros((1, 0), np.int32),
            state_rows=np.full(1, -1, np.int32),
            logit_rows=np.zeros(1, np.int64),
            logit_seqs=np.zeros(1, np.int32),
            temperature=np.zeros(1, np.float64),
            top_k=np.zeros(1, np.int32),
            top_p=np.ones(1, np.float64),
            seeds=np.zeros(1, np.int64),
            draw_positions=np.zeros(1, np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step gave one request: its new token ids and, when it ended, why."""

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


def encode_outputs(outputs: Sequence[StepOutput]) -> bytes:
    """What a group's root sends rank 0 for a step: UTF-8 JSON, also for no outputs."""
    return json.dumps([[o.request_id, o.token_ids, o.finish_reason] for o in outputs]).encode()


def decode_outputs(data: bytes) -> list[StepOutput]:
    """The inverse of `encode_outputs`."""
    return [
        StepOutput(request_id=request_id, token_ids=tuple(token_ids), finish_reason=reason)
        for request_id, token_ids, reason in json.loads(data)
    ]
