import json
from typing import Any

import pytest

from dist_infer.errors import RequestError
from dist_infer.intake.sampling_fields import Endpoint, SamplingFields, read_sampling

EVERYTHING: dict[str, Any] = {
    "max_tokens": 9,
    "temperature": 1e-12,
    "top_k": 4,
    "top_p": 1e-8,
    "min_p": 0.1,
    "presence_penalty": -2,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"7": -100, "0": 2.5, "3": 0, "4": None},
    "seed": -(2**63),
    "n": 3,
    "prompt_logprobs": 0,
    "stop": "\n",
    "stop_token_ids": [5, 6, 5],
    "min_tokens": 2,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}


def test_every_field() -> None:
    expected = SamplingFields(
        max_tokens=9,
        temperature=1e-12,
        top_k=4,
        top_p=1e-8,
        min_p=0.1,
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias=((7, -100.0), (0, 2.5)),
        seed=-(2**63),
        n=3,
        prompt_logprobs=0,
        stop=("\n",),
        stop_token_ids=(5, 6),
        min_tokens=2,
        ignore_eos=True,
        include_stop=True,
        skip_special_tokens=False,
    )
    assert read_sampling("completion", EVERYTHING) == expected
    assert read_sampling("chat", EVERYTHING) == expected


def test_silence_and_null() -> None:
    assert read_sampling("chat", {}) == SamplingFields()
    assert read_sampling("completion", dict.fromkeys([*EVERYTHING, "logprobs", "top_logprobs"])) == SamplingFields()


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"),
    [
        ("chat", {"logprobs": True}, 0),
        ("chat", {"logprobs": True, "top_logprobs": 20}, 20),
        ("chat", {"logprobs": False, "top_logprobs": 0}, None),
        ("completion", {"logprobs": 0}, 0),
        ("completion", {"logprobs": 5}, 5),
        ("completion", {"logprobs": False}, None),
    ],
)
def test_two_forms_of_logprobs(endpoint: Endpoint, body: dict[str, Any], expected: int | None) -> None:
    assert read_sampling(endpoint, body).logprobs == expected


@pytest.mark.parametrize(("top_k", "read"), [(-1, 0), (0, 0), (1, 1), (None, None)])
def test_top_k_off(top_k: int | None, read: int | None) -> None:
    assert read_sampling("chat", {"top_k": top_k}).top_k == read


def test_two_limits_that_differ_are_refused() -> None:
    with pytest.raises(RequestError, match="give one of them") as caught:
        read_sampling("chat", {"max_tokens": 3, "max_completion_tokens": 4})
    assert caught.value.param == "max_completion_tokens"
    assert read_sampling("chat", {"max_tokens": 3, "max_completion_tokens": 3}).max_tokens == 3


REFUSED: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "invalid_value"),
    ("max_tokens", -1, "invalid_value"),
    ("max_tokens", 2**31, "invalid_value"),
    ("max_tokens", "5", "invalid_type"),
    ("max_tokens", 5.0, "invalid_type"),
    ("max_tokens", True, "invalid_type"),
    ("max_completion_tokens", 0, "invalid_value"),
    ("temperature", -0.1, "invalid_value"),
    ("temperature", 2.1, "invalid_value"),
    ("temperature", 10**400, "invalid_value"),
    ("temperature", "0", "invalid_type"),
    ("temperature", False, "invalid_type"),
    ("top_k", -2, "invalid_value"),
    ("top_k", 2**31, "invalid_value"),
    ("top_k", 1.5, "invalid_type"),
    ("top_p", 0, "invalid_value"),
    ("top_p", 1.01, "invalid_value"),
    ("top_p", [], "invalid_type"),
    ("min_p", -0.1, "invalid_value"),
    ("min_p", 1.1, "invalid_value"),
    ("presence_penalty", 2.1, "invalid_value"),
    ("presence_penalty", float("nan"), "invalid_value"),
    ("frequency_penalty", -2.1, "invalid_value"),
    ("frequency_penalty", "1", "invalid_type"),
    ("repetition_penalty", 0, "invalid_value"),
    ("repetition_penalty", 1e9, "invalid_value"),
    ("logit_bias", [], "invalid_type"),
    ("logit_bias", {"a": 1}, "invalid_value"),
    ("logit_bias", {"": 1}, "invalid_value"),
    ("logit_bias", {"-1": 1}, "invalid_value"),
    ("logit_bias", {"1.0": 1}, "invalid_value"),
    ("logit_bias", {"\u0661": 1}, "invalid_value"),
    ("logit_bias", {"9" * 5000: 1}, "invalid_value"),
    ("logit_bias", {"1": 1, "01": 2}, "invalid_value"),
    ("logit_bias", {"1": 101}, "invalid_value"),
    ("logit_bias", {"1": True}, "invalid_type"),
    ("seed", 2**63, "invalid_value"),
    ("seed", 0.5, "invalid_type"),
    ("n", 0, "invalid_value"),
    ("n", 129, "invalid_value"),
    ("n", True, "invalid_type"),
    ("logprobs", 21, "invalid_value"),
    ("logprobs", True, "invalid_type"),
    ("top_logprobs", 1, "unsupported_parameter"),
    ("prompt_logprobs", -1, "invalid_value"),
    ("prompt_logprobs", 21, "invalid_value"),
    ("prompt_logprobs", True, "invalid_type"),
    ("stop", 5, "invalid_type"),
    ("stop", ["a", 5], "invalid_type"),
    ("stop", "", "invalid_value"),
    ("stop", ["a", ""], "invalid_value"),
    ("stop", ["a"] * 17, "invalid_value"),
    ("stop", "\ud800", "invalid_value"),
    ("stop_token_ids", 5, "invalid_type"),
    ("stop_token_ids", [-1], "invalid_type"),
    ("stop_token_ids", [True], "invalid_type"),
    ("min_tokens", -1, "invalid_value"),
    ("ignore_eos", 1, "invalid_type"),
    ("include_stop_str_in_output", "yes", "invalid_type"),
    ("skip_special_tokens", 0, "invalid_type"),
]


@pytest.mark.parametrize(("name", "value", "code"), REFUSED)
def test_field_is_refused_by_name(name: str, value: object, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_sampling("completion", {name: value})
    assert (caught.value.param, caught.value.code, caught.value.status) == (name, code, 400)
    assert name in str(caught.value) and len(str(caught.value)) < 300
    json.dumps(str(caught.value)).encode()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_logprobs_of_a_chat_are_a_flag_and_a_number(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_sampling("chat", body)
    assert caught.value.param == param
