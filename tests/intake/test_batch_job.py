import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dist_infer.dispatcher import Frontend
from dist_infer.errors import ExitCode, RequestError
from dist_infer.intake.batch_job import BatchJob
from dist_infer.intake.job_files import FileOptions, JobFiles
from dist_infer.intake.text import open_text
from dist_infer.intake.validate import RequestLimits
from dist_infer.log import ProgressView
from dist_infer.types import FinishReason, Request, StepOutput, TokenScore
from tests.intake.tiny_text import write_text_folder

END = 1  # <|im_end|>
NUM_IDS = 500


def fits(request: Request) -> None:
    if len(request.prompt_ids) + request.sampling.max_tokens > 400:
        raise RequestError("it never fits", param="max_tokens")


def _text(line: object) -> str:
    return line if isinstance(line, str) else json.dumps(line)


class Desk:
    """A batch job over files in a folder, fed by hand."""

    def __init__(
        self, folder: Path, lines: Sequence[object], *, tokenizer: bool = True, progress: ProgressView | None = None
    ) -> None:
        data = [line if isinstance(line, bytes) else _text(line).encode() for line in lines]
        (folder / "in.jsonl").write_bytes(b"\n".join(data))
        self.out = folder / "out.jsonl"
        self.now_s = 100.0
        files = JobFiles.open(FileOptions(input_path=str(folder / "in.jsonl"), output_path=str(self.out), seed=0))
        files.begin({})
        if tokenizer:
            write_text_folder(folder)
        self.text = open_text(folder)
        self.job = BatchJob(
            lines=files.lines,
            answers=files.answers,
            text=self.text,
            limits=RequestLimits(vocab_size=NUM_IDS, max_model_len=300, check_fits=fits),
            eos_token_ids=(END,),
            model_name="tiny",
            run_seed=0,
            progress=progress,
            now=lambda: 1700000000.9,
            clock=lambda: self.now_s,
        )

    def ids(self, text: str) -> tuple[int, ...]:
        assert self.text is not None
        return self.text.encode_completion(text)

    def records(self) -> dict[str, Any]:
        """Records by custom_id, in the order of the file."""
        lines = self.out.read_bytes().splitlines() if self.out.exists() else []
        values = [json.loads(line, parse_constant=pytest.fail) for line in lines]
        return {value["custom_id"]: value for value in values}

    def choice(self, custom_id: str) -> dict[str, Any]:
        choice: dict[str, Any] = self.records()[custom_id]["response"]["body"]["choices"][0]
        return choice


def finish(job: BatchJob, request: Request, token_ids: tuple[int, ...], reason: FinishReason = "length") -> None:
    job.deliver(StepOutput(request_id=request.request_id, token_ids=token_ids, finish_reason=reason))


def test_it_is_a_frontend(tmp_path: Path) -> None:
    frontend: Frontend = Desk(tmp_path, []).job
    incoming = frontend.poll(5)
    assert incoming.end_of_input and not incoming.requests
    assert frontend.exhausted and frontend.exit_code is ExitCode.DONE and not frontend.ready()
    frontend.close()
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_completion_from_line_to_record(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [{"prompt": "Once upon", "max_tokens": 20, "custom_id": "a", "return_token_ids": True}])
    (request,) = desk.job.poll(8).requests
    assert request.prompt_ids == desk.ids("Once upon")
    assert request.sampling.stop_token_ids == (END,)
    answer = desk.ids(" a 🙂time")
    desk.now_s = 102.5
    for token_id in answer:
        desk.job.deliver(StepOutput(request_id=request.request_id, token_ids=(token_id,)))
        desk.now_s = 107.5
    assert desk.records() == {}
    finish(desk.job, request, (END,), "stop")
    assert desk.choice("a") == {
        "index": 0,
        "text": " a 🙂time",
        "finish_reason": "stop",
        "logprobs": None,
        "token_ids": [*answer, END],
    }
    body = desk.records()["a"]["response"]["body"]
    assert body["usage"]["completion_tokens"] == len(answer) + 1
    assert body["usage"]["prompt_tokens"] == len(request.prompt_ids)
    assert (body["created"], body["model"]) == (1700000000, "tiny")
    assert body["timings"] == {"first_token_s": 2.5, "total_s": 7.5}
    assert desk.job.num_output_tokens == len(answer) + 1


