"""The start of a job on one GPU: from the launch to the first token on the disk, with dummy weights.

    python -m benchmarks.bench_start_gpu

Each model is started with empty caches of compiled kernels, and then again with those that the first start has left:
that is the figure. `bounds` holds the first one. Units: microseconds.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.bench_decode import MODELS
from benchmarks.bench_start import DUMMY, first_record_us
from benchmarks.timing import Row, write_results

MAX_S = {"tiny-llama": 25.0, "llama-3-8b": 37.0}
TINY = DUMMY | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "torch_dtype": "bfloat16"}
OWN_CACHES = ("TRITON_CACHE_DIR", "CUTE_DSL_CACHE_DIR")  # of the user: the job then has those of its own folder


def measure(name: str, folder: Path) -> Row:
    """The row of a model. A start fills `folder` with its caches."""
    model = MODELS / name
    if name == "tiny-llama":
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY))
    # Other work may hold some of the memory.
    arguments = ["--device", "cuda", "--load-format", "dummy", "--kv-memory-fraction", "0.3", "--model", str(model)]
    env = {"DIST_INFER_CACHE": str(folder / "cache")}
    first_us, again_us = (first_record_us(1, arguments, folder, env) for _ in range(2))
    return Row(case=f"{name} first token", ours_us=again_us, library="warm caches", bounds={"empty caches": first_us})


def main() -> int:
    """Measure, write, check."""
    for variable in OWN_CACHES:
        os.environ.pop(variable, None)
    rows = []
    for name in MAX_S:
        with tempfile.TemporaryDirectory(prefix="dist-infer-bench-") as folder:
            rows.append(measure(name, Path(folder)))
        print(rows[-1], flush=True)
    print(write_results("bench_start_gpu", rows, device=torch.device("cuda")))
    late = [row for row, limit_s in zip(rows, MAX_S.values(), strict=True) if row.ours_us > limit_s * 1e6]
    for row in late:
        print(f"{row.case}: {row.ours_us / 1e6:.1f} s is too long", file=sys.stderr)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
