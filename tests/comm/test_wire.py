"""The exchange below the collectives: who gets which bytes, none at all included. The same for every wire."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dist_infer.comm.wire import Wire
from tests.comm.thread_wires import on_gloo, on_shm, shm_wires

SIZE = 3
WIRES = ["gloo", "shm", pytest.param("gloo cuda", marks=pytest.mark.gpu)]


def _on_wires(kind: str, main: Callable[[Wire], None], timeout_s: float = 30.0) -> None:
    """Runs main on each of SIZE ranks."""
    if kind == "shm":
        on_shm(shm_wires(SIZE, timeout_s=timeout_s), main)
    else:
        on_gloo("cuda" if kind == "gloo cuda" else "cpu", SIZE, main, timeout_s)


def _message(source: int, target: int, length: int) -> Tensor:
    return ((torch.arange(length) * 7 + 40 * source + 90 * target) % 251).to(torch.uint8)


def _exchange(wire: Wire, lengths: list[list[int]], tag: int) -> list[Tensor]:
    """Rank s sends rank t lengths[s][t] bytes; what this rank then holds."""
    sends = [_message(wire.rank, peer, lengths[wire.rank][peer]).to(wire.device) for peer in range(SIZE)]
    recvs = [torch.zeros(lengths[peer][wire.rank], dtype=torch.uint8, device=wire.device) for peer in range(SIZE)]
    wire.exchange(sends, recvs, tag)
    return recvs


@pytest.mark.parametrize("kind", WIRES)
@pytest.mark.parametrize(
    "lengths",
    [
        [[0] * SIZE] * SIZE,
        [[5, 5, 5]] * SIZE,
        [[1, 0, 63], [129, 0, 0], [0, 5000, 2]],
        [[0, 300_000, 300_000], [0, 0, 0], [7, 0, 0]],
    ],
    ids=["nothing", "equal", "uneven", "one sender"],
)
def test_each_rank_gets_what_was_meant_for_it(kind: str, lengths: list[list[int]]) -> None:
    def main(wire: Wire) -> None:
        for tag in range(6):
            received = _exchange(wire, lengths, tag)
            for peer in range(SIZE):
                expected = _message(peer, wire.rank, lengths[peer][wire.rank])
                if peer == wire.rank:
                    expected = torch.zeros_like(expected)  # the own entry is left alone
                assert received[peer].cpu().tolist() == expected.tolist(), (wire.rank, peer, tag)

    _on_wires(kind, main)


@pytest.mark.parametrize("kind", WIRES)
def test_one_tensor_may_go_to_all(kind: str) -> None:
    def main(wire: Wire) -> None:
        x = _message(wire.rank, 0, 63).to(wire.device)
        out = torch.zeros(SIZE, 63, dtype=torch.uint8, device=wire.device)
        wire.exchange([x] * SIZE, list(out), tag=0)
        for peer in range(SIZE):
            if peer != wire.rank:
                assert out[peer].cpu().tolist() == _message(peer, 0, 63).tolist()

    _on_wires(kind, main)


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_other_tag_is_not_taken(kind: str) -> None:
    def main(wire: Wire) -> None:
        with pytest.raises(RuntimeError, match="(?i)timed out|closed|is in another call"):
            _exchange(wire, [[8] * SIZE] * SIZE, tag=wire.rank)

    _on_wires(kind, main, timeout_s=1.0)


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_tags_keep_two_exchanges_apart_when_a_rank_is_ahead(kind: str) -> None:
    """Rank 0 has sent for tag 1 before the others ask for tag 0."""

    def main(wire: Wire) -> None:
        first, second = [[4, 4, 4]] * SIZE, [[9, 9, 9]] * SIZE
        for tag, lengths in ((0, first), (1, second)):
            received = _exchange(wire, lengths, tag)
            for peer in set(range(SIZE)) - {wire.rank}:
                assert received[peer].cpu().tolist() == _message(peer, wire.rank, lengths[peer][wire.rank]).tolist()

    _on_wires(kind, main)
