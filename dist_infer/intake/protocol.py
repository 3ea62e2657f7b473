"""One line of input -> a checked request. Three forms are read:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 9}}
    {"prompt": "Once upon a time", "max_tokens": 9}
    {"task_id": 1, "prompt": "Once upon a time", "output_tokens": 9}

Whatever would change the answer and is not implemented is refused with the name of the field, never ignored.
Checks are written by hand: a request is small, and each message names the field, the value and what would be
right.

Source: the OpenAI batch, chat-completion and completion objects; return_token_ids as vLLM spells it.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dist_infer.errors import RequestError
from dist_infer.intake import sampling_fields
from dist_infer.intake.bench_line import from_bench_line
from dist_infer.intake.fields import (
    Body,
    check_text,
    is_int,
    missing,
    read_flag,
    show,
    wrong_type,
)
from dist_infer.intake.sampling_fields import Endpoint, SamplingFields, read_sampling

ENDPOINTS: Mapping[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

_ENVELOPE = ("custom_id", "method", "url", "body")
_READ = (*sampling_fields.FIELDS, "return_token_ids", "model")
_HARMLESS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
)
# Fields that change the answer: accepted only with a value that asks for nothing. null asks for nothing everywhere.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),  # without tools there is nothing to choose
    "tools": ([],),
}
_MESSAGE_FIELDS = frozenset(("role", "content", "name"))

ChatMessage = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request whose fields are right in themselves; nothing is known of the model yet.

    A completion has `prompt` (text or token ids), a chat has `messages`.
    """

    line: int
    custom_id: str
    endpoint: Endpoint
    prompt: str | tuple[int, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    sampling: SamplingFields = field(default_factory=SamplingFields)
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that is answered with an error."""

    line: int
    custom_id: str
    error: RequestError


def line_id(line: int) -> str:
    """The custom_id of a line that has none of its own."""
    return f"line-{line}"


def parse_line(line: int, text: str) -> ParsedRequest | BadLine:
    """Check one line of input; `line` counts from 1. Never raises."""
    custom_id = line_id(line)
    try:
        fields = from_bench_line(_load_object(text))
        custom_id = _custom_id(fields, line)
        endpoint, body = _endpoint_and_body(fields)
        return _parse_body(line, custom_id, endpoint, body)
    except RequestError as error:
        return BadLine(line=line, custom_id=custom_id, error=error)


def _load_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise RequestError(f"not JSON: {error.msg} at character {error.pos + 1}", code="invalid_json") from error
    except RecursionError as error:
        raise RequestError("not readable JSON: nested too deeply", code="invalid_json") from error
    except ValueError as error:  # an integer with more digits than the interpreter converts
        raise RequestError(f"not readable JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError(f"the line is {show(value)}; it must be a JSON object", code="invalid_type")
    return value


def _no_constant(name: str) -> object:
    raise RequestError(f"{name} is not JSON", code="invalid_json")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"field {show(twice)} stands twice in one object", param=twice, code="invalid_json")
    return fields


def _is_batch_form(fields: Body) -> bool:
    return any(name in fields for name in ("method", "url", "body"))


def _custom_id(fields: Body, line: int) -> str:
    custom_id = fields.get("custom_id")
    if custom_id is None:
        if _is_batch_form(fields):
            raise missing("custom_id", "each line of a batch names its request")
        return line_id(line)
    if not isinstance(custom_id, str) or not custom_id:
        raise wrong_type("custom_id", custom_id, "a non-empty string")
    return check_text("custom_id", custom_id)


def _endpoint_and_body(fields: dict[str, Any]) -> tuple[Endpoint, Body]:
    if not _is_batch_form(fields):
        body = {name: value for name, value in fields.items() if name != "custom_id"}
        return ("chat" if "messages" in body and "prompt" not in body else "completion"), body
    for name in fields:
        if name not in _ENVELOPE:
            raise _unknown(name, _ENVELOPE, hint="options of the request belong into body")
    if fields.get("method") != "POST":
        raise _wrong_constant("method", fields, ["POST"])
    url = fields.get("url")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise _wrong_constant("url", fields, list(ENDPOINTS))
    request = fields.get("body")
    if request is None:
        raise missing("body", "the request itself")
    if not isinstance(request, dict):
        raise wrong_type("body", request, "a JSON object")
    return ENDPOINTS[url], request


def _wrong_constant(name: str, fields: Body, allowed: list[str]) -> RequestError:
    wanted = " or ".join(show(value) for value in allowed)
    if fields.get(name) is None:
        return missing(name, f"it must be {wanted}")
    return RequestError(f"{name} is {show(fields[name])}; it must be {wanted}", param=name, code="unsupported_value")


def _parse_body(line: int, custom_id: str, endpoint: Endpoint, body: Body) -> ParsedRequest:
    _refuse_unsupported(endpoint, body)
    return ParsedRequest(
        line=line,
        custom_id=custom_id,
        endpoint=endpoint,
        prompt=_prompt(body) if endpoint == "completion" else (),
        messages=_messages(body) if endpoint == "chat" else (),
        sampling=read_sampling(endpoint, body),
        return_token_ids=read_flag(body, "return_token_ids"),
    )


def _refuse_unsupported(endpoint: Endpoint, body: Body) -> None:
    content = "messages" if endpoint == "chat" else "prompt"
    for name, value in body.items():
        if name == content or name in _READ or name in _HARMLESS:
            continue
        if name not in _NEUTRAL:
            raise _unknown(name, (content, *_READ, *_NEUTRAL))
        allowed = _NEUTRAL[name]
        if value is not None and not any(_same(value, neutral) for neutral in allowed):
            alternative = "".join(f" or set it to {show(neutral)}" for neutral in allowed)
            raise RequestError(
                f"{name} is {show(value)}, which is not supported; leave {name} out{alternative}",
                param=name,
                code="unsupported_parameter",
            )
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise wrong_type("model", model, "a string")


def _same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _unknown(name: str, known: tuple[str, ...], *, hint: str = "") -> RequestError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else hint
    return RequestError(
        f"unknown field {show(name)}" + (f": {hint}" if hint else ""), param=name, code="unknown_parameter"
    )


def _prompt(body: Body) -> str | tuple[int, ...]:
    prompt = body.get("prompt")
    if prompt is None:
        raise missing("prompt", "text, or a list of token ids")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise RequestError(
                f"prompt holds {len(prompt)} prompts; give each a line of its own", param="prompt", code="invalid_value"
            )
        prompt = prompt[0]
    if isinstance(prompt, str):
        return check_text("prompt", prompt)
    if not isinstance(prompt, list) or not all(is_int(token_id) and token_id >= 0 for token_id in prompt):
        raise wrong_type("prompt", prompt, "text, or a list of token ids (integers from 0)")
    if not prompt:
        raise RequestError("prompt is empty: it needs at least one token id", param="prompt", code="invalid_value")
    return tuple(prompt)


def _messages(body: Body) -> tuple[ChatMessage, ...]:
    messages = body.get("messages")
    if messages is None:
        raise missing("messages", "a list of objects with role and content")
    if not isinstance(messages, list):
        raise wrong_type("messages", messages, "a list of objects with role and content")
    if not messages:
        raise RequestError("messages is empty: it needs at least one message", param="messages", code="invalid_value")
    return tuple(_message(f"messages[{idx}]", message) for idx, message in enumerate(messages))


def _message(where: str, message: object) -> ChatMessage:
    if not isinstance(message, dict):
        raise wrong_type(where, message, "an object with role and content")
    for name, value in message.items():
        if name not in _MESSAGE_FIELDS and value is not None:
            raise RequestError(
                f"{where}.{name} is not supported; a message has role, content and name",
                param=f"{where}.{name}",
                code="unsupported_parameter",
            )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise wrong_type(f"{where}.role", role, "a non-empty string")
    checked = {"role": check_text(f"{where}.role", role), "content": _content(f"{where}.content", message)}
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise wrong_type(f"{where}.name", name, "a string")
        checked["name"] = check_text(f"{where}.name", name)
    return checked


def _content(where: str, message: Body) -> str:
    """Text, or text parts: these are joined by line ends, as vLLM does for templates that expect text."""
    content = message.get("content")
    if isinstance(content, str):
        return check_text(where, content)
    if not isinstance(content, list):
        raise wrong_type(where, content, "text or a list of text parts")
    parts = []
    for idx, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise wrong_type(f"{where}[{idx}]", part, 'an object {"type": "text", "text": "..."}')
        parts.append(check_text(f"{where}[{idx}].text", part["text"]))
    return "\n".join(parts)
