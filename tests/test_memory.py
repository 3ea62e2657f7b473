"""Free memory as Linux tells it."""

from pathlib import Path

import pytest
import torch

from dist_infer import memory


def test_ranks_of_a_host_share_its_memory() -> None:
    alone = memory.free_bytes(torch.device("cpu"), sharers=1)
    assert alone > 2**20
    assert memory.free_bytes(torch.device("cpu"), sharers=4) < alone / 3


def test_ranks_with_a_gpu_each_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert memory.num_sharers(cpu, local_size=5, gpu_shared=False) == 5
    assert memory.num_sharers(gpu, local_size=2, gpu_shared=False) == 1
    assert memory.num_sharers(gpu, local_size=5, gpu_shared=True) == 3


@pytest.mark.parametrize(("limit", "used", "free"), [("1000", 400, 600), ("1000", 1200, 0), ("max", 400, 2**62)])
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, limit: str, used: int, free: int) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    assert memory._free_of_cgroup(tmp_path) == free


def test_no_container(tmp_path: Path) -> None:
    assert memory._free_of_cgroup(tmp_path) == 2**62


def test_meminfo_without_the_line_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\nMemAvailable:  7 kB\n")
    assert memory._free_of_host(tmp_path / "meminfo") == 7 * 1024
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\n")
    with pytest.raises(RuntimeError, match="--num-kv-blocks"):
        memory._free_of_host(tmp_path / "meminfo")
