"""A parsed request and its token ids -> a request that the pool can serve, or a RequestError with the limit in it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from dist_infer.errors import RequestError
from dist_infer.intake.protocol import ParsedRequest
from dist_infer.intake.sampling_defaults import SamplingDefaults
from dist_infer.types import Request, SamplingParams

T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS = 16  # of the OpenAI completion endpoint; a chat may use the rest of the context


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What the loaded model and the pool can serve, and the model's defaults.

    `check_fits` is the scheduler's word: it raises RequestError for a request that could never run.
    """

    vocab_size: int
    max_model_len: int  # tokens of one sequence, prompt and output; the pool holds as many
    check_fits: Callable[[Request], None]
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


def build_requests(
    parsed: ParsedRequest,
    prompt_ids: Sequence[int],
    *,
    first_id: int,
    limits: RequestLimits,
    eos_token_ids: Sequence[int],
    run_seed: int,
) -> list[Request]:
    """The requests that are broadcast: one for each of the `n` answers, with ids from `first_id` on.

    They differ in their seeds, and only the first one scores the prompt.

    Errors: RequestError naming the field and the limit.
    """
    param = "messages" if parsed.endpoint == "chat" else "prompt"
    _check_ids(param, prompt_ids, limits.vocab_size)
    sampling = _sampling(parsed, len(prompt_ids), limits, eos_token_ids, run_seed)
    request = Request(request_id=first_id, prompt_ids=tuple(prompt_ids), sampling=sampling)
    try:
        limits.check_fits(request)
    except RequestError as error:
        if error.param != "prompt":
            raise
        raise RequestError(str(error), param=param, code=error.code, status=error.status) from error
    others = (
        replace(sampling, seed=_as_int64(sampling.seed + idx), prompt_logprobs=None)
        for idx in range(1, parsed.sampling.n)
    )
    more = (
        Request(request_id=first_id + idx, prompt_ids=request.prompt_ids, sampling=own)
        for idx, own in enumerate(others, start=1)
    )
    return [request, *more]


def derive_seed(run_seed: int, line: int) -> int:
    """The seed of a request that has none: an int64 that depends on the run's seed and the line only."""
    digest = hashlib.blake2b(f"{run_seed}:{line}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _as_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _sampling(
    parsed: ParsedRequest, prompt_len: int, limits: RequestLimits, eos_token_ids: Sequence[int], run_seed: int
) -> SamplingParams:
    """The options of the first answer, with the model's defaults where the request is silent."""
    asked, defaults = parsed.sampling, limits.defaults
    max_tokens = _max_tokens(parsed, prompt_len, limits.max_model_len)
    _check_options(parsed, max_tokens, limits.vocab_size)
    top_k = _or(asked.top_k, defaults.top_k)
    eos = () if asked.ignore_eos else eos_token_ids
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(asked.temperature, defaults.temperature),
        top_k=top_k if top_k < limits.vocab_size else 0,
        top_p=_or(asked.top_p, defaults.top_p),
        seed=derive_seed(run_seed, parsed.line) if asked.seed is None else asked.seed,
        stop_token_ids=tuple(dict.fromkeys((*eos, *asked.stop_token_ids))),
        min_p=_or(asked.min_p, defaults.min_p),
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=_or(asked.repetition_penalty, defaults.repetition_penalty),
        logit_bias=asked.logit_bias,
        min_tokens=asked.min_tokens,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _check_options(parsed: ParsedRequest, max_tokens: int, vocab_size: int) -> None:
    asked = parsed.sampling
    for name, ids in (
        ("logit_bias", [token_id for token_id, _ in asked.logit_bias]),
        ("stop_token_ids", asked.stop_token_ids),
    ):
        if ids and max(ids) >= vocab_size:
            raise RequestError(
                f"{name} holds token id {max(ids)}; the model's ids end at {vocab_size - 1}",
                param=name,
                code="invalid_value",
            )
    if asked.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {asked.min_tokens} but at most {max_tokens} tokens are generated: "
            "lower it or raise max_tokens",
            param="min_tokens",
            code="invalid_value",
        )


def _check_ids(param: str, prompt_ids: Sequence[int], vocab_size: int) -> None:
    if not prompt_ids:
        raise RequestError(f"{param} is empty: it gives no token", param=param)
    largest = max(prompt_ids)
    if largest >= vocab_size:
        raise RequestError(f"{param} holds token id {largest}; the model's ids end at {vocab_size - 1}", param=param)


def _max_tokens(parsed: ParsedRequest, prompt_len: int, max_model_len: int) -> int:
    """What the request asks for, else the endpoint's default; a default never exceeds the room."""
    if parsed.sampling.max_tokens is not None:
        return parsed.sampling.max_tokens
    room = max(1, max_model_len - prompt_len)  # no room at all: check_fits says so
    return room if parsed.endpoint == "chat" else min(room, DEFAULT_COMPLETION_TOKENS)
