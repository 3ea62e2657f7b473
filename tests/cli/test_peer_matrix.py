"""The matrix of GPU pairs: its text from any numbers, and a measurement on two GPUs."""

import pytest
import torch

from dist_infer.cli.peer_matrix import find_peers, matrix_lines, measure_matrix


def test_a_line_for_every_gpu() -> None:
    (found,) = find_peers("node1", [[None, 371.2, 25.4], [370.8, None, 25.6], [1234.0, 0.4, None]])
    assert str(found).splitlines() == [
        "ok     GPUs of node1: copies in GB/s, from the row's GPU to the column's",
        "                0      1      2",
        "         0      -    371     25",
        "         1    371      -     26",
        "         2   1234      0      -",
    ]


def test_columns_hold_as_many_gpus_as_a_host_may_have() -> None:
    lines = matrix_lines([[12345.0] * 16] * 16)
    assert {len(line) for line in lines} == {10 + 16 * 7}


def test_pairs_without_peer_access_are_named() -> None:
    shown, note = find_peers("n", [[None, None, 90.0], [None, None, 90.0], [90.0, 90.0, None]])
    assert "none" in str(shown) and not note.wrong
    assert note.note.startswith("no peer access from GPU 0 to 1, 1 to 0: ")


def test_one_gpu_has_no_peers() -> None:
    assert find_peers("n", [[None]]) == []


def test_full_memory_is_said() -> None:
    (found,) = find_peers("n", None)
    assert "512 MiB free; end what uses it" in found.note


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two GPUs")
def test_copies_between_gpus_are_measured() -> None:
    matrix = measure_matrix()
    for source, row in enumerate(matrix):
        assert len(row) == len(matrix) == torch.cuda.device_count()
        for target, speed in enumerate(row):
            reaches = source != target and torch.cuda.can_device_access_peer(source, target)
            assert (speed is not None and speed > 0) if reaches else speed is None
