"""One request from its tokens to what its record tells: where it stops, what of it is shown."""

from pathlib import Path
from typing import Any

import pytest

from dist_infer.intake.open_request import OpenChoice, OpenRequest
from dist_infer.intake.protocol import ParsedRequest
from dist_infer.intake.records import Choice, Timings
from dist_infer.intake.sampling_fields import SamplingFields
from dist_infer.intake.text import TextCodec, open_text
from dist_infer.types import FinishReason, StepOutput, TokenScore
from tests.intake.tiny_text import write_text_folder

END = 1  # <|im_end|>, a special token


@pytest.fixture
def text(tmp_path: Path) -> TextCodec:
    codec = open_text(write_text_folder(tmp_path))
    assert codec is not None
    return codec


def open_one(text: TextCodec | None, **sampling: Any) -> OpenRequest:
    parsed = ParsedRequest(line=1, custom_id="a", endpoint="chat", sampling=SamplingFields(**sampling))
    return OpenRequest(parsed, prompt_len=3, created=0, text=text)


def feed(choice: OpenChoice, token_ids: tuple[int, ...], reason: FinishReason | None = None, step: int = 1) -> None:
    """A step for each `step` tokens; what comes after the end is not delivered."""
    parts = [token_ids[first : first + step] for first in range(0, len(token_ids), step)]
    for idx, part in enumerate(parts):
        last = reason if idx == len(parts) - 1 else None
        choice.take(StepOutput(request_id=0, token_ids=part, finish_reason=last))
        if choice.finish_reason is not None:
            return


def told(
    text: TextCodec, answer: str, reason: FinishReason | None = "length", step: int = 1, **sampling: Any
) -> Choice:
    (choice,) = open_one(text, **sampling).choices
    ids = tuple(token_id for char in answer for token_id in text.encode_completion(char))  # a token or more a character
    feed(choice, (*ids, END) if reason == "stop" else ids, reason, step)
    return choice.as_record()


def test_a_plain_end(text: TextCodec) -> None:
    assert told(text, "ab") == Choice(text="ab", finish_reason="length")
    assert told(text, "ab", "stop") == Choice(text="ab", finish_reason="stop")


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_stop_string_is_cut_wherever_its_tokens_end(text: TextCodec, step: int) -> None:
    due = Choice(text="x", finish_reason="stop", stop_reason="ab")
    assert told(text, "xabcab", stop=("q", "ab"), step=step) == due
    shown = told(text, "xabcab", stop=("ab",), include_stop=True, step=step)
    assert shown == Choice(text="xab", finish_reason="stop", stop_reason="ab")


def test_what_only_begins_like_a_stop_is_shown_at_the_end(text: TextCodec) -> None:
    assert told(text, "xaa", stop=("aab",)) == Choice(text="xaa", finish_reason="length")
    assert told(text, "xaa", "stop", stop=("aab",)) == Choice(text="xaa", finish_reason="stop")


def test_a_stop_string_within_min_tokens_does_not_count(text: TextCodec) -> None:
    """The first 4 tokens never end it; the fifth does, though its stop begins in the fourth."""
    (choice,) = open_one(text, stop=("\n", "cd"), min_tokens=4).choices
    for char in "a\nbc":
        choice.take(StepOutput(request_id=0, token_ids=text.encode_completion(char)))
        assert choice.finish_reason is None
    choice.take(StepOutput(request_id=0, token_ids=text.encode_completion("d")))
    assert choice.as_record() == Choice(text="a\nb", finish_reason="stop", stop_reason="cd")
    assert choice.num_tokens == 5


def test_a_stop_id_of_the_request_is_told_and_shown_on_demand(text: TextCodec) -> None:
    (letter,) = text.encode_completion("c")
    for include, shown in ((False, "ab"), (True, "abc")):
        (choice,) = open_one(text, stop_token_ids=(letter,), include_stop=include).choices
        feed(choice, (*text.encode_completion("a"), *text.encode_completion("b"), letter), "stop")
        assert choice.as_record() == Choice(text=shown, finish_reason="stop", stop_reason=letter)
        assert choice.num_tokens == 3


def test_special_tokens(text: TextCodec) -> None:
    ids = (*text.encode_completion("a"), 0, *text.encode_completion("b"), END)
    for skip, include, shown in (
        (True, True, "ab"),
        (False, False, "a<|im_start|>b"),
        (False, True, "a<|im_start|>b<|im_end|>"),
    ):
        (choice,) = open_one(text, skip_special_tokens=skip, include_stop=include).choices
        feed(choice, ids, "stop")
        assert choice.as_record().text == shown


def test_a_stop_that_is_complete_only_when_the_text_ends(text: TextCodec) -> None:
    """Half a character at the end is shown as U+FFFD, which a stop may ask for."""
    half = text.encode_completion("\U000fffff")[:1]
    (choice,) = open_one(text, stop=("\N{REPLACEMENT CHARACTER}",)).choices
    feed(choice, (*text.encode_completion("a"), *half), "length")
    assert choice.as_record() == Choice(text="a", finish_reason="stop", stop_reason="\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("step", [1, 3])
def test_one_score_for_each_token(text: TextCodec, step: int) -> None:
    (choice,) = open_one(text, stop=("b",), logprobs=0).choices
    ids = tuple(token_id for char in "xab" for token_id in text.encode_completion(char))
    for first in range(0, len(ids), step):
        part = ids[first : first + step]
        scores = tuple(TokenScore(token_id, -float(token_id), 1) for token_id in part)
        choice.take(StepOutput(request_id=0, token_ids=part, scores=scores))
    record = choice.as_record()
    assert record.logprobs is not None and isinstance(record.logprobs["content"], list)
    assert [entry["logprob"] for entry in record.logprobs["content"]] == [-float(token_id) for token_id in ids]
    assert choice.num_tokens == len(ids)


def test_scores_of_the_prompt_come_in_parts(text: TextCodec) -> None:
    request = open_one(text, n=2, prompt_logprobs=0)
    first, second = request.choices
    first.take(StepOutput(request_id=0, token_ids=(), prompt_scores=(TokenScore(5, -1.0, 2),)))
    first.take(StepOutput(request_id=0, token_ids=(7,), prompt_scores=(TokenScore(6, -2.0, 3),)))
    feed(first, (8,), "length")
    with pytest.raises(ValueError, match="not ended"):
        request.answer(0.0)
    feed(second, (8, 9), "length")
    assert request.complete
    answer = request.answer(0.0)
    assert answer.completion_len == 4 and answer.prompt_len == 3
    assert answer.prompt_logprobs is not None
    assert [None if entry is None else list(entry) for entry in answer.prompt_logprobs] == [None, ["5"], ["6"]]


def test_a_choice_that_goes_on_has_no_record(text: TextCodec) -> None:
    with pytest.raises(ValueError, match="not ended"):
        open_one(text).choices[0].as_record()


def test_times_count_from_the_reading_of_the_line() -> None:
    parsed = ParsedRequest(line=1, custom_id="a", endpoint="completion", sampling=SamplingFields(n=2))
    request = OpenRequest(parsed, prompt_len=3, created=0, text=None, read_s=100.0)
    request.saw_tokens(102.0)
    request.saw_tokens(103.0)
    for choice in request.choices:
        feed(choice, (4, 5), "length")
    assert request.answer(107.5).timings == Timings(first_token_s=2.0, total_s=7.5)
