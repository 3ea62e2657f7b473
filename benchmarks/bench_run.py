"""`dist-infer run` on a CPU beside `generate` of transformers: the same model, prompts, threads and number of tokens.

    python -m benchmarks.bench_run

One process serves a file of 1 or 16 requests; its time is that of serving in the summary, so with reading, text and
writing, but without the start. transformers answers the same prompts, loaded before, one by one and as one batch.
All are greedy in float32. Rounds alternate, and the best of each counts. Units: microseconds a generated token.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.generate_peer import import_transformers
from benchmarks.timing import BenchmarkError, Row, write_results
from dist_infer.checkpoint.model_path import find_model
from dist_infer.cli.environment import Environment

PROMPT_LEN = 32
OUTPUT_LEN = 32
NUM_SEQUENTIAL = 3  # of the requests, for the time of one by one
NUM_ROUNDS = 3
NUM_THREADS = 2
LEAST = {  # how many times as fast at least
    ("requests=16", "one by one"): 6.0,
    ("requests=16", "batched"): 1.2,
    ("requests=1", "one by one"): 1.0,
}


def make_prompts(count: int) -> list[list[int]]:
    """Ids of plain words, all of one length, so that a batch needs no padding."""
    draw = random.Random(0)
    return [[draw.randrange(1000, 20000) for _ in range(PROMPT_LEN)] for _ in range(count)]


def serve_us(model: Path, prompts: Sequence[Sequence[int]], folder: Path) -> float:
    """A whole run in a process of its own."""
    lines = ({"prompt": prompt, "max_tokens": OUTPUT_LEN, "temperature": 0, "ignore_eos": True} for prompt in prompts)
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--overwrite"]
    options = ["--model", str(model), "--summary", str(folder / "summary.json"), "--device", "cpu"]
    program = [sys.executable, "-m", "dist_infer", "run", "--log-level", "warning"]
    subprocess.run([*program, *paths, *options], check=True, env=os.environ | {"OMP_NUM_THREADS": str(NUM_THREADS)})
    summary = json.loads((folder / "summary.json").read_text())
    if summary["tokens"]["output"] != len(prompts) * OUTPUT_LEN:
        raise BenchmarkError(f"{summary['tokens']} tokens came")
    return float(summary["seconds"]["serve"] * 1e6 / summary["tokens"]["output"])


def generate_us(model: Any, batches: Sequence[Sequence[Sequence[int]]]) -> float:
    """transformers, batch after batch."""
    start = time.perf_counter()
    num_tokens = 0
    for batch in batches:
        ids = torch.tensor(batch)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=OUTPUT_LEN,
                min_new_tokens=OUTPUT_LEN,
                do_sample=False,
                pad_token_id=0,
            )
        num_tokens += len(batch) * (int(out.shape[1]) - PROMPT_LEN)
    took_s = time.perf_counter() - start
    return took_s * 1e6 / num_tokens


def measure(path: Path, model: Any, folder: Path) -> list[Row]:
    """Both numbers of requests."""
    rows = []
    for num_requests in (1, 16):
        prompts = make_prompts(num_requests)
        one_by_one = [[prompt] for prompt in prompts[:NUM_SEQUENTIAL]]
        best: dict[str, float] = {}
        for _ in range(NUM_ROUNDS):
            times = {"ours": serve_us(path, prompts, folder), "one by one": generate_us(model, one_by_one)}
            if num_requests > 1:
                times["batched"] = generate_us(model, [prompts])
            best = {name: min(value, best.get(name, value)) for name, value in times.items()}
        case = f"smollm2-135m float32 requests={num_requests} threads={NUM_THREADS}"
        rows.append(Row(case=case, ours_us=best.pop("ours"), library="onednn", peers=best))
    return rows


def check(rows: Sequence[Row]) -> None:
    """Errors: BenchmarkError naming what is slower than it may be."""
    for (requests, peer), least in LEAST.items():
        row = next(row for row in rows if f" {requests} " in row.case)
        if (found := row.peers[peer] / row.ours_us) < least:
            raise BenchmarkError(f"{row.case} is {found:.2f} times as fast as {peer}, it has to be {least:g}")


def _speed_ups(row: Row) -> Mapping[str, str]:
    return {name: f"{value / row.ours_us:.2f}x" for name, value in row.peers.items()}


def main() -> int:
    """Measures and writes the results. Errors: BenchmarkError where a bound is missed."""
    transformers = import_transformers()
    torch.set_num_threads(NUM_THREADS)
    path = find_model(None, Environment.read(os.environ).cache_dir).path
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(path, model, Path(folder))
    written = write_results("bench_run", rows, device=torch.device("cpu"))
    sys.stdout.write(f"{written}\n" + "".join(f"{row.case}: {row.ours_us:.0f} us, {_speed_ups(row)}\n" for row in rows))
    check(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
