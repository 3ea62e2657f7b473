import json
from typing import Any

import pytest

from dist_infer.errors import RequestError
from dist_infer.intake.protocol import BadLine, ParsedRequest, parse_line
from dist_infer.intake.sampling_fields import SamplingFields

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def batch_line(body: object, *, url: object = CHAT_URL, **envelope: object) -> str:
    return json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body} | envelope)


def good(text: str) -> ParsedRequest:
    parsed = parse_line(7, text)
    assert isinstance(parsed, ParsedRequest), parsed
    return parsed


def bad(text: str) -> RequestError:
    parsed = parse_line(7, text)
    assert isinstance(parsed, BadLine), parsed
    assert parsed.line == 7
    return parsed.error


def test_chat_of_a_batch() -> None:
    request = good(batch_line({"model": "m", "messages": HELLO, "max_completion_tokens": 5, "user": "u", "n": 1}))
    assert (request.custom_id, request.endpoint, request.sampling.max_tokens) == ("a", "chat", 5)
    assert request.messages == ({"role": "user", "content": "Hello"},)


def test_completion_of_a_batch_with_every_field() -> None:
    body = {
        "prompt": [3, 0, 5],
        "max_tokens": 9,
        "temperature": 0,
        "top_k": 4,
        "top_p": 0.5,
        "seed": -(2**63),
        "ignore_eos": True,
        "return_token_ids": True,
    }
    assert good(batch_line(body, url=COMPLETION_URL)) == ParsedRequest(
        line=7,
        custom_id="a",
        endpoint="completion",
        prompt=(3, 0, 5),
        sampling=SamplingFields(max_tokens=9, temperature=0.0, top_k=4, top_p=0.5, seed=-(2**63), ignore_eos=True),
        return_token_ids=True,
    )


def test_simple_line_has_the_defaults_of_the_api_and_its_line_as_id() -> None:
    assert good('{"prompt": "Once"}') == ParsedRequest(line=7, custom_id="line-7", endpoint="completion", prompt="Once")
    assert good('{"prompt": "Once", "custom_id": "b"}').custom_id == "b"
    assert good(json.dumps({"messages": HELLO})).endpoint == "chat"


@pytest.mark.parametrize(("prompt", "read"), [("", ""), (["a"], "a"), ([1], (1,)), ([[1, 2]], (1, 2))])
def test_forms_of_one_prompt(prompt: object, read: object) -> None:
    assert good(json.dumps({"prompt": prompt})).prompt == read


def test_text_parts_are_joined_by_line_ends() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = good(batch_line({"messages": [{"role": "user", "content": parts, "name": "n"}]}))
    assert request.messages == ({"role": "user", "content": "one\ntwo", "name": "n"},)


