import json
from typing import Any

import pytest

from dist_infer.errors import RequestError
from dist_infer.intake.bench_line import from_bench_line
from dist_infer.intake.protocol import BadLine, ParsedRequest, parse_line


def test_a_prompt() -> None:
    line = {"task_id": 7, "prompt": "Once", "output_tokens": 20}
    parsed = parse_line(3, json.dumps(line))
    assert isinstance(parsed, ParsedRequest)
    assert (parsed.custom_id, parsed.prompt, parsed.endpoint) == ("7", "Once", "completion")
    assert (parsed.sampling.max_tokens, parsed.sampling.temperature, parsed.sampling.ignore_eos) == (20, 0, True)


def test_token_ids_win_over_the_prompt() -> None:
    parsed = parse_line(3, '{"task_id": "a", "prompt": "Once", "input_ids": [1, 2], "output_tokens": 1}')
    assert isinstance(parsed, ParsedRequest)
    assert (parsed.custom_id, parsed.prompt) == ("a", (1, 2))


def test_a_task_without_a_name_is_known_by_its_line() -> None:
    parsed = parse_line(3, '{"input_ids": [1], "output_tokens": 1, "task_id": null}')
    assert isinstance(parsed, ParsedRequest) and parsed.custom_id == "line-3"


@pytest.mark.parametrize("fields", [{}, {"prompt": "x"}, {"prompt": "x", "max_tokens": 4}, {"messages": []}])
def test_other_lines_are_left_alone(fields: dict[str, Any]) -> None:
    assert from_bench_line(fields) is fields


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"output_tokens": 0}, "output_tokens"),
        ({"output_tokens": "5"}, "output_tokens"),
        ({"output_tokens": None}, "output_tokens"),
        ({"output_tokens": True}, "output_tokens"),
        ({"output_tokens": 2**31}, "max_tokens"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": "text"}, "input_ids"),
        ({"input_ids": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"task_id": ""}, "task_id"),
        ({"task_id": 1.5}, "task_id"),
        ({"lora_request": {"name": "x"}}, "lora_request"),
        ({"temperature": 1}, "temperature"),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], param: str) -> None:
    line = {"task_id": 7, "prompt": "Once", "output_tokens": 20} | changes
    parsed = parse_line(1, json.dumps(line))
    assert isinstance(parsed, BadLine) and isinstance(parsed.error, RequestError)
    assert parsed.error.param == param
