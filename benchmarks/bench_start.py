"""The start of a job on the CPU: from the launch to the first answer, and until many ranks on few cores are ready.

    python -m benchmarks.bench_start

A rank must import torch and read its share of the weights, so the peer of the first case is just that: as many
processes at once, without MPI, each of which imports torch and reads a quarter of every matrix of the same checkpoint.
Ours is everything from calling mpirun to a whole record on the disk. Rounds alternate, and the best of each counts.
Units: microseconds.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.timing import BenchmarkError, Row, write_results
from dist_infer.checkpoint.model_path import find_model
from dist_infer.cli.environment import Environment
from dist_infer.launch import mpirun

NUM_RANKS = 4
NUM_ROUNDS = 5
MAX_RATIO = 1.3  # of the first answer to importing and loading
MANY_RANKS = 16
MAX_READY_S = 120.0
LIMIT_S = 300.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
PROGRAM = [sys.executable, "-P", "-m", "dist_infer", "run"]
DUMMY = {  # a model for many ranks: what costs is the start of the ranks
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": MANY_RANKS,
    "num_key_value_heads": MANY_RANKS,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
IMPORT_AND_LOAD = """
import sys
import torch
from safetensors import safe_open
part, kept = int(sys.argv[1]), []
for path in sys.argv[2:]:
    with safe_open(path, "pt") as file:
        for name in file.keys():
            rows = file.get_slice(name)
            length = rows.get_shape()[0]
            share = rows[:] if len(rows.get_shape()) == 1 else rows[part * length // 4 : (part + 1) * length // 4]
            kept.append(share.to(torch.float32).clone())
"""


def import_and_load_us(model: Path) -> float:
    """As many processes as ranks, at once."""
    files = [str(path) for path in sorted(model.glob("*.safetensors"))]
    start = time.perf_counter()
    processes = [
        subprocess.Popen([sys.executable, "-c", IMPORT_AND_LOAD, str(part), *files], env=os.environ | ONE_THREAD)
        for part in range(NUM_RANKS)
    ]
    if any(process.wait(LIMIT_S) for process in processes):
        raise BenchmarkError("a process that imports torch and loads has failed")
    return (time.perf_counter() - start) * 1e6


def first_token_us(model: Path, folder: Path) -> float:
    """From the call of mpirun to the first record."""
    return first_record_us(NUM_RANKS, ["--device", "cpu", "--model", str(model)], folder, ONE_THREAD)


def ready_us(num_ranks: int, folder: Path) -> float:
    """From the call of mpirun to the last `ready` line."""
    (folder / "config.json").write_text(json.dumps(DUMMY))
    arguments = ["--device", "cpu", "--model", str(folder), "--load-format", "dummy", "--num-kv-blocks", "64"]
    (folder / "in.jsonl").write_text('{"prompt": [1, 2, 3], "max_tokens": 1}\n')
    arguments += ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--overwrite"]
    return launch_us(
        num_ranks, arguments, lambda log: log.count("ready rank=") == num_ranks, folder=folder, env=ONE_THREAD
    )


def first_record_us(num_ranks: int, arguments: list[str], folder: Path, env: Mapping[str, str]) -> float:
    """From the call of mpirun until the record of one prompt with one token is on the disk."""
    output = folder / "out.jsonl"
    (folder / "in.jsonl").write_text('{"prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}\n')
    return launch_us(
        num_ranks,
        [*arguments, "-i", str(folder / "in.jsonl"), "-o", str(output), "--overwrite"],
        lambda log: output.exists() and output.read_bytes().endswith(b"\n"),
        folder=folder,
        env=env,
    )


def launch_us(
    num_ranks: int, arguments: list[str], is_there: Callable[[str], bool], *, folder: Path, env: Mapping[str, str]
) -> float:
    """Until `is_there`; then the job runs to its end."""
    (folder / "out.jsonl").unlink(missing_ok=True)
    launch = mpirun.command(
        num_ranks, [*PROGRAM, *arguments], launcher=mpirun.find_launcher(), oversubscribe=True, extra_env=env
    )
    log = folder / "log"
    start, taken_us = time.perf_counter(), None
    with open(log, "wb") as file:
        process = mpirun.start(launch, output=file)
    try:
        while taken_us is None and time.perf_counter() - start < LIMIT_S:
            if is_there(log.read_text(errors="replace")):
                taken_us = (time.perf_counter() - start) * 1e6
            elif process.poll() is not None:
                break
            time.sleep(5e-3)
        code = process.wait(LIMIT_S) if taken_us is not None else 1
    finally:
        mpirun.stop(process)
    if taken_us is None or code != 0:
        raise BenchmarkError(f"the job ended with code {code}:\n{log.read_text(errors='replace')}")
    return taken_us


def measure(model: Path, folder: Path) -> list[Row]:
    """Both cases."""
    ours, theirs = [], []
    for _ in range(NUM_ROUNDS):
        theirs.append(import_and_load_us(model))
        ours.append(first_token_us(model, folder))
    peers = {"import torch and load": min(theirs)}
    rows = [Row(case=f"first token ranks={NUM_RANKS}", ours_us=min(ours), library="openmpi", peers=peers)]
    cores = len(os.sched_getaffinity(0))
    ready = ready_us(MANY_RANKS, folder)
    return [*rows, Row(case=f"ready ranks={MANY_RANKS} cores={cores}", ours_us=ready, library="openmpi")]


def check(rows: list[Row]) -> list[str]:
    """What is slower than it must be."""
    first, ready = rows
    ratio = first.ours_us / first.peers["import torch and load"]
    problems = [] if ratio <= MAX_RATIO else [f"{first.case}: {ratio:.2f} times importing and loading, not {MAX_RATIO}"]
    if ready.ours_us > MAX_READY_S * 1e6:
        problems.append(f"{ready.case}: {ready.ours_us / 1e6:.0f} s, not {MAX_READY_S:.0f}")
    return problems


def main(env: Mapping[str, str] = os.environ) -> int:
    """Measure, write, check."""
    model = find_model(None, Environment.read(env).cache_dir, on_wait=lambda: None).path
    with tempfile.TemporaryDirectory(prefix="dist-infer-bench-") as folder:
        rows = measure(model, Path(folder))
    for row in rows:
        print(row)
    print(write_results("bench_start", rows, device=torch.device("cpu")))
    problems = check(rows)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
