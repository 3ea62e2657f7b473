"""Rows to all ranks and sums back through peer memory: layout, compiled form; on a GPU the protocol on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_infer.kernels import peer_rows as op
from dist_infer.kernels.all_reduce import SENTINEL
from dist_infer.kernels.peer_rows import RowsLayout, RowsSpace
from dist_infer.kernels.triton import peer_rows as kernels
from dist_infer.kernels.triton.rms_norm import tile_of
from tests.kernels import peer_code
from tests.kernels.aot import Compiled, compile_ahead

GATHER, SCATTER = op.GATHER_LIBRARIES[0], op.SCATTER_LIBRARIES[0]
NUM_EXPERTS = 24


def layout_of(**changes: int) -> RowsLayout:
    given = {"num_ranks": 4, "max_rows": 7, "row_bytes": 512, "top_k": 6}
    return RowsLayout(**(given | changes))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_parts_of_the_layout_follow_each_other(num_ranks: int) -> None:
    layout = layout_of(num_ranks=num_ranks)
    assert layout.packed_bytes == 512 + 2 * 32 and layout.back_turns == 4 * 7
    ends = [
        (2 * 4 * 7, layout.slots),
        (layout.slots + 2 * (num_ranks - 1) * 7 * layout.packed_bytes, layout.parts),
        (layout.parts + 2 * (num_ranks - 1) * 7 * 512, layout.num_bytes),
    ]
    assert all(0 <= start - end < 256 and start % 256 == 0 for end, start in ends)


def test_memory_is_empty_before_the_first_call() -> None:
    layout = layout_of()
    memory = torch.full((layout.num_bytes,), 0xAB, dtype=torch.uint8)
    layout.prepare(memory)
    assert not memory[: layout.slots].any()
    assert (memory[layout.slots :].view(torch.int32) == SENTINEL).all()


@pytest.mark.parametrize(
    "change", [{"num_ranks": 1}, {"row_bytes": 24}, {"row_bytes": 0}, {"max_rows": 0}, {"top_k": 0}]
)
def test_a_layout_that_can_not_be_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no layout"):
        layout_of(**change)


def _space() -> RowsSpace:
    memory, table = torch.zeros(0, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    return RowsSpace(layout=layout_of(), memory=memory, table=table, rank=0, max_programs=4)


ROWS = torch.zeros(3, 128)
IDS = torch.zeros(3, 6, dtype=torch.int32)


@pytest.mark.parametrize(
    ("x", "ids", "message"),
    [
        (ROWS.double(), IDS, "torch.float64"),
        (torch.zeros(128, 3).t(), IDS, "no contiguous"),
        (ROWS[None], IDS, "not the rows of 1 ranks"),
        (ROWS[:0], IDS[:0], "not 1 to 7 rows"),
        (torch.zeros(8, 128), IDS, "not 1 to 7 rows"),
        (ROWS.bfloat16(), IDS, "rows a rank of 512 bytes"),
        (ROWS, IDS[:2], r"ids \[2, 6\]"),
        (ROWS, IDS[:, :5], r"ids \[3, 5\]"),
        (ROWS, IDS.long(), "torch.int64"),
    ],
)
def test_rows_that_do_not_fit_are_refused(x: Tensor, ids: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op.gather_rows(x, ids, ids.float(), _space(), range(3), library=GATHER)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (torch.zeros(13, 128), "not equally many rows of 4 ranks"),
        (torch.zeros(32, 128), "not 1 to 7 rows"),
        (torch.zeros(12, 64), "of 512 bytes"),
        (torch.zeros(12), "not the rows of 1 ranks"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op.scatter_sums(parts, _space(), library=SCATTER)


def _types(kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> dict[str, str]:
    types = pointers | {"memory": "*u8", "table": "*i64", "memory_stride": "i64"}
    return types | {name: "i32" for name in kernel.arg_names if name not in types and name not in constants}


def compiled_gather(hidden: int, top_k: int = 8, num_ranks: int = 2) -> Compiled:
    kernel = kernels.gather_kernel
    packed = hidden // 8 + 2 * -(-top_k // 4)
    block = 1 << (packed - 1).bit_length()
    constants = {"NUM_RANKS": num_ranks, "VECTORS": hidden // 8, "TOP_K": top_k, "BLOCK": block, "OVERLAP": True}
    pointers = {"x": "*bf16", "x_out": "*bf16", "ids": "*i32", "ids_out": "*i32"}
    pointers |= {"weights": "*fp32", "weights_out": "*fp32"}
    return compile_ahead(kernel, _types(kernel, pointers, constants), constants, num_warps=min(8, block // 64))


def compiled_scatter(hidden: int, num_ranks: int = 2) -> Compiled:
    kernel = kernels.scatter_kernel
    columns, num_warps = tile_of(hidden)
    constants = {"NUM_RANKS": num_ranks, "HIDDEN": hidden, "VECTORS": hidden // 8, "BLOCK": columns // 8}
    constants |= {"OVERLAP": True}
    pointers = {"parts": "*bf16", "out": "*bf16"}
    return compile_ahead(kernel, _types(kernel, pointers, constants), constants, num_warps=num_warps)


@pytest.mark.parametrize("compiled", [compiled_gather, compiled_scatter])
def test_ahead_of_time(compiled: Callable[[int], Compiled]) -> None:
    """What goes over the wire is wide, and no row changes its layout."""
    made = compiled(7168)
    ptx = made.asm["ptx"]
    assert "ld.relaxed.sys.global.v4.b32" in ptx and "st.relaxed.sys.global.v4.b32" in ptx and "multimem" not in ptx
    assert "convert_layout" not in made.asm["ttgir"] and made.spilled_bytes == 0


# On a GPU: the protocol, all ranks as one launch on one device, whose programs all fit on it together.


def one_device(num_ranks: int, hidden: int, top_k: int, dtype: torch.dtype = torch.bfloat16) -> RowsSpace:
    layout = RowsLayout(num_ranks=num_ranks, max_rows=150, row_bytes=hidden * dtype.itemsize, top_k=top_k)
    return op.rows_on_one_device(layout, torch.device("cuda"))


class Rows:
    """The rows of all ranks, and what must come of them."""

    def __init__(self, space: RowsSpace, num_rows: int, hidden: int, seed: int, dtype: torch.dtype) -> None:
        num_ranks, top_k = space.layout.num_ranks, space.layout.top_k
        generator = torch.Generator("cuda").manual_seed(seed)
        self.space = space
        self.x = torch.randn(num_ranks, num_rows, hidden, device="cuda", generator=generator).to(dtype)
        self.x.view(-1)[::37] = -0.0
        self.x[..., 2:5] = -0.0
        choices = num_ranks, num_rows, top_k
        self.ids = torch.randint(-1, NUM_EXPERTS, choices, device="cuda", generator=generator).int()
        self.weights = torch.rand(choices, device="cuda", generator=generator)
        self.parts = torch.randn(num_ranks, num_ranks * num_rows, hidden, device="cuda", generator=generator).to(dtype)
        self.parts.view(-1)[::41] = -0.0

    def check_gather(self, held: range) -> None:
        x, ids, weights = op.gather_rows(self.x, self.ids, self.weights, self.space, held, library=GATHER)
        here = (self.ids >= held.start) & (self.ids < held.stop)
        expected = torch.where(here, self.ids - held.start, -1).flatten(0, 1)
        for rank in range(len(self.x)):
            assert torch.equal(x[rank], self.x.flatten(0, 1))  # zeros are equal whatever their sign
            assert torch.equal(ids[rank], expected)
            assert torch.equal(weights[rank], self.weights.flatten(0, 1))

    def check_scatter(self) -> None:
        sums = op.scatter_sums(self.parts, self.space, library=SCATTER)
        num_ranks, num_rows = self.x.shape[:2]
        for rank in range(num_ranks):
            total = torch.zeros_like(sums[rank], dtype=torch.float32)
            for part in self.parts:
                total += part[rank * num_rows : (rank + 1) * num_rows]
            assert same_bytes(sums[rank], total.to(sums.dtype))


def same_bytes(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_ranks", "hidden", "top_k", "dtype"),
    [
        (2, 2048, 8, torch.bfloat16),
        (2, 2048, 6, torch.bfloat16),
        (4, 7168, 8, torch.bfloat16),
        (8, 512, 1, torch.float16),
        (3, 256, 4, torch.float32),
    ],
)
def test_rows_and_sums(num_ranks: int, hidden: int, top_k: int, dtype: torch.dtype) -> None:
    """Whatever the number of rows, and however it changes from call to call."""
    space = one_device(num_ranks, hidden, top_k, dtype)
    for call, num_rows in enumerate([1, 33, 2, 150, 31, 1, 128, 150, 5]):
        rows = Rows(space, num_rows, hidden, call, dtype)
        rows.check_gather(range(call, 2 * call + 3))
        rows.check_scatter()


def captured(run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
    """What repeats the launches of `run`, and its results, which that overwrites."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


