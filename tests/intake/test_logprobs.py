import json
from pathlib import Path

import pytest

from dist_infer.intake.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from dist_infer.intake.text import TextCodec, open_text
from dist_infer.types import LEAST_LOGPROB, TokenScore
from tests.intake.tiny_text import write_text_folder


@pytest.fixture
def text(tmp_path: Path) -> TextCodec:
    codec = open_text(write_text_folder(tmp_path))
    assert codec is not None
    return codec


def test_a_chat_tells_bytes_where_text_can_not(text: TextCodec) -> None:
    ids = text.encode_completion("日\U000fffff")
    scores = [TokenScore(token_id, -1.5, 2, ((5, -0.5), (token_id, -1.5))) for token_id in ids]
    content = chat_logprobs(scores, text)["content"]
    assert isinstance(content, list)
    assert bytes(byte for token in content for byte in token["bytes"]) == "日\U000fffff".encode()
    assert "\N{REPLACEMENT CHARACTER}" in [token["token"] for token in content]
    for token, token_id in zip(content, ids, strict=True):
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"} and token["logprob"] == -1.5
        assert [top["logprob"] for top in token["top_logprobs"]] == [-0.5, -1.5]
        assert token["top_logprobs"][1] == {key: token[key] for key in ("token", "logprob", "bytes")}
        assert token["top_logprobs"][0]["bytes"] == list(text.token_bytes(5)) or token_id == 5


def test_a_completion_tells_columns(text: TextCodec) -> None:
    first, second = text.encode_completion("a"), text.encode_completion(" the")
    scores = [TokenScore(first[0], -0.5, 1, ((first[0], -0.5),)), TokenScore(second[0], -7.0, 9, ((first[0], -0.1),))]
    told = completion_logprobs(scores, text)
    words = [text.token_bytes(first[0]).decode(), text.token_bytes(second[0]).decode()]
    assert told == {
        "tokens": words,
        "token_logprobs": [-0.5, -7.0],
        "top_logprobs": [{words[0]: -0.5}, {words[0]: -0.1, words[1]: -7.0}],
        "text_offset": [0, len(words[0])],
    }
    assert completion_logprobs([], text) == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def test_a_prompt_tells_ranks_and_nothing_for_its_first_token(text: TextCodec) -> None:
    scores = [
        TokenScore(8, -3.0, 40, ((5, -0.1),)),
        TokenScore(5, -0.2, 1, ((5, -0.2), (8, -2.0))),
        TokenScore(9, -1.0, 2),
    ]
    told = prompt_logprobs(scores, text)
    assert told[0] is None and len(told) == 4
    assert told[1] is not None and told[2] is not None and told[3] is not None
    assert told[1] == {
        "5": {"logprob": -0.1, "rank": 1, "decoded_token": text.token_bytes(5).decode()},
        "8": {"logprob": -3.0, "rank": 40, "decoded_token": text.token_bytes(8).decode()},
    }
    assert list(told[2]) == ["5", "8"] and list(told[3]) == ["9"]


def test_strict_json_and_ids_where_there_is_no_tokenizer() -> None:
    scores = [TokenScore(8, LEAST_LOGPROB, 400, ((5, 0.0), (8, LEAST_LOGPROB)))]
    for told in (chat_logprobs(scores, None), completion_logprobs(scores, None), prompt_logprobs(scores, None)):
        assert "token_id:8" in json.dumps(told, allow_nan=False)
