"""What travels keeps its content."""

import numpy as np

from dist_infer.types import (
    Admission,
    Batch,
    News,
    Request,
    SamplingParams,
    StepOutput,
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


def test_the_empty_news_is_tiny() -> None:
    assert News().encode() == b"{}"
    assert News.decode(b"{}") == News()
    assert News.decode(News(end_of_input=True).encode()) == News(end_of_input=True)


def test_outputs_survive_the_wire() -> None:
    outputs = [
        StepOutput(request_id=1, token_ids=(4, 5)),
        StepOutput(request_id=2, token_ids=(), finish_reason="length"),
    ]
    assert decode_outputs(encode_outputs(outputs)) == outputs
    assert decode_outputs(encode_outputs([])) == []


def test_the_dummy_writes_nowhere_and_belongs_to_nobody() -> None:
    dummy = Batch.dummy()
    assert dummy.num_tokens == dummy.num_seqs == len(dummy.logit_rows) == 1
    assert dummy.slots.tolist() == dummy.state_rows.tolist() == dummy.request_ids.tolist() == [-1]
    assert dummy.kv_lens.tolist() == [0]
    assert dummy.query_start.dtype == np.int32
