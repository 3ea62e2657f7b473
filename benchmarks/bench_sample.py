"""The choice of tokens on the device, over the vocabulary of Llama-3. Needs a GPU.

    python -m benchmarks.bench_sample

bf16 logits with a standard deviation of 3. The peer is plain torch: argmax for greedy rows, else the reference, with a
sort of each row where it is filtered. Chosen ids are checked to be those of the reference.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.timing import BenchmarkError, Row, compare, floor_us, write_results
from dist_infer.kernels.dispatch import Target, resolve
from dist_infer.kernels.reference.sample import sample as reference_sample
from dist_infer.kernels.reference.sample_filtered import sample_filtered as reference_sample_filtered
from dist_infer.kernels.sample import LIBRARIES, sample
from dist_infer.kernels.sample_filtered import LIBRARIES as FILTERED_LIBRARIES
from dist_infer.kernels.sample_filtered import sample_filtered

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
NUM_COLUMNS = 128256
ROWS = (1, 8, 64, 128)
WAYS = {  # temperature, top_k, top_p; None: not filtered
    "greedy": (0.0, None, None),
    "noisy": (0.7, None, None),
    "top_p=0.9": (0.7, 0, 0.9),
    "top_k=50 top_p=0.9": (0.7, 50, 0.9),
}


def measure(way: str, num_rows: int) -> Row:
    """One row.

    Errors: BenchmarkError for other ids than those of the reference.
    """
    temperature, top_k, top_p = WAYS[way]
    target = Target(device=DEVICE, dtype=DTYPE)
    plain, filtered = (
        resolve("sample", LIBRARIES, target).pick(),
        resolve("sample_filtered", FILTERED_LIBRARIES, target).pick(),
    )
    heat = torch.full((num_rows,), temperature, dtype=torch.float64, device=DEVICE)
    keys = torch.arange(num_rows, device=DEVICE) * 7919
    counts = torch.full_like(keys, top_k or 0)
    shares, floors = torch.full_like(heat, top_p or 1.0), torch.zeros_like(heat)

    def ours(logits: Tensor) -> Sequence[Tensor]:
        if top_k is None:
            return [sample(logits, 0, heat, keys, library=plain)[1]]
        return [sample_filtered(logits, heat, counts, shares, floors, keys, library=filtered)]

    def torch_ids(logits: Tensor) -> Sequence[Tensor]:
        if temperature == 0:
            return [logits.argmax(1)]
        if top_k is None:
            return [reference_sample(logits, 0, heat, keys)[1]]
        return [reference_sample_filtered(logits, heat, counts, shares, floors, keys)]

    def make_inputs(idx: int) -> Tensor:
        generator = torch.Generator(DEVICE).manual_seed(idx)
        return torch.randn(num_rows, NUM_COLUMNS, device=DEVICE, generator=generator).mul_(3).to(DTYPE)

    logits = make_inputs(0)
    chosen = torch_ids(logits)[0] if temperature else reference_sample(logits, 0, None, None)[1]
    if not torch.equal(ours(logits)[0], chosen):
        raise BenchmarkError(f"{way} rows={num_rows}: not the reference's ids")
    num_bytes = logits.numel() * logits.itemsize
    found = compare(
        {"ours": ours, "torch": torch_ids},
        make_inputs,
        device=DEVICE,
        bytes_per_call=max(num_bytes, 2**24),
        num_samples=10,
    )
    return Row(
        case=f"{way} rows={num_rows}",
        ours_us=found["ours"].median_us,
        library=(plain if top_k is None else filtered).name,
        floor_us=floor_us(read_bytes=num_bytes),
        peers={"torch": found["torch"].median_us},
    )


def main() -> int:
    """Measures and writes the results.

    Errors: BenchmarkError for other ids than those of the reference.
    """
    rows = []
    for way in WAYS:
        for num_rows in ROWS:
            row = measure(way, num_rows)
            rows.append(row)
            sys.stdout.write(f"{row.case}: {row.ours_us:.1f} us, {row.peers}\n")
    write_results("bench_sample", rows, device=DEVICE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
