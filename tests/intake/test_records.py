import json
from dataclasses import replace
from typing import Any

from dist_infer.errors import RequestError
from dist_infer.intake.records import Answer, Choice, Failure, Outcome, Refusal, Timings, encode_record

ANSWER = Answer(
    line=4,
    custom_id="a",
    endpoint="chat",
    choices=(Choice(text="Hi\n🙂", finish_reason="stop"),),
    prompt_len=3,
    completion_len=2,
    created=17,
)


def record(outcome: Outcome) -> dict[str, Any]:
    data = encode_record(outcome, model="m")
    assert data.endswith(b"\n") and data.count(b"\n") == 1
    value: dict[str, Any] = json.loads(data.decode("utf-8"))
    return value


def test_chat() -> None:
    assert record(ANSWER) == {
        "id": "batch_req_4",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "req_4",
            "body": {
                "id": "chatcmpl-4",
                "object": "chat.completion",
                "created": 17,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Hi\n🙂"},
                        "finish_reason": "stop",
                        "logprobs": None,
                    }
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            },
        },
        "error": None,
    }


def test_completion_with_token_ids() -> None:
    answer = Answer(
        line=4,
        custom_id="a",
        endpoint="completion",
        choices=(Choice(text="", finish_reason="length", token_ids=()),),
        prompt_len=1,
        completion_len=0,
        created=0,
    )
    body = record(answer)["response"]["body"]
    assert (body["id"], body["object"]) == ("cmpl-4", "text_completion")
    assert body["choices"] == [{"index": 0, "text": "", "finish_reason": "length", "logprobs": None, "token_ids": []}]


def test_choices_have_their_own_index_and_the_prompt_counts_once() -> None:
    choices = (Choice(text="a", finish_reason="stop", stop_reason="\n"), Choice(text="b", finish_reason="length"))
    body = record(replace(ANSWER, choices=choices, completion_len=7))["response"]["body"]
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [(0, "a"), (1, "b")]
    assert body["choices"][0]["stop_reason"] == "\n" and "stop_reason" not in body["choices"][1]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}


def test_logprobs_stand_where_clients_look() -> None:
    choice = Choice(text="a", finish_reason="stop", logprobs={"content": []})
    scores: list[dict[str, object] | None] = [None, {"5": {"logprob": -1.0, "rank": 1, "decoded_token": "x"}}]
    chat = record(replace(ANSWER, choices=(choice,), prompt_logprobs=scores))["response"]["body"]
    assert chat["choices"][0]["logprobs"] == {"content": []}
    assert chat["prompt_logprobs"] == scores and "prompt_logprobs" not in chat["choices"][0]
    completion = replace(ANSWER, endpoint="completion", choices=(choice,), prompt_logprobs=scores)
    body = record(completion)["response"]["body"]
    assert body["choices"][0]["prompt_logprobs"] == scores and "prompt_logprobs" not in body


def test_refusal_has_a_status_and_an_error_body() -> None:
    error = RequestError("too many", param="n", code="unsupported_parameter", status=422)
    assert record(Refusal(line=5, custom_id="line-5", error=error)) == {
        "id": "batch_req_5",
        "custom_id": "line-5",
        "response": {
            "status_code": 422,
            "request_id": "req_5",
            "body": {
                "error": {
                    "message": "too many",
                    "type": "invalid_request_error",
                    "param": "n",
                    "code": "unsupported_parameter",
                }
            },
        },
        "error": None,
    }


def test_failure_has_no_response() -> None:
    failed = record(Failure(line=5, custom_id="b", message="rank 1 died"))
    assert failed["response"] is None
    assert failed["error"] == {"code": "job_failed", "message": "rank 1 died"}


def test_half_a_surrogate_pair_in_a_field_name_stays_strict_json() -> None:
    refused = record(Refusal(line=1, custom_id="line-1", error=RequestError("x", param="\ud800\n")))
    assert refused["response"]["body"]["error"]["param"] == "\ud800\n"


def test_timings_stand_beside_the_usage() -> None:
    assert "timings" not in record(ANSWER)["response"]["body"]
    timed = replace(ANSWER, timings=Timings(first_token_s=0.12345678, total_s=2.0))
    assert record(timed)["response"]["body"]["timings"] == {"first_token_s": 0.123457, "total_s": 2.0}
