from dataclasses import replace

import pytest

from dist_infer.errors import RequestError
from dist_infer.intake.protocol import Endpoint, ParsedRequest
from dist_infer.intake.validate import RequestLimits, build_request, derive_seed
from dist_infer.types import Request, SamplingParams

PARSED = ParsedRequest(line=3, custom_id="a", endpoint="completion", max_tokens=4, seed=5)


def fits(request: Request) -> None:
    """A pool for 20 tokens."""
    if len(request.prompt_ids) >= 20:
        raise RequestError("the prompt is too long", param="prompt", code="context_length_exceeded")
    if len(request.prompt_ids) + request.sampling.max_tokens > 20:
        raise RequestError("max_tokens is too large", param="max_tokens")


LIMITS = RequestLimits(vocab_size=100, max_model_len=20, check_fits=fits)


def build(parsed: ParsedRequest, prompt_ids: tuple[int, ...] = (1, 2), run_seed: int = 0) -> Request:
    return build_request(parsed, prompt_ids, request_id=8, limits=LIMITS, eos_token_ids=(9, 10), run_seed=run_seed)


def test_every_field_arrives() -> None:
    parsed = replace(PARSED, temperature=0.5, top_k=7, top_p=0.25)
    assert build(parsed) == Request(
        request_id=8,
        prompt_ids=(1, 2),
        sampling=SamplingParams(max_tokens=4, temperature=0.5, top_k=7, top_p=0.25, seed=5, stop_token_ids=(9, 10)),
    )


def test_ignore_eos_leaves_no_stop_token() -> None:
    assert build(replace(PARSED, ignore_eos=True)).sampling.stop_token_ids == ()


def test_top_k_of_the_whole_vocabulary_is_off() -> None:
    assert build(replace(PARSED, top_k=99)).sampling.top_k == 99
    assert build(replace(PARSED, top_k=100)).sampling.top_k == 0


@pytest.mark.parametrize(
    ("endpoint", "prompt_len", "max_tokens"),
    [("completion", 2, 16), ("completion", 4, 16), ("completion", 5, 15), ("chat", 2, 18), ("chat", 19, 1)],
)
def test_default_answer_length(endpoint: Endpoint, prompt_len: int, max_tokens: int) -> None:
    parsed = replace(PARSED, endpoint=endpoint, max_tokens=None)
    assert build(parsed, (1,) * prompt_len).sampling.max_tokens == max_tokens


@pytest.mark.parametrize(("endpoint", "param"), [("completion", "prompt"), ("chat", "messages")])
@pytest.mark.parametrize("prompt_ids", [(), (1,) * 20, (1, 100)])
def test_a_bad_prompt_is_named_as_the_request_spells_it(
    endpoint: Endpoint, param: str, prompt_ids: tuple[int, ...]
) -> None:
    with pytest.raises(RequestError) as caught:
        build(replace(PARSED, endpoint=endpoint, max_tokens=None), prompt_ids)
    assert caught.value.param == param


def test_largest_token_id() -> None:
    assert build(PARSED, (99,)).prompt_ids == (99,)
    with pytest.raises(RequestError, match="token id 100; the model's ids end at 99"):
        build(PARSED, (100,))


def test_what_the_scheduler_refuses_is_refused() -> None:
    with pytest.raises(RequestError, match="max_tokens is too large") as caught:
        build(replace(PARSED, max_tokens=19))
    assert caught.value.param == "max_tokens"


def test_an_unseeded_request_gets_a_seed_of_run_and_line() -> None:
    unseeded = replace(PARSED, seed=None)
    seeds = {build(replace(unseeded, line=line), run_seed=run).sampling.seed for line in range(50) for run in range(20)}
    assert len(seeds) == 1000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert min(seeds) < 0 < max(seeds)
    assert build(unseeded, run_seed=4).sampling.seed == derive_seed(4, 3) == build(unseeded, (7,), 4).sampling.seed
    assert build(PARSED, run_seed=4).sampling.seed == 5
