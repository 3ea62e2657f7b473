"""All-reduce through peer memory: its layout, and what its arguments must be."""

import pytest
import torch
from torch import Tensor

from dist_infer.kernels import all_reduce as op
from dist_infer.kernels.all_reduce import SENTINEL, SHARE_BYTES, TURN_BYTES, Epilogue, PeerLayout, PeerSpace
from dist_infer.kernels.quantize import QuantFormat
from tests.kernels.all_reduce_cases import LIBRARY


def layout_of(**changes: int) -> PeerLayout:
    given = {"num_ranks": 4, "row_bytes": 4096, "one_shot_rows": 7, "two_shot_rows": 30}
    return PeerLayout(**(given | changes))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_parts_of_the_layout_follow_each_other(num_ranks: int) -> None:
    layout = layout_of(num_ranks=num_ranks)
    ends = [
        (TURN_BYTES * layout.one_shot_rows, layout.shares),
        (layout.shares + SHARE_BYTES * layout.one_shot_rows, layout.slots),
        (layout.slots + 2 * (num_ranks - 1) * layout.slot_bytes, layout.flags),
        (layout.flags + 4 * 2 * (num_ranks - 1) * layout.max_tiles, layout.counters),
        (layout.counters + 4 * (2 * (num_ranks - 1) + 1) * layout.max_tiles, layout.parts),
        (layout.parts + (num_ranks - 1) * layout.part_bytes, layout.sums),
        (layout.sums + layout.two_shot_rows * layout.row_bytes, layout.num_bytes),
    ]
    assert all(0 <= start - end < 256 and start % 256 == 0 for end, start in ends)
    assert layout.max_tiles * num_ranks >= layout.two_shot_rows and layout.slot_bytes == 7 * 4096


def test_memory_is_empty_before_the_first_call() -> None:
    layout = layout_of()
    memory = torch.full((layout.num_bytes,), 0xAB, dtype=torch.uint8)
    layout.prepare(memory)
    words = memory.view(torch.int32)
    assert (words[layout.shares // 4 : layout.flags // 4] == SENTINEL).all()
    assert not words[: layout.shares // 4].any() and not words[layout.flags // 4 :].any()


@pytest.mark.parametrize("change", [{"num_ranks": 1}, {"row_bytes": 24}, {"row_bytes": 0}, {"one_shot_rows": 0}])
def test_a_layout_that_can_not_be_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no layout"):
        layout_of(**change)


def _space(**changes: int) -> PeerSpace:
    layout = layout_of(**changes)
    memory, table = torch.zeros(0, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    return PeerSpace(layout=layout, memory=memory, table=table, rank=0, max_programs=4)


ROWS = torch.zeros(3, 64)


@pytest.mark.parametrize(
    ("x", "epilogue", "message"),
    [
        (ROWS.double(), Epilogue(), "torch.float64"),
        (ROWS.int(), Epilogue(), "float type"),
        (ROWS.t(), Epilogue(), "contiguous"),
        (ROWS.view(1, 3, 64), Epilogue(), "not the rows of 1 ranks"),
        (torch.zeros(3, 6), Epilogue(), "multiple of 16"),
        (torch.zeros(8, 64), Epilogue(), "up to 7 rows"),
        (torch.zeros(1, 2048), Epilogue(), "8192 bytes are not up to 7 rows of up to 4096"),
        (ROWS, Epilogue(residual=torch.zeros(2, 64)), r"residual torch.float32 \[2, 64\] differs"),
        (ROWS, Epilogue(residual=ROWS.bfloat16()), "residual torch.bfloat16"),
        (ROWS, Epilogue(weight=torch.zeros(3)), r"weight \[3\]"),
        (ROWS, Epilogue(quant_format=QuantFormat.FP8), "needs a weight"),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, epilogue: Epilogue, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op.one_shot(x, epilogue, _space(), library=LIBRARY["one_shot"])


def test_two_shots_have_a_limit_of_their_own() -> None:
    with pytest.raises(ValueError, match="two_shot: 31 rows .* up to 30 rows"):
        op.two_shot(torch.zeros(31, 64), Epilogue(), _space(), library=LIBRARY["two_shot"])
