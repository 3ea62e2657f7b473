"""The fields of a request that say how its answer is chosen, where it stops and what is told about it.

Ranges are those of the OpenAI API where it has the field, else chosen so that no value can overflow.

Source: the OpenAI completion and chat-completion objects; min_p, repetition_penalty, stop_token_ids, min_tokens,
include_stop_str_in_output, skip_special_tokens and prompt_logprobs as vLLM spells them.
"""

from dataclasses import dataclass
from typing import Literal

from dist_infer.errors import RequestError
from dist_infer.intake.fields import (
    Body,
    check_text,
    is_int,
    read_flag,
    read_int,
    read_number,
    show,
    wrong_type,
    wrong_value,
)

Endpoint = Literal["chat", "completion"]

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_TEMPERATURE = 2.0
MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
REPETITION_RANGE = (0.01, 100.0)

FIELDS = (
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "n",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """What a request asks for. None: it is silent, and a default of the model, the API or the job holds.

    `logprobs` is the number of likeliest tokens to tell for each token, in a chat's form and in a completion's.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None  # 0: off
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True


def read_sampling(endpoint: Endpoint, body: Body) -> SamplingFields:
    """Errors: RequestError naming the field, its value and what would be right."""
    top_k = read_int(body, "top_k", low=-1, high=INT32_MAX)
    return SamplingFields(
        max_tokens=_max_tokens(body),
        temperature=read_number(body, "temperature", low=0.0, high=MAX_TEMPERATURE),
        top_k=None if top_k is None else max(0, top_k),
        top_p=read_number(body, "top_p", low=0.0, high=1.0, above_low=True),
        min_p=read_number(body, "min_p", low=0.0, high=1.0),
        presence_penalty=read_number(body, "presence_penalty", low=-MAX_PENALTY, high=MAX_PENALTY) or 0.0,
        frequency_penalty=read_number(body, "frequency_penalty", low=-MAX_PENALTY, high=MAX_PENALTY) or 0.0,
        repetition_penalty=read_number(body, "repetition_penalty", low=REPETITION_RANGE[0], high=REPETITION_RANGE[1]),
        logit_bias=_logit_bias(body),
        seed=read_int(body, "seed", low=INT64_MIN, high=INT64_MAX),
        n=read_int(body, "n", low=1, high=MAX_N) or 1,
        logprobs=_chat_logprobs(body) if endpoint == "chat" else _completion_logprobs(body),
        prompt_logprobs=read_int(body, "prompt_logprobs", low=0, high=MAX_LOGPROBS),
        stop=_stop(body),
        stop_token_ids=_stop_token_ids(body),
        min_tokens=read_int(body, "min_tokens", low=0, high=INT32_MAX) or 0,
        ignore_eos=read_flag(body, "ignore_eos"),
        include_stop=read_flag(body, "include_stop_str_in_output"),
        skip_special_tokens=read_flag(body, "skip_special_tokens", default=True),
    )


def _max_tokens(body: Body) -> int | None:
    old = read_int(body, "max_tokens", low=1, high=INT32_MAX)
    new = read_int(body, "max_completion_tokens", low=1, high=INT32_MAX)
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {old} and max_completion_tokens is {new}: give one of them",
            param="max_completion_tokens",
            code="invalid_value",
        )
    return old if new is None else new


def _logit_bias(body: Body) -> tuple[tuple[int, float], ...]:
    biases = body.get("logit_bias")
    if biases is None:
        return ()
    if not isinstance(biases, dict):
        raise wrong_type("logit_bias", biases, 'an object of token ids and numbers, such as {"50256": -100}')
    read = {}
    for key in biases:
        # Plain digits: int() also takes signs, blanks, underscores and the digits of other scripts.
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or int(key) in read:
            raise RequestError(
                f"logit_bias has the key {show(key)}; each key must be another token id, such as {show('50256')}",
                param="logit_bias",
                code="invalid_value",
            )
        try:
            bias = read_number(biases, key, low=-MAX_BIAS, high=MAX_BIAS)
        except RequestError as error:
            raise RequestError(f"logit_bias.{error}", param="logit_bias", code=error.code) from error
        read[int(key)] = bias or 0.0
    return tuple((token_id, bias) for token_id, bias in read.items() if bias)


def _chat_logprobs(body: Body) -> int | None:
    wanted = read_flag(body, "logprobs")
    num_top = read_int(body, "top_logprobs", low=0, high=MAX_LOGPROBS)
    if num_top and not wanted:
        raise RequestError(
            f"top_logprobs is {num_top} but logprobs is not true: set it", param="top_logprobs", code="invalid_value"
        )
    return (num_top or 0) if wanted else None


def _completion_logprobs(body: Body) -> int | None:
    if body.get("top_logprobs") is not None:
        raise RequestError(
            "top_logprobs is a field of chats; in a completion logprobs is the number of tokens",
            param="top_logprobs",
            code="unsupported_parameter",
        )
    if body.get("logprobs") is False:
        return None
    return read_int(body, "logprobs", low=0, high=MAX_LOGPROBS)


def _stop(body: Body) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise wrong_type("stop", stop, "text or a list of texts")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} texts; at most {MAX_STOPS}", param="stop", code="invalid_value")
    if "" in stops:
        raise wrong_value("stop", stop, "without an empty text, which would stop everything at once")
    return tuple(check_text("stop", text) for text in stops)


def _stop_token_ids(body: Body) -> tuple[int, ...]:
    ids = body.get("stop_token_ids")
    if ids is None:
        return ()
    if not isinstance(ids, list) or not all(is_int(token_id) and token_id >= 0 for token_id in ids):
        raise wrong_type("stop_token_ids", ids, "a list of token ids (integers from 0)")
    return tuple(dict.fromkeys(ids))
