from dataclasses import replace
from typing import Any

import pytest

from dist_infer.errors import RequestError
from dist_infer.intake.protocol import ParsedRequest
from dist_infer.intake.sampling_defaults import SamplingDefaults
from dist_infer.intake.sampling_fields import Endpoint, SamplingFields
from dist_infer.intake.validate import RequestLimits, build_requests, derive_seed
from dist_infer.types import Request, SamplingParams

PARSED = ParsedRequest(line=3, custom_id="a", endpoint="completion", sampling=SamplingFields(max_tokens=4, seed=5))


def asking(parsed: ParsedRequest = PARSED, **sampling: Any) -> ParsedRequest:
    return replace(parsed, sampling=replace(parsed.sampling, **sampling))


def fits(request: Request) -> None:
    """A pool for 20 tokens."""
    if len(request.prompt_ids) >= 20:
        raise RequestError("the prompt is too long", param="prompt", code="context_length_exceeded")
    if len(request.prompt_ids) + request.sampling.max_tokens > 20:
        raise RequestError("max_tokens is too large", param="max_tokens")


LIMITS = RequestLimits(vocab_size=100, max_model_len=20, check_fits=fits)


def build_all(
    parsed: ParsedRequest,
    prompt_ids: tuple[int, ...] = (1, 2),
    run_seed: int = 0,
    defaults: SamplingDefaults | None = None,
) -> list[Request]:
    limits = replace(LIMITS, defaults=defaults) if defaults is not None else LIMITS
    return build_requests(parsed, prompt_ids, first_id=8, limits=limits, eos_token_ids=(9, 10), run_seed=run_seed)


def build(parsed: ParsedRequest, prompt_ids: tuple[int, ...] = (1, 2), run_seed: int = 0) -> Request:
    (request,) = build_all(parsed, prompt_ids, run_seed)
    return request


def test_every_field_arrives() -> None:
    same: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.2,
        "logit_bias": ((3, -1.0), (99, 5.0)),
        "min_tokens": 2,
        "logprobs": 3,
        "prompt_logprobs": 0,
    }
    expected = SamplingParams(max_tokens=4, seed=5, stop_token_ids=(9, 10, 4), **same)
    assert build(asking(stop_token_ids=(4, 10), **same)) == Request(request_id=8, prompt_ids=(1, 2), sampling=expected)


def test_ignore_eos_leaves_the_stop_ids_of_the_request() -> None:
    assert build(asking(ignore_eos=True)).sampling.stop_token_ids == ()
    assert build(asking(ignore_eos=True, stop_token_ids=(9, 3))).sampling.stop_token_ids == (9, 3)


def test_top_k_of_the_whole_vocabulary_is_off() -> None:
    assert build(asking(top_k=99)).sampling.top_k == 99
    assert build(asking(top_k=100)).sampling.top_k == 0


def test_the_models_defaults_hold_where_the_request_is_silent() -> None:
    values: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
    defaults = SamplingDefaults(**values)
    (silent,) = build_all(PARSED, defaults=defaults)
    assert {name: getattr(silent.sampling, name) for name in values} == values
    neutral: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    (spoken,) = build_all(asking(**neutral), defaults=defaults)
    assert {name: getattr(spoken.sampling, name) for name in neutral} == neutral


@pytest.mark.parametrize("seed", [5, 2**63 - 2, None])
def test_each_of_n_answers_is_a_request_of_its_own(seed: int | None) -> None:
    requests = build_all(asking(n=4, seed=seed, prompt_logprobs=2, logprobs=1))
    assert [request.request_id for request in requests] == [8, 9, 10, 11]
    assert {request.prompt_ids for request in requests} == {(1, 2)}
    seeds = [request.sampling.seed for request in requests]
    assert len(set(seeds)) == 4 and all(-(2**63) <= own < 2**63 for own in seeds)
    assert seeds[0] == build(asking(seed=seed)).sampling.seed
    assert [request.sampling.prompt_logprobs for request in requests] == [2, None, None, None]
    assert {request.sampling.logprobs for request in requests} == {1}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"logit_bias": ((3, 1.0), (100, 1.0))}, "logit_bias"),
        ({"stop_token_ids": (100,)}, "stop_token_ids"),
        ({"min_tokens": 5}, "min_tokens"),
    ],
)
def test_options_beyond_the_limits_are_refused_by_name(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        build(asking(**asked))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("endpoint", "prompt_len", "max_tokens"),
    [("completion", 2, 16), ("completion", 4, 16), ("completion", 5, 15), ("chat", 2, 18), ("chat", 19, 1)],
)
def test_default_answer_length(endpoint: Endpoint, prompt_len: int, max_tokens: int) -> None:
    parsed = asking(replace(PARSED, endpoint=endpoint), max_tokens=None)
    assert build(parsed, (1,) * prompt_len).sampling.max_tokens == max_tokens


@pytest.mark.parametrize(("endpoint", "param"), [("completion", "prompt"), ("chat", "messages")])
@pytest.mark.parametrize("prompt_ids", [(), (1,) * 20, (1, 100)])
def test_a_bad_prompt_is_named_as_the_request_spells_it(
    endpoint: Endpoint, param: str, prompt_ids: tuple[int, ...]
) -> None:
    with pytest.raises(RequestError) as caught:
        build(asking(replace(PARSED, endpoint=endpoint), max_tokens=None), prompt_ids)
    assert caught.value.param == param


def test_largest_token_id() -> None:
    assert build(PARSED, (99,)).prompt_ids == (99,)
    with pytest.raises(RequestError, match="token id 100; the model's ids end at 99"):
        build(PARSED, (100,))


def test_what_the_scheduler_refuses_is_refused() -> None:
    with pytest.raises(RequestError, match="max_tokens is too large") as caught:
        build(asking(max_tokens=19))
    assert caught.value.param == "max_tokens"


def test_an_unseeded_request_gets_a_seed_of_run_and_line() -> None:
    unseeded = asking(seed=None)
    seeds = {build(replace(unseeded, line=line), run_seed=run).sampling.seed for line in range(50) for run in range(20)}
    assert len(seeds) == 1000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert min(seeds) < 0 < max(seeds)
    assert build(unseeded, run_seed=4).sampling.seed == derive_seed(4, 3) == build(unseeded, (7,), 4).sampling.seed
    assert build(PARSED, run_seed=4).sampling.seed == 5
