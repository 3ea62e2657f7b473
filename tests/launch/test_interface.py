"""The address of rank 0: the first that all ranks reach, with threads as ranks and loopback addresses as interfaces."""

import socket
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from dist_infer.errors import DistInferError
from dist_infer.launch import interface
from dist_infer.launch.interface import find_address, own_addresses

T = TypeVar("T")


class Thread:
    """A rank: gathers through a list that all threads share."""

    def __init__(self, rank: int, size: int, rounds: list[dict[int, bytes]], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.rounds, self.barrier = rank, size, rounds, barrier
        self.count = 0

    def gather(self, data: bytes) -> list[bytes]:
        self.rounds[self.count][self.rank] = data
        self.barrier.wait(20)
        self.count += 1
        return [self.rounds[self.count - 1][rank] for rank in range(self.size)]


def on_all_ranks(size: int, main: Callable[[Thread], T]) -> list[T | Exception]:
    rounds: list[dict[int, bytes]] = [{}, {}]
    barrier = threading.Barrier(size)
    results: dict[int, T | Exception] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = main(Thread(rank, size, rounds, barrier))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results[rank] for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_first_address_that_all_reach(size: int) -> None:
    candidates = ["192.0.2.1", "127.0.0.2", "127.0.0.3"]  # the first is nobody's: it can't be bound
    assert on_all_ranks(size, lambda control: find_address(control, candidates)) == ["127.0.0.2"] * size


def test_an_address_that_one_rank_does_not_reach_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = interface._answers

    def some(address: str, port: int, token: str, try_s: float) -> bool:
        return address != "127.0.0.2" and answers(address, port, token, try_s)

    monkeypatch.setattr(interface, "_answers", some)
    assert on_all_ranks(2, lambda control: find_address(control, ["127.0.0.2", "127.0.0.3"])) == ["127.0.0.3"] * 2


def test_without_any_every_rank_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_answers", lambda *_: False)
    for result in on_all_ranks(2, lambda control: find_address(control, ["127.0.0.2"])):
        assert isinstance(result, DistInferError)
        assert "tried ['127.0.0.2'], not reached at all by rank 0" in str(result)
    for result in on_all_ranks(2, lambda control: find_address(control, [])):
        assert "only loopback is up" in str(result)


def test_another_listener_is_not_taken_for_rank_0() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"x" * 16)

        thread = threading.Thread(target=answer)
        thread.start()
        assert not interface._answers("127.0.0.1", other.getsockname()[1], "a" * 16, 5.0)
        thread.join()


def test_own_addresses_are_addresses_and_not_loopback() -> None:
    for address in own_addresses():
        socket.inet_aton(address)
        assert not address.startswith("127.")