NEUTRAL = {
    "best_of": 1,
    "stream": False,
    "echo": False,
    "tools": [],
    "response_format": {"type": "text"},
    "metadata": {"any": "thing"},
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_fields_that_ask_for_nothing_are_accepted(name: str) -> None:
    good(json.dumps({"prompt": "x", name: NEUTRAL[name]}))
    good(json.dumps({"prompt": "x", name: None}))


REFUSED: list[tuple[str, Any, str]] = [
    ("best_of", 3, "unsupported_parameter"),
    ("stream", True, "unsupported_parameter"),
    ("tools", [{}], "unsupported_parameter"),
    ("tool_choice", "required", "unsupported_parameter"),
    ("response_format", {"type": "json_object"}, "unsupported_parameter"),
    ("echo", True, "unsupported_parameter"),
    ("suffix", "x", "unsupported_parameter"),
    ("min_p", 1.1, "invalid_value"),  # one of all in sampling_fields
    ("guided_json", {}, "unknown_parameter"),
    ("max_token", 3, "unknown_parameter"),
    ("\ud800", 3, "unknown_parameter"),
    ("model", 3, "invalid_type"),
    ("return_token_ids", "yes", "invalid_type"),
    ("prompt", [], "invalid_value"),
    ("prompt", [[]], "invalid_value"),
    ("prompt", ["a", "b"], "invalid_value"),
    ("prompt", [[1], []], "invalid_value"),
    ("prompt", [1, "a"], "invalid_type"),
    ("prompt", [1, -1], "invalid_type"),
    ("prompt", [1, True], "invalid_type"),
    ("prompt", [1, 2.0], "invalid_type"),
    ("prompt", [[["a"]]], "invalid_type"),
    ("prompt", 5, "invalid_type"),
    ("prompt", {}, "invalid_type"),
    ("prompt", None, "missing_required_parameter"),
    ("prompt", "half \ud800", "invalid_value"),
    ("messages", HELLO, "unknown_parameter"),
]


@pytest.mark.parametrize(("name", "value", "code"), REFUSED)
def test_field_is_refused_by_name(name: str, value: object, code: str) -> None:
    error = bad(json.dumps({"prompt": "x", name: value}))
    assert (error.param, error.code, error.status) == (name, code, 400)
    assert json.dumps(name).strip('"') in str(error)


def test_misspelt_field_gets_a_hint() -> None:
    assert "did you mean max_tokens?" in str(bad('{"prompt": "x", "max_token": 3}'))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[1]"),
        ({"content": "hi"}, "messages[1].role"),
        ({"role": "", "content": "hi"}, "messages[1].role"),
        ({"role": 1, "content": "hi"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": "\udc00"}, "messages[1].content"),
        ({"role": "user", "content": ["hi"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": "hi", "name": 3}, "messages[1].name"),
        ({"role": "assistant", "content": "hi", "tool_calls": [{}]}, "messages[1].tool_calls"),
    ],
)
def test_bad_message_is_named(message: object, param: str) -> None:
    assert bad(batch_line({"messages": [*HELLO, message]})).param == param


@pytest.mark.parametrize("messages", [[], {}, "hi", None, [[]]])
def test_bad_messages(messages: object) -> None:
    assert str(bad(batch_line({"messages": messages})).param).startswith("messages")


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (batch_line({"messages": HELLO}, url="/v1/embeddings"), "url"),
        (batch_line({"messages": HELLO}, url=None), "url"),
        (batch_line({"messages": HELLO}, url=["x"]), "url"),
        (batch_line({"messages": HELLO}, method="GET"), "method"),
        (batch_line({"messages": HELLO}, method=None), "method"),
        (batch_line({"messages": HELLO}, custom_id=None), "custom_id"),
        (batch_line({"messages": HELLO}, custom_id=5), "custom_id"),
        (batch_line({"messages": HELLO}, custom_id=""), "custom_id"),
        (batch_line({"messages": HELLO}, custom_id="\ud800"), "custom_id"),
        (batch_line(None), "body"),
        (batch_line([]), "body"),
        (batch_line({"messages": HELLO}, max_tokens=5), "max_tokens"),
        (batch_line({"messages": HELLO, "prompt": "x"}), "prompt"),
        (batch_line({"messages": HELLO}, url=COMPLETION_URL), "messages"),
    ],
)
def test_bad_envelope_is_named(text: str, param: str) -> None:
    assert bad(text).param == param


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "nonsense",
        '{"prompt": "x"} extra',
        '{"prompt": "x", "temperature": NaN}',
        '{"prompt": "x", "temperature": Infinity}',
        '{"prompt": "x", "prompt": "y"}',
        '{"prompt": ' + "[" * 100_000,
        '{"prompt": "x", "seed": ' + "9" * 5000 + "}",
    ],
)
def test_what_is_not_json_is_refused(text: str) -> None:
    assert bad(text).code == "invalid_json"


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null", "true"])
def test_a_line_must_hold_an_object(text: str) -> None:
    assert bad(text).code == "invalid_type"


def test_a_number_beyond_the_range_of_floats_is_refused() -> None:
    assert bad('{"prompt": "x", "temperature": 1e999}').param == "temperature"


def test_a_bad_line_keeps_the_custom_id_that_could_be_read() -> None:
    parsed = parse_line(3, batch_line({"messages": HELLO}, url="/v1/embeddings", custom_id="mine"))
    assert isinstance(parsed, BadLine) and parsed.custom_id == "mine"
    parsed = parse_line(3, "{")
    assert isinstance(parsed, BadLine) and parsed.custom_id == "line-3"