def test_a_chat_goes_through_the_template(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    desk = Desk(tmp_path, [{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}])
    (request,) = desk.job.poll(8).requests
    assert request.prompt_ids == desk.ids("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert request.sampling.max_tokens == 300 - len(request.prompt_ids)
    finish(desk.job, request, desk.ids("Hello"))
    assert desk.choice("a")["message"] == {"role": "assistant", "content": "Hello"}
    assert "token_ids" not in desk.choice("a")


def test_a_stop_token_that_is_no_special_one_is_no_part_of_the_text(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [{"prompt": [5]}])
    (request,) = desk.job.poll(8).requests
    finish(desk.job, request, desk.ids("ab"), "stop")
    assert desk.choice("line-1")["text"] == desk.text.open_detokenizer().push(desk.ids("ab")[:-1])  # type: ignore[union-attr]


def test_half_a_character_at_the_end_is_shown_as_such(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [{"prompt": [5]}])
    (request,) = desk.job.poll(8).requests
    first_byte = desk.ids("\U000fffff")[0]
    desk.job.deliver(StepOutput(request_id=request.request_id, token_ids=(first_byte,)))
    finish(desk.job, request, ())
    assert desk.choice("line-1")["text"] == "\N{REPLACEMENT CHARACTER}"


def test_no_more_lines_are_read_than_there_is_room_for(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [{"prompt": [1]}] * 10)
    assert not desk.job.poll(0).requests
    assert desk.job.num_lines == 0 and desk.job.ready()
    first = desk.job.poll(4)
    assert [request.request_id for request in first.requests] == [0, 1, 2, 3]
    assert desk.job.num_lines == 4 and not first.end_of_input
    rest = desk.job.poll(6)
    assert [request.request_id for request in rest.requests] == [4, 5, 6, 7, 8, 9]
    assert rest.end_of_input and not desk.job.ready()
    assert len(desk.records()) == 0
    for request in (*first.requests, *rest.requests):
        finish(desk.job, request, (7,))
    assert desk.job.exhausted and desk.job.num_done == 10 and desk.job.num_failed == 0
    assert desk.job.exit_code is ExitCode.DONE


def test_a_bad_line_is_answered_at_once_and_costs_nothing_else(tmp_path: Path) -> None:
    lines: list[object] = [
        {"prompt": [1], "custom_id": "good"},
        "{broken",
        {"prompt": "x", "n": 400, "custom_id": "n"},
        {"prompt": [NUM_IDS], "custom_id": "vocabulary"},
        {"prompt": "", "custom_id": "empty"},
        {"prompt": [1], "max_tokens": 4000, "custom_id": "long"},
        {"messages": [{"role": "user", "content": ""}], "max_tokens": 4000, "custom_id": "chat"},
        {"prompt": [2], "custom_id": "also good"},
    ]
    desk = Desk(tmp_path, lines)
    incoming = desk.job.poll(100)
    assert [request.prompt_ids for request in incoming.requests] == [(1,), (2,)]
    assert [request.request_id for request in incoming.requests] == [0, 1]
    records = desk.records()
    assert list(records) == ["line-2", "n", "vocabulary", "empty", "long", "chat"]
    assert {record["response"]["status_code"] for record in records.values()} == {400}
    params = [record["response"]["body"]["error"]["param"] for record in records.values()]
    assert params == [None, "n", "prompt", "prompt", "max_tokens", "max_tokens"]
    for request in incoming.requests:
        finish(desk.job, request, (7,))
    assert len(desk.records()) == 8
    assert desk.job.exit_code is ExitCode.FAILED_REQUESTS
    assert (desk.job.num_done, desk.job.num_failed) == (8, 6)


def test_a_line_of_broken_bytes_is_answered(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [b"\xff"])
    assert desk.job.poll(9).end_of_input
    assert desk.records()["line-1"]["response"]["body"]["error"]["code"] == "invalid_encoding"


def test_a_model_without_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    desk = Desk(tmp_path, [{"prompt": "text"}, {"prompt": [4, 5]}, chat], tokenizer=False)
    (request,) = desk.job.poll(9).requests
    finish(desk.job, request, (7, 8))
    assert desk.choice("line-2")["text"] == ""
    assert desk.choice("line-2")["token_ids"] == [7, 8]
    for custom_id, param in (("line-1", "prompt"), ("line-3", "messages")):
        error = desk.records()[custom_id]["response"]["body"]["error"]
        assert (error["param"], error["code"]) == (param, "no_tokenizer")
        assert "tokenizer.json" in error["message"]


def test_open_requests_are_answered_when_the_job_fails(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [{"prompt": [1]}, {"prompt": [2]}, {"prompt": [3]}])
    first, second = desk.job.poll(2).requests
    finish(desk.job, first, (7,))
    desk.job.fail_open("rank 1 died")
    desk.job.fail_open("rank 1 died")
    assert list(desk.records()) == ["line-1", "line-2"]
    assert desk.records()["line-2"]["error"]["message"] == "rank 1 died"
    finish(desk.job, second, (7,))  # what is still under way then is dropped
    assert len(desk.records()) == 2
    assert desk.job.exit_code is ExitCode.FAILED_REQUESTS


def test_a_request_that_is_given_back_gets_no_record(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [{"prompt": [1]}, {"prompt": [2]}])
    first, _ = desk.job.poll(2).requests
    finish(desk.job, first, (), "abort")
    desk.job.close()
    assert desk.records() == {}
    assert not desk.job.exhausted


def test_closed_before_the_end_of_the_input_it_is_not_exhausted(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [{"prompt": [1]}, {"prompt": [2]}])
    (request,) = desk.job.poll(1).requests
    finish(desk.job, request, (7,))
    desk.job.close()
    assert not desk.job.exhausted


def test_a_drained_job_reads_nothing_more(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ["{broken"])
    assert not desk.job.poll(0).end_of_input
    assert desk.records() == {}


def test_progress_is_shown_at_each_poll_and_at_the_end(tmp_path: Path) -> None:
    shown: list[dict[str, int]] = []

    class View:
        def update(self, *, done: int, failed: int, known: int, all_known: bool, output_tokens: int) -> None:
            counts = {"done": done, "failed": failed, "known": known, "all": all_known, "tokens": output_tokens}
            shown.append(counts)

        def close(self) -> None:
            pass

    desk = Desk(tmp_path, [{"prompt": [1]}, "{broken"], progress=View())
    (request,) = desk.job.poll(1).requests
    assert shown == [{"done": 0, "failed": 0, "known": 1, "all": False, "tokens": 0}]
    desk.job.poll(1)
    finish(desk.job, request, (7, 8))
    desk.job.close()
    assert shown[1:] == [
        {"done": 1, "failed": 1, "known": 2, "all": True, "tokens": 0},
        {"done": 2, "failed": 1, "known": 2, "all": True, "tokens": 2},
    ]


def any_line(st: Any) -> Any:
    """A hypothesis strategy: lines of JSON that resemble requests more or less, and lines of bytes."""
    names = ["prompt", "messages", "max_tokens", "temperature", "top_k", "top_p", "seed", "n", "stop", "model"]
    names += ["custom_id", "method", "url", "body", "ignore_eos", "return_token_ids", "role", "content"]
    names += ["min_p", "presence_penalty", "repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "min_tokens"]
    names += ["prompt_logprobs", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"]
    urls = ["/v1/completions", "/v1/chat/completions"]
    words = st.sampled_from(["POST", "user", "\ud800", *urls])
    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(-3, 600), st.integers(), st.floats(), st.text(max_size=8), words
    )
    values = st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(names), inner, max_size=4)
        ),
        max_leaves=12,
    )
    objects = st.dictionaries(st.one_of(st.sampled_from(names), st.text(max_size=4)), values, max_size=6)
    prompt = st.one_of(st.text(max_size=9), st.lists(st.integers(0, 510), max_size=4), values)
    options = {
        "max_tokens": st.integers(0, 3),
        "top_k": values,
        "n": st.integers(1, 4),
        "stop": st.sampled_from(["a", ["b", "\n"], "7"]),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 3),
        "logit_bias": st.dictionaries(st.sampled_from(["0", "7", "499"]), st.floats(-100, 100), max_size=2),
        "min_tokens": st.integers(0, 2),
        "repetition_penalty": st.floats(0.01, 2),
        "skip_special_tokens": st.booleans(),
    }
    completions = st.fixed_dictionaries({"prompt": prompt}, optional=options)
    message = st.fixed_dictionaries({"role": words, "content": prompt})
    chats = st.fixed_dictionaries({"messages": st.lists(st.one_of(message, values), max_size=3)})
    envelopes = st.fixed_dictionaries(
        {
            "custom_id": st.one_of(st.text(max_size=5), values),
            "method": st.just("POST"),
            "url": st.sampled_from(urls),
            "body": st.one_of(completions, chats, objects),
        }
    )
    as_json = st.one_of(objects, completions, completions, chats, envelopes).map(
        lambda value: json.dumps(value).encode()
    )
    as_bytes = st.binary(max_size=40).map(lambda data: data.replace(b"\n", b""))
    return st.one_of(as_json, as_json, as_json, as_bytes)


