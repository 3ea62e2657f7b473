"""What travels keeps its content."""

from dataclasses import fields

import numpy as np
import pytest

from dist_infer.types import (
    Admission,
    Batch,
    News,
    Request,
    SamplingParams,
    StepOutput,
    TokenScore,
    decode_outputs,
    encode_outputs,
)


def test_news_survives_the_wire() -> None:
    sampling = SamplingParams(max_tokens=3, temperature=0.1, top_k=4, top_p=0.7, seed=-(2**63), stop_token_ids=(1, 2))
    news = News(
        admissions=(Admission(group=1, request=Request(request_id=2**40, prompt_ids=(5, 6), sampling=sampling)),),
        aborts=(9, 8),
        end_of_input=True,
    )
    assert News.decode(news.encode()) == news


def test_every_option_survives_the_wire() -> None:
    options = SamplingParams(
        max_tokens=9,
        temperature=0.0,
        top_k=3,
        top_p=0.1,
        seed=-1,
        stop_token_ids=(4,),
        min_p=0.3,
        presence_penalty=-1.5,
        frequency_penalty=0.1,
        repetition_penalty=1.3,
        logit_bias=((7, -100.0), (0, 0.5)),
        min_tokens=2,
        logprobs=0,
        prompt_logprobs=5,
    )
    values = {entry.name: getattr(options, entry.name) for entry in fields(SamplingParams)}
    assert all(value != getattr(SamplingParams(), name) for name, value in values.items()), "an option is untested"
    all_at_once = [options, *(SamplingParams(**{name: value}) for name, value in values.items())]
    admissions = tuple(
        Admission(group=0, request=Request(request_id=idx, prompt_ids=(1,), sampling=sampling))
        for idx, sampling in enumerate(all_at_once)
    )
    assert News.decode(News(admissions=admissions).encode()) == News(admissions=admissions)


def test_a_prompt_that_several_requests_share_is_sent_once() -> None:
    shared = tuple(range(10_000))
    prompts = [(1,), shared, shared, shared, (2,), shared, (1,)]
    news = News(
        admissions=tuple(
            Admission(group=idx % 2, request=Request(request_id=idx, prompt_ids=prompt))
            for idx, prompt in enumerate(prompts)
        )
    )
    data = news.encode()
    assert News.decode(data) == news
    assert data.count(b"9999") == 2


def test_the_empty_news_is_tiny() -> None:
    assert News().encode() == b"{}"
    assert News.decode(b"{}") == News()
    assert News.decode(News(end_of_input=True).encode()) == News(end_of_input=True)


def test_outputs_survive_the_wire() -> None:
    outputs = [
        StepOutput(request_id=1, token_ids=(4, 5)),
        StepOutput(request_id=2, token_ids=(), finish_reason="length"),
        StepOutput(
            request_id=3,
            token_ids=(4,),
            scores=(TokenScore(4, -0.1 - 2**-50, 1, ((4, -0.1 - 2**-50), (9, -9999.0))),),
        ),
        StepOutput(request_id=4, token_ids=(), prompt_scores=(TokenScore(0, -1e-300, 12), TokenScore(1, 0.0, 1))),
    ]
    assert decode_outputs(encode_outputs(outputs)) == outputs
    assert decode_outputs(encode_outputs([])) == []


def test_outputs_are_strict_json() -> None:
    for bad in (float("nan"), float("-inf")):
        with pytest.raises(ValueError, match="JSON"):
            encode_outputs([StepOutput(request_id=1, token_ids=(2,), scores=(TokenScore(2, bad, 1),))])


def test_the_dummy_writes_nowhere_and_belongs_to_nobody() -> None:
    dummy = Batch.dummy()
    assert dummy.num_tokens == dummy.num_seqs == len(dummy.logit_rows) == 1
    assert dummy.slots.tolist() == dummy.state_rows.tolist() == dummy.request_ids.tolist() == [-1]
    assert dummy.kv_lens.tolist() == [0]
    assert dummy.query_start.dtype == np.int32