@pytest.mark.gpu
def test_graphs_of_several_sizes_and_eager_calls_take_turns() -> None:
    space = one_device(4, 2048, 8)
    kinds = {num_rows: Rows(space, num_rows, 2048, num_rows, torch.bfloat16) for num_rows in (1, 40, 150)}

    def calls(rows: Rows) -> Callable[[], list[Tensor]]:
        def call() -> list[Tensor]:
            out = []
            for _ in range(3):
                x, ids, _ = op.gather_rows(rows.x, rows.ids, rows.weights, space, range(9), library=GATHER)
                out += [x, ids, op.scatter_sums(rows.parts, space, library=SCATTER)]
            return out

        return call

    graphs = {num_rows: captured(calls(rows)) for num_rows, rows in kinds.items()}
    for turn, num_rows in enumerate([1, 40, 150, 150, 1, 40, 1]):
        rows, (replay, outs) = kinds[num_rows], graphs[num_rows]
        rows.x.copy_(torch.randn_like(rows.x))
        for out in outs:
            out.fill_(7)
        replay()
        for x in outs[::3]:
            assert all(torch.equal(x[rank], rows.x.flatten(0, 1)) for rank in range(4))
        for ids in outs[1::3]:
            assert ids.max() < 9 and torch.equal(ids[0], ids[3])
        assert all(same_bytes(sums, outs[2]) for sums in outs[2::3])
        Rows(space, 3 + turn, 2048, turn, torch.bfloat16).check_scatter()