def any_output(request: Request) -> StepOutput:
    """Two tokens that end a request, with all scores that it asks for."""
    asked, tokens = request.sampling, (7, END)

    def scores(num_top: int | None, token_ids: tuple[int, ...]) -> tuple[TokenScore, ...]:
        if num_top is None:
            return ()
        return tuple(TokenScore(token, -9999.0, 3, ((token, -0.5), (499, -1.0))[:num_top]) for token in token_ids)

    return StepOutput(
        request_id=request.request_id,
        token_ids=tokens,
        finish_reason="stop",
        scores=scores(asked.logprobs, tokens),
        prompt_scores=scores(asked.prompt_logprobs, request.prompt_ids[1:]),
    )


def test_n_answers_are_one_record_in_their_order(tmp_path: Path) -> None:
    """Their requests end in any order, and the prompt counts once."""
    desk = Desk(tmp_path, [{"prompt": "Once", "n": 3, "max_tokens": 5}, {"prompt": [4]}])
    first, second, third = desk.job.poll(1).requests
    assert [request.request_id for request in (first, second, third)] == [0, 1, 2], "a line is never cut in two"
    finish(desk.job, third, desk.ids("c"))
    finish(desk.job, first, (*desk.ids("a"), END), "stop")
    assert desk.records() == {} and not desk.job.exhausted
    finish(desk.job, second, desk.ids("b"))
    body = desk.records()["line-1"]["response"]["body"]
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "b"), (2, "c")]
    assert body["usage"] == {
        "prompt_tokens": len(first.prompt_ids),
        "completion_tokens": 4,
        "total_tokens": 4 + len(first.prompt_ids),
    }
    assert (desk.job.num_done, desk.job.num_output_tokens) == (1, 4)
    (last,) = desk.job.poll(1).requests
    assert last.request_id == 3


