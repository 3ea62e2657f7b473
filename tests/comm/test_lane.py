"""Work beside the current stream."""

import pytest
import torch

from dist_infer.comm.lane import Lane


def test_without_streams_work_is_done_at_once() -> None:
    lane = Lane(torch.device("cpu"))
    done: list[int] = []

    def work(idx: int) -> torch.Tensor:
        done.append(idx)
        return torch.tensor(idx)

    first, second = lane.start(lambda: work(1)), lane.start(lambda: work(2))
    assert done == [1, 2] and not lane.overlaps
    assert (second.wait().item(), first.wait().item(), first.wait().item()) == (2, 1, 1)


def chain(lane: Lane, x: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """Work on the lane whose inputs and results are given back to the allocator as soon as may be."""
    results = []
    for chunk in range(num_chunks):
        made = x * (chunk + 1)  # read by the lane only
        results.append(lane.start(lambda made=made: made @ made, made))  # type: ignore[misc]
        del made
        x = x + 1  # memory that a lane without care would find overwritten
        if chunk % 2:
            results[-2] = lane.start(results[-2].wait().clone)
    return torch.stack([result.wait() for result in results])


@pytest.mark.gpu
def test_lane_waits_for_its_inputs_and_is_waited_for() -> None:
    x = torch.randn(1024, 1024, device="cuda", dtype=torch.float64)
    expected = chain(Lane(torch.device("cpu")), x, 6)
    lane = Lane(torch.device("cuda"))
    assert lane.overlaps
    for _ in range(6):
        assert torch.equal(chain(lane, x, 6), expected)


@pytest.mark.gpu
def test_lane_inside_a_captured_graph() -> None:
    x = torch.randn(256, 256, device="cuda", dtype=torch.float64)
    lane = Lane(torch.device("cuda"))
    chain(lane, x, 4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(lane, x, 4)
    for seed in range(6):
        x.copy_(torch.randn(256, 256, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
        graph.replay()
        assert torch.equal(captured, chain(Lane(torch.device("cpu")), x, 4))
