"""Choice of device: right however the launcher shows the GPUs."""

import pytest
import torch

from dist_infer.errors import UsageError
from dist_infer.launch.devices import choose_device, device_at, device_identity, find_device_fault, shared_gpus

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("local_rank", "num_visible", "expected"),
    [
        (0, 8, "cuda:0"),
        (7, 8, "cuda:7"),
        (3, 1, "cuda:0"),
        (1, 2, "cuda:1"),
        (2, 2, "cuda:0"),
        (0, 0, "cpu"),
        (5, 0, "cpu"),
    ],
)
def test_local_index_modulo_visible(local_rank: int, num_visible: int, expected: str) -> None:
    assert device_at(local_rank, num_visible) == torch.device(expected)


def test_cpu_is_taken_when_asked_for() -> None:
    assert choose_device("cpu", 3) == CPU
    assert device_identity(CPU) == ""


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 0) == CPU
    with pytest.raises(UsageError, match="--device cpu"):
        choose_device("cuda", 0)


def report(host: str, gpu: str) -> dict[str, object]:
    return {"host": host, "gpu": gpu}


def test_two_ranks_on_one_gpu_are_refused_unless_allowed() -> None:
    reports = [report("a", "GPU-1"), report("a", "GPU-2"), report("a", "GPU-1")]
    assert "ranks [0, 2] on a share one GPU (GPU-1)" in (find_device_fault(reports, share_gpu=False) or "")
    assert "--share-gpu" in (find_device_fault(reports, share_gpu=False) or "")
    assert find_device_fault(reports, share_gpu=True) is None
    assert shared_gpus(reports) == [[0, 2]]


def test_the_same_identity_on_two_hosts_is_two_gpus() -> None:
    assert find_device_fault([report("a", "GPU-1"), report("b", "GPU-1")], share_gpu=False) is None


def test_a_mix_of_cpu_and_gpu_is_refused() -> None:
    fault = find_device_fault([report("a", "GPU-1"), report("b", "")], share_gpu=False)
    assert fault is not None and "ranks [1] on b see no GPU" in fault
    assert find_device_fault([report("a", ""), report("b", "")], share_gpu=False) is None


@pytest.mark.gpu
def test_identity_of_a_gpu() -> None:
    assert len(device_identity(choose_device("cuda", 0))) > 8
