"""Paged attention: prefill, extend and decode in one step, against a plain formula on unpaged keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.dispatch import Library, Target
from dist_infer.kernels.paged_attention import LIBRARIES, PlanFunction, plan_paged_attention
from dist_infer.kernels.phases import take_sequences
from dist_infer.kernels.reference import paged_attention as reference
from tests.kernels.aot import compile_ahead
from tests.kernels.captured import captured
from tests.kernels.library_runs import ALL_DTYPES, library_runs, named
from tests.yardstick import check_error, check_rounded_once

SCALE = 0.3

# (query length, key length) of each sequence
STEPS = {
    "nothing": [],
    "one empty": [(1, 0)],
    "one token": [(1, 1)],
    "decode": [(1, 1), (1, 63), (1, 129), (1, 64), (1, 65), (1, 5)],
    "decode alike": [(1, 33), (1, 40), (1, 64)],
    "decode with empty": [(1, 17), (1, 0), (1, 129)],
    "prefill": [(63, 63), (2, 2), (129, 129)],
    "extend": [(63, 129), (2, 63), (128, 129)],
    "all kinds": [(1, 129), (63, 63), (1, 0), (1, 1), (17, 129), (1, 63), (2, 2)],
}


@dataclass
class Case:
    """One step with its paged tensors and the same keys and values in order."""

    step: PagedStep
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    keys: list[Tensor]  # [kv_len, K, H] of each sequence
    values: list[Tensor]
    lens: Sequence[tuple[int, int]]


def make_case(
    lens: Sequence[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    filler: float = torch.nan,
) -> Case:
    """What no sequence owns holds `filler`: unused pages and the rest of last pages."""
    generator = torch.Generator().manual_seed(17)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    num_pages = [-(-kv_len // block_size) for _, kv_len in lens]
    owners = torch.randperm(sum(num_pages) + 2, generator=generator).tolist()
    page_table = np.full((len(lens), max(num_pages, default=0) + 1), -1, np.int32)
    caches = [
        torch.full((len(owners) * block_size, kv_heads, head_dim), filler, dtype=dtype, device=device) for _ in range(2)
    ]
    tokens: list[list[Tensor]] = [[], []]
    for row, (_, kv_len), count in zip(page_table, lens, num_pages, strict=True):
        row[:count] = [owners.pop() for _ in range(count)]
        flat = [int(row[i // block_size]) * block_size + i % block_size for i in range(kv_len)]
        for cache, parts in zip(caches, tokens, strict=True):
            parts.append(random(kv_len, kv_heads, head_dim))
            cache[flat] = parts[-1]
    query_start = np.concatenate(([0], np.cumsum([n for n, _ in lens]))).astype(np.int32)
    kv_lens = np.array([n for _, n in lens], np.int32)
    step = PagedStep(
        query_start=torch.from_numpy(query_start).to(device),
        kv_lens=torch.from_numpy(kv_lens).to(device),
        page_table=torch.from_numpy(page_table).to(device),
        block_size=block_size,
        host_query_start=query_start,
        host_kv_lens=kv_lens,
    )
    return Case(step, random(step.num_tokens, heads, head_dim), caches[0], caches[1], tokens[0], tokens[1], lens)


def formula(case: Case, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Sequence by sequence, everything in `dtype` with softmax in at least float32."""
    out = torch.zeros_like(case.q, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    row = 0
    for (num_queries, kv_len), keys, values in zip(case.lens, case.keys, case.values, strict=True):
        rows = slice(row, row + num_queries)
        row += num_queries
        if kv_len == 0:
            continue
        group_len = case.q.shape[1] // keys.shape[1]
        q, k, v = (x.to(dtype).transpose(0, 1) for x in (case.q[rows], keys, values))
        k, v = (x.repeat_interleave(group_len, 0) for x in (k, v))
        unseen = torch.ones(num_queries, kv_len, dtype=torch.bool, device=q.device).triu(kv_len - num_queries + 1)
        if window is not None:
            unseen |= torch.ones_like(unseen).tril(kv_len - num_queries - window)
        scores = (q @ k.transpose(1, 2) * SCALE).masked_fill(unseen, -torch.inf)
        out[rows] = (scores.to(wide).softmax(-1).to(dtype) @ v).transpose(0, 1)
    return out


def attend(case: Case, library: Library[PlanFunction], window: int | None = None) -> Tensor:
    num_kv_heads = case.k_cache.shape[1]
    planned = plan_paged_attention(case.step, num_kv_heads=num_kv_heads, scale=SCALE, window=window, library=library)
    return planned(case.q, case.k_cache, case.v_cache)


# heads, KV heads, head dim, block size
GEOMETRIES = {
    torch.float64: (3, 1, 6, 4),
    torch.float32: (4, 2, 8, 16),
    torch.bfloat16: (2, 2, 16, 1),
    torch.float16: (1, 1, 8, 7),
}


@library_runs(LIBRARIES, ALL_DTYPES)
@pytest.mark.parametrize("name", STEPS)
def test_against_the_formula(library: Library[PlanFunction], device: str, dtype: torch.dtype, name: str) -> None:
    """NaN in every slot that no sequence owns: it must not be seen."""
    heads, kv_heads, head_dim, block_size = GEOMETRIES[dtype]
    case = make_case(
        STEPS[name],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    out = attend(case, library)
    assert out.is_contiguous()
    truth = formula(case, torch.float64)
    check_error(out, truth, formula(case, dtype))
    if library.name == "reference":
        check_rounded_once(out, truth)


@library_runs(LIBRARIES, [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 600])
def test_alone_and_in_a_batch_the_bits_are_the_same(
    library: Library[PlanFunction], device: str, dtype: torch.dtype, window: int | None
) -> None:
    """Of sequences of one split, of several, and of several queries; a GPU has more of them."""
    lens = [(1, 700), (1, 65), (3, 70), (1, 0), (5, 5), (1, 513)]
    lens = [*lens, *([(1, 1100), *((1, 20000 + idx) for idx in range(40))] if device == "cuda" else [])]
    case = make_case(lens, heads=4, kv_heads=2, head_dim=16, block_size=16, dtype=dtype, device=device)

    def attend_invariantly(step: PagedStep, q: Tensor) -> Tensor:
        planned = plan_paged_attention(
            step, num_kv_heads=2, scale=SCALE, window=window, library=library, batch_invariant=True
        )
        return planned(q, case.k_cache, case.v_cache)

    out = attend_invariantly(case.step, case.q)
    check_error(out, formula(case, torch.float64, window), formula(case, dtype, window))
    for seq in range(6):
        rows, alone = take_sequences(case.step, [seq])
        own = slice(*case.step.host_query_start[seq : seq + 2].tolist())
        assert torch.equal(attend_invariantly(alone, case.q.index_select(0, rows)), out[own]), lens[seq]


@library_runs(LIBRARIES)
def test_no_keys_give_zeros_in_a_cache_without_pages(library: Library[PlanFunction], device: str) -> None:
    """The dummy token of an idle group: a page table of width 0 and a cache full of NaN."""
    one = torch.tensor([0, 1], dtype=torch.int32, device=device)
    step = PagedStep(
        query_start=one,
        kv_lens=one[:1],
        page_table=torch.empty(1, 0, dtype=torch.int32, device=device),
        block_size=4,
        host_query_start=np.array([0, 1], np.int32),
        host_kv_lens=np.zeros(1, np.int32),
    )
    cache = torch.full((4, 1, 2), torch.nan, device=device)
    planned = plan_paged_attention(step, num_kv_heads=1, scale=1.0, library=library)
    assert planned(torch.ones(1, 2, 2, device=device), cache, cache).tolist() == [[[0.0, 0.0], [0.0, 0.0]]]


@library_runs(LIBRARIES)
def test_nan_of_one_sequence_stays_there(library: Library[PlanFunction], device: str) -> None:
    case = make_case(
        STEPS["all kinds"], heads=2, kv_heads=1, head_dim=4, block_size=4, dtype=torch.float32, device=device
    )
    clean = attend(case, library)
    flat = int(case.step.page_table[0, 0]) * 4
    case.k_cache[flat], case.v_cache[flat] = torch.nan, torch.nan
    out = attend(case, library)
    assert bool(out[0].isnan().all())
    assert torch.equal(out[1:], clean[1:])


@library_runs(LIBRARIES, [torch.float32, torch.bfloat16], names=["triton"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), [(3, 1, 6, 16), (10, 2, 24, 5)])
def test_decodes_follow_the_lengths_on_the_device(
    library: Library[PlanFunction],
    device: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    """The host knows a bound only; on a GPU the launches are captured once, for lengths that come later."""
    small = [(1, 200), (1, 64), (1, 1), (1, 0)]
    large = [(1, 4097), (1, 64), (1, 63), (1, 2000)]
    cases = [
        make_case(
            lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device=device
        )
        for lens in ([(1, 129), (1, 0), (1, 65), (1, 30)], small if device == "cpu" else large, [(1, 0)] * 4)
    ]
    width = max(case.step.page_table.shape[1] for case in cases)
    num_slots = max(len(case.k_cache) for case in cases)
    static = make_case(
        [(1, 1)] * 4,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    static.step = replace(
        static.step,
        page_table=torch.zeros(4, width, dtype=torch.int32, device=device),
        host_kv_lens=np.full(4, width * block_size, np.int32),
    )
    static.k_cache, static.v_cache = (
        torch.full((num_slots, kv_heads, head_dim), torch.nan, dtype=dtype, device=device) for _ in range(2)
    )
    run = captured(lambda: attend(static, library), device)
    for case in cases:
        static.step.kv_lens.copy_(case.step.kv_lens)
        static.step.page_table.fill_(-1)[:, : case.step.page_table.shape[1]] = case.step.page_table
        for into, new in ((static.k_cache, case.k_cache), (static.v_cache, case.v_cache)):
            into.fill_(torch.nan)[: len(new)] = new
        static.q.copy_(case.q)
        check_error(run(), formula(case, torch.float64), formula(case, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("new", [1, 63, 512])
@pytest.mark.parametrize("window", [64, 1000, 4096])
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "block_size"),
    [(torch.bfloat16, 8, 2, 128, 16), (torch.float16, 3, 1, 192, 64), (torch.float32, 4, 1, 96, 16)],
)
def test_windows_of_histories(
    window: int, new: int, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    """As `test_histories`, each query with a window."""
    lens = [(new, 5000 + new), (1, 300), (33, 33), (1, 0)]
    case = make_case(
        lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda"
    )
    out = attend(case, named(LIBRARIES, "triton"), window)
    check_error(out, formula(case, torch.float64, window), formula(case, dtype, window))


@pytest.mark.gpu
@pytest.mark.parametrize("new", [1, 63, 512])
@pytest.mark.parametrize("history", [1, 63, 64, 4097])
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "block_size"),
    [
        (torch.bfloat16, 8, 2, 128, 16),
        (torch.bfloat16, 7, 1, 80, 32),
        (torch.float16, 2, 2, 64, 1),
        (torch.float16, 3, 1, 192, 64),
        (torch.bfloat16, 8, 1, 256, 16),
        (torch.float32, 4, 1, 96, 16),
    ],
)
def test_histories(
    history: int, new: int, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    """New tokens on a history, beside a decode, a fresh prompt and a padded row."""
    lens = [(new, history + new), (1, 300), (33, 33), (1, 0)]
    case = make_case(
        lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda"
    )
    check_error(attend(case, named(LIBRARIES, "triton")), formula(case, torch.float64), formula(case, dtype))


@pytest.mark.parametrize(("new", "window"), [("one", None), ("many", None), ("many", 4096)])
def test_compiled_ahead_of_time(new: str, window: int | None) -> None:
    """Keys and values come by 16 bytes; many queries use the wide matrix instructions of Hopper."""
    from dist_infer.kernels.triton import paged_decode, paged_prefill

    signature = {"q": "*bf16", "out": "*bf16", "scale": "fp32", "query_start": "*i32", "kv_lens": "*i32"}
    signature |= dict.fromkeys(("q_token_stride", "q_head_stride"), "i32:16")
    constexprs = {"GROUP": 4, "HEAD_DIM": 128, "DIM": 128, "WINDOW": window}
    if new == "one":
        signature |= dict.fromkeys(("k_cache", "v_cache"), "*bf16") | {"page_table": "*i32", "table_stride": "i32"}
        signature |= dict.fromkeys(("slot_stride", "kv_head_stride"), "i32:16") | {"num_splits": "i32"}
        signature |= dict.fromkeys(("split_total", "split_largest", "split_weight_sum"), "*fp32")
        constexprs |= {"ROWS": 16, "KEYS": 64, "BLOCK_SIZE": 16, "OVERLAP": True, "IS_FIXED": False}
        compiled = compile_ahead(paged_decode._single_kernel, signature, constexprs, num_warps=4, num_stages=5)
    else:
        shape = paged_prefill.tile_shape(torch.bfloat16, 128, 4)
        signature |= dict.fromkeys(("k_rows", "v_rows"), f"tensordesc<bf16[{shape.keys},128]>")
        signature |= {"tiles": "*i32", "num_kv_heads": "i32", "num_rows": "i32", "out_token_stride": "i32:16"}
        constexprs |= {"ROWS": shape.rows, "KEYS": shape.keys}
        options = {"num_warps": shape.warps, "num_stages": 2}
        compiled = compile_ahead(paged_prefill._tiles_kernel, signature, constexprs, **options)
    ptx = compiled.asm["ptx"]
    assert ("cp.async.cg.shared.global" if new == "one" else "cp.async.bulk.tensor") in ptx
    assert ("wgmma" in ptx) == (new == "many")
    assert compiled.spilled_bytes <= (0 if new == "one" else 64)  # a few addresses, outside of the loop


@library_runs(LIBRARIES, names=["triton"])
def test_parts_of_sequences_and_heads_change_nothing(
    library: Library[PlanFunction], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are gathered for a few sequences and heads at a time."""
    from dist_infer.kernels.triton import attention_tiles, paged_prefill

    case = make_case(STEPS["extend"], heads=6, kv_heads=3, head_dim=8, block_size=4, dtype=torch.float32, device=device)
    whole = attend(case, library)
    monkeypatch.setattr(attention_tiles, "_MAX_KEYS", 100)
    monkeypatch.setattr(paged_prefill, "_MAX_GATHERED_BYTES", 2 * 2 * 128 * 16 * 4)
    assert torch.equal(attend(case, library), whole)


@pytest.mark.parametrize("max_scores", [1, 129, 1000])
def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch, max_scores: int) -> None:
    case = make_case(
        STEPS["all kinds"], heads=4, kv_heads=2, head_dim=8, block_size=4, dtype=torch.float64, device="cpu"
    )
    whole = attend(case, LIBRARIES[-1])
    monkeypatch.setattr(reference, "_MAX_SCORES", max_scores)
    torch.testing.assert_close(attend(case, LIBRARIES[-1]), whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("window", [1, 2, 33, 128, 129, 1000])
@pytest.mark.parametrize("step", STEPS)
def test_a_window_hides_what_is_older(monkeypatch: pytest.MonkeyPatch, step: str, window: int) -> None:
    case = make_case(STEPS[step], heads=4, kv_heads=2, head_dim=8, block_size=4, dtype=torch.float64, device="cpu")
    for max_scores in (1 << 20, 300):
        monkeypatch.setattr(reference, "_MAX_SCORES", max_scores)
        planned = plan_paged_attention(case.step, num_kv_heads=2, scale=SCALE, window=window, library=LIBRARIES[-1])
        out = planned(case.q, case.k_cache, case.v_cache)
        torch.testing.assert_close(out, formula(case, torch.float64, window), rtol=0, atol=1e-13)


def test_only_the_reference_has_wide_heads() -> None:
    target = Target(device=torch.device("cuda"), dtype=torch.bfloat16, geometry={"head_dim": 512})
    assert [library.is_available(target) for library in LIBRARIES][-1] is None
    assert named(LIBRARIES, "triton").is_available(target) == "takes heads of up to 256 channels, not 512"


@library_runs(LIBRARIES, [torch.float32, torch.bfloat16], names=["triton"])
@pytest.mark.parametrize("window", [1, 100])
def test_a_window_in_tiles_and_splits(
    library: Library[PlanFunction], device: str, dtype: torch.dtype, window: int
) -> None:
    """Ends of the window inside of blocks and on their borders, rows that see nothing of their tile's first keys."""
    lens = [(1, 200), (70, 250), (1, 0), (33, 33), (1, 64), (2, 131)]
    case = make_case(lens, heads=4, kv_heads=2, head_dim=8, block_size=4, dtype=dtype, device=device)
    out = attend(case, library, window)
    check_error(out, formula(case, torch.float64, window), formula(case, dtype, window))


@library_runs(LIBRARIES, names=["triton"])
def test_keys_older_than_the_window_are_not_read(library: Library[PlanFunction], device: str) -> None:
    """NaN in pages that no query sees any more: their pages may be another's by then."""
    lens, window = [(1, 200), (40, 300)], 64
    case = make_case(lens, heads=2, kv_heads=1, head_dim=8, block_size=4, dtype=torch.float32, device=device)
    before = attend(case, library, window)
    for row, (num_queries, kv_len) in enumerate(lens):
        oldest = (kv_len - num_queries + 1 - window) // 64 * 64  # whole tiles are left out
        for page in case.step.page_table[row, : oldest // 4].tolist():
            for cache in (case.k_cache, case.v_cache):
                cache[page * 4 : page * 4 + 4] = torch.nan
    assert torch.equal(attend(case, library, window), before)


@library_runs(LIBRARIES)
def test_large_scores_do_not_overflow(library: Library[PlanFunction], device: str) -> None:
    case = make_case(
        [(1, 5), (3, 7)], heads=1, kv_heads=1, head_dim=4, block_size=4, dtype=torch.float32, device=device
    )
    case.q *= 1e4
    out = attend(case, library)
    torch.testing.assert_close(out.double(), formula(case, torch.float64), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("lens", "message"),
    [
        ([(2, 1)], r"kv_lens \[1\] are below the query lengths \[2\]"),
        ([(1, 9)], r"above the 8 slots of the page table"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lens: list[tuple[int, int]], message: str) -> None:
    case = make_case([(1, 4)], heads=1, kv_heads=1, head_dim=4, block_size=4, dtype=torch.float32, device="cpu")
    wrong = PagedStep(
        query_start=case.step.query_start,
        kv_lens=case.step.kv_lens,
        page_table=case.step.page_table,
        block_size=4,
        host_query_start=np.array([0, lens[0][0]], np.int32),
        host_kv_lens=np.array([lens[0][1]], np.int32),
    )
    with pytest.raises(ValueError, match=message):
        plan_paged_attention(wrong, num_kv_heads=1, scale=1.0, library=LIBRARIES[-1])


def test_tensors_that_do_not_fit_are_refused() -> None:
    case = make_case([(1, 4)], heads=2, kv_heads=1, head_dim=4, block_size=4, dtype=torch.float32, device="cpu")
    planned = plan_paged_attention(case.step, num_kv_heads=1, scale=1.0, library=LIBRARIES[-1])
    with pytest.raises(ValueError, match="shapes of q, k_cache, v_cache"):
        planned(case.q, case.k_cache, case.v_cache[:, :, :2])
    with pytest.raises(ValueError, match=r"cache torch.float64, 1 tokens"):
        planned(case.q, case.k_cache.double(), case.v_cache.double())
    with pytest.raises(ValueError, match="1 tokens"):
        planned(torch.ones(2, 2, 4), case.k_cache, case.v_cache)
