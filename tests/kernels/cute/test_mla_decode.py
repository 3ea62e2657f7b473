"""Latent decode in CuTe DSL: compiled for sm_90a anywhere, run on a GPU against float64."""

from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from dist_infer.kernels.cute import mla_clerk, mla_few_rows, mla_operands, mla_shared_tiles
from dist_infer.kernels.cute import mla_decode as op
from dist_infer.kernels.cute.mla_launch import Variant
from tests.kernels.cute.mla_cases import SCALE, Case, check, check_left

GRID: dict[str, tuple[Any, ...]] = {
    "batch": (1, 3, 33, 128),
    "length": (0, 1, 63, 64, 65, 1000, 8193, 131072),  # of the first sequence
    "heads": (1, 6, 16, 64, 128),
    "query_len": (1, 2, 4, 8),
    "page_size": (16, 64, 128),
    "num_workers": (1, 2, 7, None),
}


def pairwise(grid: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Cases in which any two values of two parameters meet."""
    names = list(grid)
    random = Random(0)
    places = {name: range(len(grid[name])) for name in names}
    missing = {frozenset(((a, x), (b, y))) for a, b in combinations(names, 2) for x, y in product(places[a], places[b])}
    cases = []
    while missing:
        chosen = dict(random.choice(sorted(missing, key=sorted)))
        for name in names:
            if name not in chosen:
                gains = [
                    sum(frozenset(((name, idx), old)) in missing for old in chosen.items()) for idx in places[name]
                ]
                chosen[name] = gains.index(max(gains))
        missing -= {frozenset(pair) for pair in combinations(chosen.items(), 2)}
        cases.append({name: grid[name][chosen[name]] for name in names})
    return cases


@pytest.mark.parametrize(("rows", "page_size", "pair"), [(16, 64, False), (64, 16, True)])
def test_variants_compile_without_a_gpu(rows: int, page_size: int, pair: bool, tmp_path: Path) -> None:
    check_ptx(Variant(rows=rows, page_size=page_size, dtype=torch.bfloat16, pair=pair), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("rows", op.ROW_COUNTS)
def test_all_variants_compile_without_a_gpu(rows: int, tmp_path: Path) -> None:
    for page_size, dtype, pair in product(op.PAGE_SIZES, (torch.bfloat16, torch.float16), (False, True)):
        if rows == 64 or not pair:
            check_ptx(Variant(rows=rows, page_size=page_size, dtype=dtype, pair=pair), tmp_path)


def check_ptx(variant: Variant, folder: Path) -> None:
    ptx = op.compiled(variant, f"--gpu-arch sm_90a --keep-ptx --dump-dir {folder}").__ptx__  # type: ignore[attr-defined]
    assert ".target sm_90a" in ptx
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor.3d" in ptx
    assert ("multicast::cluster" in ptx) == variant.pair
    assert "ld.relaxed.gpu.global.v4.b32" in ptx  # 16 bytes of a part
    assert "griddepcontrol.wait" in ptx
    if variant.rows == 64:  # 64 of a tile of either warpgroup; those of the merge come after the last product
        assert ptx[: ptx.rindex("wgmma.mma_async")].count("ex2.approx") < 128


def test_rows_are_padded_to_a_variant() -> None:
    assert [op.choose_rows(rows) for rows in (1, 8, 9, 32, 33, 64, 65, 1024)] == [8, 8, 16, 32, 64, 64, 64, 64]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("rows", [rows for rows in op.ROW_COUNTS if rows < mla_shared_tiles.NUM_ROWS])
def test_a_slot_of_the_ring_never_changes_hands(rows: int, narrow: bool) -> None:
    """Two warpgroups take alternate tiles and know a phase by its parity alone, see attend_few_rows."""
    variant = Variant(rows=rows, page_size=64, dtype=torch.bfloat16, narrow=narrow)
    slots_of_tile = mla_operands.SLOTS_OF_TILE if narrow else mla_few_rows.SLOTS_OF_TILE
    owners: dict[int, set[int]] = {}
    for idx in range(20 * variant.num_slots):
        owners.setdefault(idx % variant.num_slots, set()).add(idx // slots_of_tile % 2)
    assert all(len(groups) == 1 for groups in owners.values())


class Unused(op.Workspace):
    """For calls that are refused before they reach a GPU."""

    def __init__(self) -> None:
        self.num_ctas = 132
        self.address = 0


def test_what_no_variant_takes_is_refused() -> None:
    q, rows = torch.zeros(2, 16, 576, dtype=torch.bfloat16), torch.zeros(64, 576, dtype=torch.bfloat16)
    table, lens = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    out = torch.zeros(2, 16, 512, dtype=torch.bfloat16)

    def run(
        q: Tensor = q, out: Tensor = out, page_size: int = 64, query_len: int = 1, num_workers: int | None = None
    ) -> None:
        op.mla_decode(
            q,
            rows,
            table,
            lens,
            page_size=page_size,
            query_len=query_len,
            scale=1.0,
            workspace=Unused(),
            out=out,
            num_workers=num_workers,
        )

    wrong: dict[str, Any]
    for wrong in (
        {"page_size": 24},
        {"query_len": 2},
        {"q": q.float()},
        {"q": q[..., :512].contiguous()},
        {"out": out[..., :256].contiguous()},
        {"q": torch.zeros(2, 129, 576, dtype=torch.bfloat16)},
    ):
        with pytest.raises(ValueError, match="mla_decode: q"):
            run(**wrong)
    for num_workers in (0, 133):
        with pytest.raises(ValueError, match=f"num_workers is {num_workers}, this device has room for 1 to 132"):
            run(num_workers=num_workers)


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", pairwise(GRID), ids=lambda chosen: "-".join(map(str, chosen.values())))
def test_against_float64(chosen: dict[str, Any]) -> None:
    """The other sequences are shorter than 900 tokens."""
    batch = chosen.pop("batch")
    num_workers = chosen.pop("num_workers")
    lens = [chosen.pop("length"), *(idx * 97 % 900 for idx in range(1, batch))]
    case = Case.make(lens, **chosen)
    check(case, case.workspace(), num_workers)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 16, 32, 64, 128])
def test_float16(heads: int) -> None:
    case = Case.make([700, 3, 0, 5000], heads=heads, dtype=torch.float16)
    check(case, case.workspace())


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_interleaved_layers(heads: int) -> None:
    case = Case.make([100, 700], heads=heads, page_size=16, layers=3, layer=2)
    check(case, case.workspace())


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_sequences_in_any_number_of_parts(heads: int) -> None:
    """Up to as many as there is room for; each launch gives the same bits."""
    for lens in ([8193], [5000, 300], [1, 63, 0, 8193, 70, 2000]):
        case = Case.make(lens, heads=heads)
        space = case.workspace()
        most = space.num_ctas // -(-heads // 64)
        for num_workers in (1, 2, 7, most // 2, most):
            check(case, space, num_workers)
            first, _ = case.run(space, num_workers)
            assert all(torch.equal(first, case.run(space, num_workers)[0]) for _ in range(20))
        with pytest.raises(ValueError, match=f"num_workers is {most + 1}"):
            case.run(space, most + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("batch", [64, 128])
def test_many_turns_of_the_ring(batch: int, query_len: int) -> None:
    """Were a slot read before it is full, then seldom, and where many tiles follow each other."""
    case = Case.make([8192] * batch, query_len=query_len)
    space = case.workspace()
    check(case, space)
    first = case.run(space)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(case.run(space), first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_launches_side_by_side(heads: int) -> None:
    """Each of two streams may hold some of the multiprocessors while it waits for others."""
    cases = [Case.make(lens, heads=heads) for lens in ([8000], [3000, 5000])]
    spaces = [case.workspace() for case in cases]
    expected = [case.run(space)[0] for case, space in zip(cases, spaces, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    outs: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for idx, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[idx].append(cases[idx].run(spaces[idx])[0])
    torch.cuda.synchronize()
    for idx, space in enumerate(spaces):
        assert all(torch.equal(out, expected[idx]) for out in outs[idx])
        check_left(space)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_whoever_has_not_waited_is_stood_in_for(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_clerk, "_PATIENCE", 1)
    monkeypatch.setattr(op, "compiled", lambda variant: op._compile(variant))
    op._prepare.cache_clear()
    for lens in ([8193], [5000, 300], [1, 63, 0, 8193, 70, 2000]):
        case = Case.make(lens, heads=heads)
        space = case.workspace()
        for _ in range(10):
            check(case, space)
    op._prepare.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_follows_lengths_and_tables(heads: int) -> None:
    cases = [Case.make(lens, heads=heads) for lens in ([5, 900, 64], [3000, 0, 1], [64, 64, 129], [0, 0, 0])]
    space = cases[0].workspace()
    width = max(case.table.shape[1] for case in cases)
    size = max(len(case.rows) for case in cases)
    static = Case(
        q=torch.zeros_like(cases[0].q),
        rows=torch.zeros(size, 576, dtype=torch.bfloat16, device="cuda"),
        table=torch.zeros(3, width, dtype=torch.int32, device="cuda"),
        lens=torch.ones(3, dtype=torch.int32, device="cuda"),
        page_size=64,
        query_len=1,
    )
    static.run(space)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = static.run(space)
    for case in (*cases, cases[0]):
        static.q.copy_(case.q)
        static.rows[: len(case.rows)].copy_(case.rows)
        static.table.fill_(-1)[:, : case.table.shape[1]].copy_(case.table)
        static.lens.copy_(case.lens)
        graph.replay()
        once_out, once_lse = case.run(space)
        assert torch.equal(out, once_out)
        assert torch.equal(lse, once_lse)


@pytest.mark.gpu
def test_what_was_prepared_serves_all_layers() -> None:
    case = Case.make([300, 0, 65], layers=2, layer=1)
    space = case.workspace()
    expected, expected_lse = case.run(space)
    prepared = op.Decode(
        case.q,
        case.rows,
        case.table,
        case.lens,
        page_size=case.page_size,
        query_len=1,
        scale=SCALE,
        workspace=space,
        layers=2,
    )
    out = torch.full_like(expected, float("nan"))
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        prepared(case.q, case.rows, out, layer=1)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(out, expected) and torch.equal(prepared.lse.view_as(expected_lse), expected_lse)
    case.lens.zero_()  # lengths are those at the launch
    prepared(case.q, case.rows, out, layer=1)
    assert not out.any() and prepared.lse.isneginf().all()
    with pytest.raises(ValueError, match="is not"):
        prepared(case.q[:2], case.rows, out, layer=1)
    with pytest.raises(ValueError, match="isn't aligned"):
        prepared(case.q, case.rows.flatten()[1:-575].view(-1, 576), out, layer=1)