def test_a_line_of_several_answers_fails_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [{"prompt": [1], "n": 3}])
    first, *_ = desk.job.poll(9).requests
    finish(desk.job, first, (7,))
    desk.job.fail_open("rank 1 died")
    assert len(desk.out.read_bytes().splitlines()) == desk.job.num_failed == 1


def test_a_stop_string_ends_the_request_here_and_then_in_the_pool(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [{"prompt": "x", "stop": "ab", "max_tokens": 50}, {"prompt": [3]}])
    request, _ = desk.job.poll(9).requests
    for text in ("x", "a"):
        desk.job.deliver(StepOutput(request_id=request.request_id, token_ids=desk.ids(text)))
    assert not desk.job.poll(0).aborts
    desk.job.deliver(StepOutput(request_id=request.request_id, token_ids=desk.ids("b")))
    choice = desk.choice("line-1")
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("x", "stop", "ab")
    desk.job.deliver(StepOutput(request_id=request.request_id, token_ids=desk.ids("c")))  # still under way
    assert list(desk.job.poll(0).aborts) == [request.request_id]
    assert not desk.job.poll(0).aborts
    assert desk.records()["line-1"]["response"]["body"]["usage"]["completion_tokens"] == 3


def test_a_stop_string_needs_a_tokenizer(tmp_path: Path) -> None:
    desk = Desk(
        tmp_path, [{"prompt": [4], "stop": "x"}, {"prompt": [4], "stop_token_ids": [5], "logprobs": 1}], tokenizer=False
    )
    (request,) = desk.job.poll(9).requests
    desk.job.deliver(any_output(request))
    assert desk.records()["line-1"]["response"]["body"]["error"]["code"] == "no_tokenizer"
    assert desk.choice("line-2")["logprobs"]["tokens"] == ["token_id:7", f"token_id:{END}"]


def test_any_lines_give_one_record_each(tmp_path: Path) -> None:
    """No crash, a strict JSON record for each line that is not blank, and the good ones are served."""
    hypothesis = pytest.importorskip("hypothesis")
    st = pytest.importorskip("hypothesis.strategies")
    folders = iter(range(10**6))
    num_served = num_refused = 0

    @hypothesis.settings(max_examples=220, deadline=None, database=None, derandomize=True)  # type: ignore[untyped-decorator]
    @hypothesis.given(st.lists(any_line(st), min_size=8, max_size=16))  # type: ignore[untyped-decorator]
    def serve(lines: list[bytes]) -> None:
        nonlocal num_served, num_refused
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        desk = Desk(folder, lines)
        requests = [*desk.job.poll(3).requests, *desk.job.poll(100).requests]
        for request in requests:
            fits(request)
            assert all(0 <= token_id < NUM_IDS for token_id in request.prompt_ids)
            desk.job.deliver(any_output(request))
        assert desk.job.exhausted
        desk.job.close()
        records = [json.loads(record, parse_constant=pytest.fail) for record in desk.out.read_bytes().splitlines()]
        first_is_bom = bool(lines) and lines[0] == b"\xef\xbb\xbf"
        assert len(records) == sum(bool(data.strip()) for data in lines) - first_is_bom
        served = [record for record in records if record["response"]["status_code"] == 200]
        assert sum(len(record["response"]["body"]["choices"]) for record in served) == len(requests)
        num_served += len(served)
        num_refused += len(records) - len(served)

    serve()
    assert num_served > 50 and num_refused > 50, "the lines are all alike: nothing was tested"
    assert num_served + num_refused >= 2000
