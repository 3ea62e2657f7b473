"""A line of a trtllm-bench dataset as a request: {"task_id": 1, "prompt": "...", "output_tokens": 128}.

It asks for a number of tokens, not for an answer: greedy, and past the end of the sequence. `input_ids`, where given,
are the prompt and `prompt` is not read.

Source: the dataset form in TensorRT-LLM's guide to trtllm-bench.
"""

from typing import Any

from dist_infer.errors import RequestError
from dist_infer.intake.fields import is_int, missing, show, wrong_type

_KEYS = frozenset(("task_id", "prompt", "input_ids", "output_tokens"))
_MARKS = ("task_id", "input_ids", "output_tokens")


def from_bench_line(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as a completion request, or unchanged where they are no line of such a dataset.

    Errors: RequestError naming the field.
    """
    if not any(name in fields for name in _MARKS):
        return fields
    for name, value in fields.items():
        if name not in _KEYS and value is not None:
            raise RequestError(
                f"unknown field {show(name)}: a line of a trtllm-bench dataset has task_id, prompt or input_ids, "
                "output_tokens",
                param=name,
                code="unknown_parameter",
            )
    request = {
        "prompt": _prompt(fields),
        "max_tokens": _output_tokens(fields),
        "temperature": 0,
        "ignore_eos": True,
    }
    task_id = fields.get("task_id")
    if task_id is None:
        return request
    if not is_int(task_id) and not (isinstance(task_id, str) and task_id):
        raise wrong_type("task_id", task_id, "an integer or a non-empty string")
    return request | {"custom_id": str(task_id)}


def _prompt(fields: dict[str, Any]) -> object:
    ids = fields.get("input_ids")
    if ids is None:
        return fields.get("prompt")
    if not isinstance(ids, list) or not all(is_int(token_id) and token_id >= 0 for token_id in ids):
        raise wrong_type("input_ids", ids, "a list of token ids (integers from 0)")
    return ids


def _output_tokens(fields: dict[str, Any]) -> int:
    count = fields.get("output_tokens")
    if count is None:
        raise missing("output_tokens", "how many tokens to produce")
    if not is_int(count):
        raise wrong_type("output_tokens", count, "an integer from 1")
    if count < 1:
        raise RequestError(f"output_tokens is {count}; it must be at least 1", param="output_tokens")
    return int(count)
