"""`make demo`: two MPI ranks answer three prompts with the default model, in float32, and the tokens are compared.

The oracle in tests/data was made by llama.cpp (make_oracle.py). Exit code 0 only if every rank held no more than its
share of the model and every token id is the oracle's. With --model a checkpoint of your own answers instead, and there
is nothing to compare with.
"""

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dist_infer.errors import DistInferError
from dist_infer.launch import mpirun

ORACLE = Path(__file__).parent / "data" / "smollm2_oracle.json"
NUM_RANKS = 2
NUM_PROMPTS = 3
MAX_SHARE = 0.6  # of the model's bytes, on each of the two ranks
TIMEOUT_S = 600.0
# What rank 0 logs for each rank when the worker is ready.
READY = re.compile(
    r"ready rank=(?P<rank>\d+) host=(?P<host>\S+) pid=(?P<pid>\d+) device=(?P<device>\S+)"
    r" parameter_bytes=(?P<parameter_bytes>\d+) copied_bytes=(?P<copied_bytes>\d+) model_bytes=(?P<model_bytes>\d+)"
)


class DemoError(Exception):
    """What did not hold."""


@dataclass(frozen=True, slots=True)
class ReadyRank:
    """One line of READY."""

    rank: int
    host: str
    pid: int
    device: str
    parameter_bytes: int
    copied_bytes: int
    model_bytes: int

    @property
    def share(self) -> float:
        """Part of the model that the rank holds; what it holds in two forms counts once."""
        return (self.parameter_bytes - self.copied_bytes) / self.model_bytes


def read_ready(log: str) -> list[ReadyRank]:
    """The ready lines in the ranks' output, by rank."""
    found = [
        ReadyRank(
            rank=int(match["rank"]),
            host=match["host"],
            pid=int(match["pid"]),
            device=match["device"],
            parameter_bytes=int(match["parameter_bytes"]),
            copied_bytes=int(match["copied_bytes"]),
            model_bytes=int(match["model_bytes"]),
        )
        for match in READY.finditer(log)
    ]
    return sorted(found, key=lambda ready: ready.rank)


def batch_lines(prompts: list[dict[str, Any]]) -> str:
    """The oracle's prompts as a batch file in OpenAI form."""
    lines = []
    for idx, prompt in enumerate(prompts):
        is_chat = prompt["kind"] == "chat"
        content = (
            {"messages": [{"role": "user", "content": prompt["input"]}]} if is_chat else {"prompt": prompt["input"]}
        )
        body = content | {"max_tokens": len(prompt["token_ids"]), "temperature": 0, "return_token_ids": True}
        url = "/v1/chat/completions" if is_chat else "/v1/completions"
        lines.append(json.dumps({"custom_id": str(idx), "method": "POST", "url": url, "body": body}))
    return "\n".join(lines) + "\n"


def read_choices(path: Path, num_prompts: int) -> list[dict[str, Any]]:
    """The first choice of each answer, in the order of the prompts."""
    records = {record["custom_id"]: record for record in map(json.loads, path.read_text().splitlines())}
    choices = []
    for idx in range(num_prompts):
        response = records.get(str(idx), {}).get("response")
        if response is None or response["status_code"] != 200:
            raise DemoError(f"prompt {idx} was not answered: {records.get(str(idx))}")
        choices.append(response["body"]["choices"][0])
    return choices


def run_job(folder: Path, prompts: list[dict[str, Any]], model: str | None) -> tuple[list[dict[str, Any]], str]:
    """The choices and the log of one `dist-infer run` on two ranks."""
    (folder / "prompts.jsonl").write_text(batch_lines(prompts))
    program = [str(Path(sys.executable).parent / "dist-infer"), "run", "--dtype", "float32", "--tp", str(NUM_RANKS)]
    program += ["-i", str(folder / "prompts.jsonl"), "-o", str(folder / "answers.jsonl")]
    program += ["--model", model] if model else []
    one_thread = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}  # two ranks may share two cores with others
    command = mpirun.command(NUM_RANKS, program, launcher=mpirun.find_launcher(), extra_env=one_thread)
    print("$", shlex.join(command.argv), flush=True)
    finished = mpirun.run(command, timeout_s=TIMEOUT_S, capture=True)
    if finished.returncode != 0:
        raise DemoError(f"the ranks ended with code {finished.returncode}:\n{finished.output}")
    return read_choices(folder / "answers.jsonl", len(prompts)), finished.output


def show_answers(prompts: list[dict[str, Any]], choices: list[dict[str, Any]]) -> None:
    """Each prompt with its answer."""
    for prompt, choice in zip(prompts, choices, strict=True):
        text = choice["message"]["content"] if prompt["kind"] == "chat" else choice["text"]
        print(f"\n> {prompt['input']}\n{text}")


def show_ranks(ranks: list[ReadyRank]) -> None:
    """The table of ranks."""
    table = Table("rank", "host", "pid", "device", "parameter bytes", "of the model")
    for ready in ranks:
        size = f"{ready.parameter_bytes:,}"
        table.add_row(str(ready.rank), ready.host, str(ready.pid), ready.device, size, f"{ready.share:.1%}")
    print()
    Console(width=max(80, Console().width)).print(table)


def check_ranks(ranks: list[ReadyRank]) -> None:
    """Errors: DemoError unless both ranks are there, in two processes, each with its share only."""
    if [ready.rank for ready in ranks] != list(range(NUM_RANKS)) or len({ready.pid for ready in ranks}) != NUM_RANKS:
        raise DemoError(f"expected ranks 0 to {NUM_RANKS - 1} in processes of their own, found {ranks}")
    for ready in ranks:
        if ready.share >= MAX_SHARE:
            raise DemoError(f"rank {ready.rank} holds {ready.share:.1%} of the model, more than {MAX_SHARE:.0%}")


def check_tokens(prompts: list[dict[str, Any]], choices: list[dict[str, Any]]) -> None:
    """Errors: DemoError naming the first token that differs from the oracle's."""
    for prompt, choice in zip(prompts, choices, strict=True):
        expected, got = prompt["token_ids"], choice["token_ids"]
        if got != expected:
            same = next(
                (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected))
            )
            raise DemoError(f"{prompt['input']!r}: token {same} differs\n  got      {got}\n  expected {expected}")


def demo(model: str | None) -> None:
    """Run, show, check. Errors: DemoError or DistInferError."""
    prompts = json.loads(ORACLE.read_text())["prompts"][:NUM_PROMPTS]
    with tempfile.TemporaryDirectory(prefix="dist-infer-demo-") as folder:
        choices, log = run_job(Path(folder), prompts, model)
    ranks = read_ready(log)
    show_answers(prompts, choices)
    show_ranks(ranks)
    check_ranks(ranks)
    if model is None:
        check_tokens(prompts, choices)
        print(f"\nAll {sum(len(p['token_ids']) for p in prompts)} token ids are those of llama.cpp. Next:")
    else:
        print("\nNo oracle for this model: the answers were not compared. Next:")
    print(f"\n  {next_command()}\n")


def next_command() -> str:
    """What to try now; it can be pasted into a shell that stands here."""
    bin_folder = os.path.relpath(Path(sys.executable).parent)
    python, program = os.path.join(bin_folder, "python"), os.path.join(bin_folder, "dist-infer")
    launcher = [python, "-m", "dist_infer.launch.mpirun", "-n", str(NUM_RANKS), "--"]
    return shlex.join([*launcher, program, "run", "--prompt", "The three largest oceans are"])


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint folder instead of the default model")
    try:
        demo(parser.parse_args().model)
    except (DemoError, DistInferError) as error:
        print(f"\ndemo: FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
