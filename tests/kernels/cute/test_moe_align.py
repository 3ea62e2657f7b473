"""Many pairs in the order of their experts: compiled for sm_90a anywhere, run on a GPU against a stable sort."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from dist_infer.kernels.cute import moe_align as op


def test_both_launches_compile_without_a_gpu(tmp_path: Path) -> None:
    ptx = op.compiled(f"--gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}").__ptx__  # type: ignore[attr-defined]
    assert ".target sm_90a" in ptx and ptx.count(".visible .entry") == 2
    assert "match.any.sync" in ptx and "griddepcontrol.wait" in ptx
    assert "ld.local" not in ptx


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [1, 60, 128, 256])
@pytest.mark.parametrize("num_rows", [1, 700, 4096, 40_001])
@pytest.mark.parametrize("kind", ["even", "all on one", "none"])
def test_against_a_stable_sort(num_experts: int, num_rows: int, kind: str) -> None:
    """Ids of no expert held, below and above, have no place."""
    generator = torch.Generator("cuda").manual_seed(num_rows + num_experts)
    ids = torch.randint(-1, num_experts + 1, (num_rows, 8), generator=generator, device="cuda", dtype=torch.int32)
    if kind != "even":
        ids.fill_(num_experts - 1 if kind == "all on one" else -1)
    order, firsts = op.align(ids, num_experts)
    flat = ids.flatten()
    held = ((flat >= 0) & (flat < num_experts)).nonzero().squeeze(1)
    expected = held[flat[held].sort(stable=True).indices]
    assert torch.equal(order[: len(held)].long(), expected)
    counts = torch.bincount(flat[held], minlength=num_experts)
    assert firsts.tolist() == [0, *counts.cumsum(0).tolist()]
