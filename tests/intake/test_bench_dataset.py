import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_infer.config import SchedulerConfig
from dist_infer.errors import UsageError
from dist_infer.intake.bench_dataset import FileReader, RandomLengths, random_requests, warmup_requests
from dist_infer.intake.text import TextCodec, open_text
from dist_infer.intake.validate import RequestLimits
from dist_infer.scheduler import check_fits
from tests.intake.tiny_text import write_text_folder

CONFIG = SchedulerConfig(
    max_model_len=3000, max_num_seqs=4, max_num_tokens=64, block_size=16, num_kv_blocks=200, prefix_cache=True
)
LIMITS = RequestLimits(vocab_size=402, max_model_len=3000, check_fits=lambda request: check_fits(request, CONFIG))
Read = Callable[..., Any]


@pytest.fixture
def text(tmp_path: Path) -> TextCodec:
    codec = open_text(write_text_folder(tmp_path))
    assert codec is not None
    return codec


def reader(text: TextCodec | None, **changes: Any) -> FileReader:
    fields: dict[str, Any] = {"text": text, "limits": LIMITS, "eos_token_ids": (1,), "seed": 3}
    return FileReader(**fields | changes)


def write(folder: Path, content: str) -> Path:
    path = folder / "data"
    path.write_text(content)
    return path


def turns(*texts: str) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": text} for text in texts]}


@pytest.mark.parametrize(("spread", "prefix_len"), [(0.0, 0), (0.5, 0), (0.25, 7)])
def test_random_lengths(spread: float, prefix_len: int) -> None:
    lengths = RandomLengths(input_len=100, output_len=20, spread=spread, shared_prefix_len=prefix_len)
    requests = random_requests(lengths, first_id=5, count=300, vocab_size=50, random=np.random.default_rng(0))
    assert [request.request_id for request in requests] == list(range(5, 305))
    input_lens = [len(request.prompt_ids) - prefix_len for request in requests]
    output_lens = [request.sampling.max_tokens for request in requests]
    for lens, mean in ((input_lens, 100), (output_lens, 20)):
        assert min(lens) >= mean * (1 - spread) and max(lens) <= mean * (1 + spread)
        assert np.mean(lens) == pytest.approx(mean, rel=0.1)
        assert len(set(lens)) > 5 or not spread
    assert len({request.prompt_ids[:prefix_len] for request in requests}) == 1
    assert len({request.prompt_ids for request in requests}) == 300
    ids = {token_id for request in requests for token_id in request.prompt_ids}
    assert ids == set(range(50))
    assert all(request.sampling.temperature == 0 and not request.sampling.stop_token_ids for request in requests)


def test_a_length_is_never_zero() -> None:
    lengths = RandomLengths(input_len=1, output_len=1, spread=0.9)
    requests = random_requests(lengths, first_id=0, count=50, vocab_size=9, random=np.random.default_rng(0))
    assert min(len(request.prompt_ids) for request in requests) == 1


def test_lines_keep_their_options(text: TextCodec, tmp_path: Path) -> None:
    chat = {"role": "user", "content": "hi"}
    lines = [
        {"task_id": 1, "input_ids": [3, 4, 5], "output_tokens": 6},
        {"prompt": "hello you", "max_tokens": 7, "temperature": 0.5, "n": 2},
        {"custom_id": "c", "url": "/v1/chat/completions", "method": "POST", "body": {"messages": [chat]}},
    ]
    path = write(tmp_path, "\n" + "\n".join(json.dumps(line) for line in lines))
    requests = reader(text).read(path, first_id=4, count=None)
    assert [request.request_id for request in requests] == [4, 5, 6, 7]
    assert [request.sampling.max_tokens for request in requests][:3] == [6, 7, 7]
    assert (requests[0].prompt_ids, requests[0].sampling.stop_token_ids) == ((3, 4, 5), ())
    assert requests[1].sampling.temperature == 0.5 and requests[1].sampling.stop_token_ids == (1,)
    assert [request.request_id for request in reader(text).read(path, first_id=0, count=2)] == [0, 1]


def test_sharegpt(text: TextCodec, tmp_path: Path) -> None:
    long = "many words here " * 400
    entries = [
        turns("tell me a tale", "once upon a time there was"),
        turns("only a question of mine"),
        turns("x", "an answer that is long enough"),
        turns("what is it then", "no"),
        turns(long, "once upon a time there was"),
        turns("and what about you?", long),
        {"conversations": [{"value": 5}, {"value": "a"}]},
        "rubbish",
        turns("which one is the best", "the first one, I should think", "and a third turn"),
    ]
    path = write(tmp_path, json.dumps(entries))
    requests = reader(text).read(path, first_id=0, count=None)
    expected = {
        text.encode_completion(prompt): len(text.encode_completion(answer))
        for prompt, answer in (
            ("tell me a tale", "once upon a time there was"),
            ("which one is the best", "the first one, I should think"),
        )
    }
    assert {request.prompt_ids: request.sampling.max_tokens for request in requests} == expected
    assert [request.request_id for request in requests] == [0, 1]
    fixed = reader(text, output_len=9).read(path, first_id=0, count=None)
    assert {request.sampling.max_tokens for request in fixed} == {9}
    assert len(fixed) == 4, "answers of any length serve now"
    orders = {reader(text, seed=seed).read(path, first_id=0, count=1)[0].prompt_ids for seed in range(20)}
    assert orders == set(expected)


def test_warm_up_is_as_long_but_other(text: TextCodec) -> None:
    lengths = RandomLengths(input_len=30, output_len=5, spread=0.5)
    measured = random_requests(lengths, first_id=3, count=2, vocab_size=40, random=np.random.default_rng(0))
    warmup = warmup_requests(measured, count=3, vocab_size=40, seed=9)
    assert [request.request_id for request in warmup] == [0, 1, 2]
    for idx, request in enumerate(warmup):
        like = measured[idx % 2]
        assert len(request.prompt_ids) == len(like.prompt_ids) and request.sampling == like.sampling
        assert request.prompt_ids != like.prompt_ids


@pytest.mark.parametrize(
    ("content", "count", "message"),
    [
        ('{"prompt": [1], "max_tokens": 2}\n{broken', None, "line 2: not JSON"),
        ('{"prompt": [500]}', None, "line 1: prompt holds token id 500"),
        ('{"prompt": "text"}', None, "no tokenizer.json"),
        ('[{"conversations": [{"value": "text"}, {"value": "more"}]}]', None, "no tokenizer.json"),
        ('{"prompt": [1], "max_tokens": 2}', 5, "has 1 usable requests, --num-prompts asks for 5"),
        ("", None, "has 0 usable requests"),
        ("[[]]", None, "has 0 usable requests"),
        ("[1,", None, "no JSON array of conversations"),
    ],
)
def test_files_that_do_not_serve(tmp_path: Path, content: str, count: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        reader(None).read(write(tmp_path, content), first_id=0, count=count)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        reader(None).read(tmp_path / "none", first_id=0, count=None)


def test_lines_have_lengths_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": [1], "max_tokens": 2}')
    with pytest.raises(UsageError, match="says itself how long its answers are"):
        reader(None, output_len=4).read(path, first_id=0, count=None)
