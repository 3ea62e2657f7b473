"""What the kernels of a step add up to."""

import pytest
import torch

from dist_infer.step_profile import DeviceWork, profile_step, summarize


def test_time_in_which_kernels_overlap_counts_once() -> None:
    work = [
        DeviceWork("gemm", 20.0, 30.0),
        DeviceWork("Memcpy HtoD", 0.0, 1.0),
        DeviceWork("norm", 10.0, 14.0),
        DeviceWork("gemm", 13.0, 19.0),
        DeviceWork("early", 21.0, 22.0),
    ]
    found = summarize(work)
    assert (found.num_kernels, found.busy_us, found.span_us) == (4, 1 + 9 + 10, 30)
    assert found.kernels == (("gemm", 2, 16.0), ("norm", 1, 4.0), ("Memcpy HtoD", 1, 1.0), ("early", 1, 1.0))


@pytest.mark.gpu
def test_kernels_of_a_graph_are_counted() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(2**22, device=device)
    x.mul_(1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            x.mul_(1.0)

    def step() -> None:
        graph.replay()
        x.add_(0.0)

    found = profile_step(step, device)
    assert found is not None and found.num_kernels == 6
    assert 0 < found.busy_us <= found.span_us
    assert sorted(count for _, count, _ in found.kernels) == [1, 5]
    assert profile_step(lambda: None, device) is None
