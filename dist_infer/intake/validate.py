"""A parsed request and its token ids -> a request that the pool can serve, or a RequestError with the limit in it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dist_infer.errors import RequestError
from dist_infer.intake.protocol import ParsedRequest
from dist_infer.types import Request, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # of the OpenAI completion endpoint; a chat may use the rest of the context


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What the loaded model and the pool can serve.

    `check_fits` is the scheduler's word: it raises RequestError for a request that could never run.
    """

    vocab_size: int
    max_model_len: int  # tokens of one sequence, prompt and output; the pool holds as many
    check_fits: Callable[[Request], None]


def build_request(
    parsed: ParsedRequest,
    prompt_ids: Sequence[int],
    *,
    request_id: int,
    limits: RequestLimits,
    eos_token_ids: Sequence[int],
    run_seed: int,
) -> Request:
    """The request that is broadcast.

    Errors: RequestError naming the field and the limit.
    """
    param = "messages" if parsed.endpoint == "chat" else "prompt"
    _check_ids(param, prompt_ids, limits.vocab_size)
    sampling = SamplingParams(
        max_tokens=_max_tokens(parsed, len(prompt_ids), limits.max_model_len),
        temperature=parsed.temperature,
        top_k=parsed.top_k if parsed.top_k < limits.vocab_size else 0,
        top_p=parsed.top_p,
        seed=derive_seed(run_seed, parsed.line) if parsed.seed is None else parsed.seed,
        stop_token_ids=() if parsed.ignore_eos else tuple(eos_token_ids),
    )
    request = Request(request_id=request_id, prompt_ids=tuple(prompt_ids), sampling=sampling)
    try:
        limits.check_fits(request)
    except RequestError as error:
        if error.param != "prompt":
            raise
        raise RequestError(str(error), param=param, code=error.code, status=error.status) from error
    return request


def derive_seed(run_seed: int, line: int) -> int:
    """The seed of a request that has none: an int64 that depends on the run's seed and the line only."""
    digest = hashlib.blake2b(f"{run_seed}:{line}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _check_ids(param: str, prompt_ids: Sequence[int], vocab_size: int) -> None:
    if not prompt_ids:
        raise RequestError(f"{param} is empty: it gives no token", param=param)
    largest = max(prompt_ids)
    if largest >= vocab_size:
        raise RequestError(f"{param} holds token id {largest}; the model's ids end at {vocab_size - 1}", param=param)


def _max_tokens(parsed: ParsedRequest, prompt_len: int, max_model_len: int) -> int:
    """What the request asks for, else the endpoint's default; a default never exceeds the room."""
    if parsed.max_tokens is not None:
        return parsed.max_tokens
    room = max(1, max_model_len - prompt_len)  # no room at all: check_fits says so
    return room if parsed.endpoint == "chat" else min(room, DEFAULT_COMPLETION_TOKENS)