def _use(monkeypatch: pytest.MonkeyPatch, **replaced: Any) -> None:
    for name in ("gather_kernel", "scatter_kernel"):
        monkeypatch.setattr(kernels, name, peer_code.rebuilt(getattr(kernels, name), **replaced))


@pytest.mark.gpu
def test_thousands_of_calls_with_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One time in a hundred a warp is late."""
    _use(monkeypatch, load_words=peer_code.dawdling_load)
    space = one_device(8, 2048, 8)
    kinds = [Rows(space, num_rows, 2048, num_rows, torch.bfloat16) for num_rows in (1, 16, 7)]
    expected = [(rows.x.flatten(0, 1), op.scatter_sums(rows.parts, space, library=SCATTER)) for rows in kinds]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def calls() -> list[Tensor]:
        for _ in range(20):
            for rows, (gathered, sums) in zip(kinds, expected, strict=True):
                x, _, _ = op.gather_rows(rows.x, rows.ids, rows.weights, space, range(9), library=GATHER)
                wrong.add_((x != gathered).sum())
                wrong.add_((op.scatter_sums(rows.parts, space, library=SCATTER) != sums).sum())
        return []

    replay, _ = captured(calls)
    for _ in range(50):
        replay()
    assert wrong.item() == 0


@pytest.mark.gpu
def test_an_early_read_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, settle_words=peer_code.hasty_settle, load_words=peer_code.late_load)
    rows = Rows(one_device(2, 2048, 8), 100, 2048, 0, torch.bfloat16)
    with pytest.raises(AssertionError):
        rows.check_gather(range(9))
    with pytest.raises(AssertionError):
        rows.check_scatter()
