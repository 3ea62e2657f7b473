"""What became of a line -> its record in the output: OpenAI's batch output form, strict JSON, one line each.

Source: the OpenAI batch output, chat-completion and completion objects; token_ids, stop_reason and prompt_logprobs as
vLLM spells them; timings are our own.
"""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from dist_infer.errors import RequestError
from dist_infer.intake.sampling_fields import Endpoint

JsonObject = dict[str, object]

JOB_FAILED = "job_failed"  # the error code of a Failure: a resumed run answers such a request again


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the `n` answers to a request.

    `stop_reason` is the stop string or token id of the request that ended it, None for the model's own end. `token_ids`
    is given where the request asked for the ids, `logprobs` and `prompt_logprobs` in the form of the endpoint.
    """

    text: str
    finish_reason: Literal["stop", "length"]
    token_ids: tuple[int, ...] | None = None
    stop_reason: str | int | None = None
    logprobs: JsonObject | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """When something came of a request. Units: seconds since its line was read."""

    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A request that was served. `prompt_logprobs` are given where it asked for them."""

    line: int
    custom_id: str
    endpoint: Endpoint
    choices: tuple[Choice, ...]
    prompt_len: int
    completion_len: int  # of all choices; counts end-of-sequence tokens
    created: int  # seconds since 1970
    timings: Timings | None = None
    prompt_logprobs: list[JsonObject | None] | None = None
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A line or request that was bad: the client's fault, status 4xx."""

    line: int
    custom_id: str
    error: RequestError
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A request that the job could not finish: not the client's fault, so without a response."""

    line: int
    custom_id: str
    message: str
    digest: str = ""


Outcome = Answer | Refusal | Failure


def encode_record(outcome: Outcome, *, model: str) -> bytes:
    """One line of output with its line end; half a surrogate pair, which UTF-8 can't hold, becomes a JSON escape."""
    text = json.dumps(_record(outcome, model), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def record_id(line: int, digest: str) -> str:
    """What a resumed run knows a request by: its line number and the digest of its line, where that is known."""
    return f"batch_req_{line}_{digest}" if digest else f"batch_req_{line}"


def _record(outcome: Outcome, model: str) -> JsonObject:
    record: JsonObject = {"id": record_id(outcome.line, outcome.digest), "custom_id": outcome.custom_id}
    if isinstance(outcome, Failure):
        return record | {"response": None, "error": {"code": JOB_FAILED, "message": outcome.message}}
    if isinstance(outcome, Refusal):
        response = _response(outcome.line, outcome.error.status, {"error": _error_body(outcome.error)})
    else:
        response = _response(outcome.line, 200, _completion(outcome, model))
    return record | {"response": response, "error": None}


def _response(line: int, status: int, body: JsonObject) -> JsonObject:
    return {"status_code": status, "request_id": f"req_{line}", "body": body}


def _error_body(error: RequestError) -> JsonObject:
    return {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": error.code}


def _completion(answer: Answer, model: str) -> JsonObject:
    is_chat = answer.endpoint == "chat"
    body: JsonObject = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{answer.line}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": answer.created,
        "model": model,
        "choices": [_choice(answer, idx, choice) for idx, choice in enumerate(answer.choices)],
        "usage": {
            "prompt_tokens": answer.prompt_len,
            "completion_tokens": answer.completion_len,
            "total_tokens": answer.prompt_len + answer.completion_len,
        },
    }
    if answer.timings is not None:
        body["timings"] = {name: round(value, 6) for name, value in asdict(answer.timings).items()}
    if is_chat and answer.prompt_logprobs is not None:
        body["prompt_logprobs"] = answer.prompt_logprobs
    return body


def _choice(answer: Answer, idx: int, choice: Choice) -> JsonObject:
    value: JsonObject = {"index": idx}
    if answer.endpoint == "chat":
        value["message"] = {"role": "assistant", "content": choice.text}
    else:
        value["text"] = choice.text
    value |= {"finish_reason": choice.finish_reason, "logprobs": choice.logprobs}
    if choice.stop_reason is not None:
        value["stop_reason"] = choice.stop_reason
    if choice.token_ids is not None:
        value["token_ids"] = list(choice.token_ids)
    if answer.endpoint == "completion" and answer.prompt_logprobs is not None:
        value["prompt_logprobs"] = answer.prompt_logprobs
    return value
