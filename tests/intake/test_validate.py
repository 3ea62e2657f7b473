import json
from dataclasses import replace
from typing import Any

import pytest

from dist_infer.errors import RequestError
from dist_infer.intake.protocol import BadLine, ParsedRequest, parse_line
from dist_infer.intake.sampling_defaults import SamplingDefaults
from dist_infer.intake.sampling_fields import FIELDS, Endpoint, SamplingFields
from dist_infer.intake.validate import RequestLimits, build_requests, derive_seed
from dist_infer.types import Admission, News, Request, SamplingParams

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


def test_any_options_are_built_within_their_ranges_or_refused() -> None:
    """2,000 bodies: a line is refused with a readable message, or gives requests that survive the wire as they are."""
    hypothesis = pytest.importorskip("hypothesis")
    st = pytest.importorskip("hypothesis.strategies")
    extremes = [0, 1, -1, 0.0, -0.0, 1e-300, 1e300, 2**31 - 1, 2**31, 2**63, 10**400, 1e-12, 100, 0.01, 20, 21, 128]
    scalars = st.one_of(
        st.none(), st.booleans(), st.sampled_from(extremes), st.integers(-3, 130), st.floats(), st.text(max_size=3)
    )
    values = st.one_of(
        scalars,
        st.lists(st.one_of(scalars, st.text(max_size=3)), max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=2), st.integers(-1, 120).map(str)), scalars, max_size=2),
    )
    good = {
        "n": st.integers(1, 3),
        "stop": st.sampled_from(["x", ["y", "z"]]),
        "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.floats(-100, 100), max_size=2),
        "stop_token_ids": st.lists(st.integers(0, 99), max_size=3),
        "prompt_logprobs": st.integers(0, 20),
        "min_tokens": st.integers(0, 3),
        "temperature": st.floats(0, 2),
        "repetition_penalty": st.floats(0.01, 100),
        "ignore_eos": st.booleans(),
    }
    bodies = st.one_of(
        st.fixed_dictionaries({}, optional=good),
        st.dictionaries(st.sampled_from(FIELDS), values, max_size=4),
        st.tuples(
            st.fixed_dictionaries({}, optional=good), st.dictionaries(st.sampled_from(FIELDS), values, max_size=1)
        ).map(lambda pair: pair[0] | pair[1]),
    )
    counts = {"built": 0, "refused": 0}

    @hypothesis.settings(max_examples=2000, deadline=None, database=None, derandomize=True)  # type: ignore[untyped-decorator]
    @hypothesis.given(bodies, st.booleans())  # type: ignore[untyped-decorator]
    def check(body: dict[str, Any], is_chat: bool) -> None:
        prompt = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": [1, 2]}
        requests = built_or_refused(json.dumps(body | prompt))
        if isinstance(requests, RequestError):
            assert requests.param is None or requests.param in (*body, "max_tokens", "min_tokens")
            assert 0 < len(str(requests)) < 500
            counts["refused"] += 1
            return
        counts["built"] += 1
        news = News(admissions=tuple(Admission(group=0, request=request) for request in requests))
        json.loads(news.encode(), parse_constant=pytest.fail)
        assert News.decode(news.encode()) == news
        for request in requests:
            check_ranges(request.sampling)

    check()
    assert min(counts.values()) > 200, counts


def built_or_refused(text: str) -> list[Request] | RequestError:
    parsed = parse_line(1, text)
    if isinstance(parsed, BadLine):
        return parsed.error
    try:
        return build_all(parsed)
    except RequestError as error:
        return error


def check_ranges(sampling: SamplingParams) -> None:
    """What the scheduler and the sampler count on."""
    assert 1 <= sampling.max_tokens <= 20 and 0 <= sampling.min_tokens <= sampling.max_tokens
    assert 0 <= sampling.temperature <= 2 and 0 <= sampling.top_k < 100
    assert 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1
    assert -(2**63) <= sampling.seed < 2**63
    assert max(abs(sampling.presence_penalty), abs(sampling.frequency_penalty)) <= 2
    assert 0.01 <= sampling.repetition_penalty <= 100
    ids = [*sampling.stop_token_ids, *(token_id for token_id, _ in sampling.logit_bias)]
    assert all(0 <= token_id < 100 for token_id in ids)
    assert len(set(sampling.stop_token_ids)) == len(sampling.stop_token_ids)
    assert all(-100 <= bias <= 100 for _, bias in sampling.logit_bias)
    assert all(num is None or 0 <= num <= 20 for num in (sampling.logprobs, sampling.prompt_logprobs))
