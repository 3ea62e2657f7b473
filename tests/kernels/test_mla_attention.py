"""Latent attention: prefill, extend and decode in one step, against plain attention on expanded keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.dispatch import Library, Phase, Target
from dist_infer.kernels.mla_attention import LIBRARIES, PlanFunction, plan_mla_attention
from dist_infer.kernels.phases import Attend, take_sequences
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.kernels.reference import mla_attention as reference
from dist_infer.kernels.reference.quantize import quantize as reference_quantize
from dist_infer.kernels.reference.quantize import to_e4m3
from tests.kernels.aot import compile_ahead
from tests.kernels.captured import captured
from tests.kernels.library_runs import library_runs, named
from tests.yardstick import check_error

N, L = 3, 12  # heads and latent channels
SCALE = 0.3
# (query length, key length) of each sequence
STEPS = {
    "nothing": [],
    "one empty": [(1, 0)],
    "decode": [(1, 1), (1, 63), (1, 129), (1, 64), (1, 65), (1, 0)],
    "prefill": [(33, 33), (2, 2), (65, 65)],
    "extend": [(31, 97), (2, 63), (64, 65)],
    "all kinds": [(1, 129), (63, 63), (1, 0), (1, 1), (17, 129), (1, 63), (2, 2)],
}


@dataclass
class Case:
    step: PagedStep
    q: Tensor
    cache: Tensor
    kv_b: Tensor
    rows: list[Tensor]  # [kv_len, L + R] of each sequence
    lens: Sequence[tuple[int, int]]
    cache_scale: Tensor | None = None


@dataclass(frozen=True)
class Geometry:
    heads: int = 3
    plain: int = 10
    rotated: int = 4
    value: int = 6
    latent: int = 12
    block_size: int = 4


SMALL = Geometry()


def make_case(
    lens: Sequence[tuple[int, int]],
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    geometry: Geometry = SMALL,
) -> Case:
    """What no sequence owns is NaN: unused pages and the rest of last pages."""
    generator = torch.Generator().manual_seed(5)
    block_size, latent_dim = geometry.block_size, geometry.latent + geometry.rotated

    def random(*shape: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).to(device)

    num_pages = [-(-kv_len // block_size) for _, kv_len in lens]
    owners = torch.randperm(sum(num_pages) + 2, generator=generator).tolist()
    page_table = np.full((len(lens), max(num_pages, default=0) + 1), -1, np.int32)
    cache = torch.full((len(owners) * block_size, latent_dim), torch.nan, dtype=dtype, device=device)
    rows = []
    for table, (_, kv_len), count in zip(page_table, lens, num_pages, strict=True):
        table[:count] = [owners.pop() for _ in range(count)]
        rows.append(random(kv_len, latent_dim))
        cache[[int(table[i // block_size]) * block_size + i % block_size for i in range(kv_len)]] = rows[-1]
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
    q = random(int(query_start[-1]), geometry.heads, geometry.plain + geometry.rotated)
    expanded = (geometry.heads, geometry.plain + geometry.value, geometry.latent)
    return Case(step, q, cache, random(*expanded, std=(12 / geometry.latent) ** 0.5), rows, lens)


def dense(case: Case, dtype: torch.dtype) -> Tensor:
    """Sequence by sequence, everything in `dtype` with softmax in at least float32."""
    latent_dim = case.kv_b.shape[2]
    plain_dim = case.q.shape[2] - (case.cache.shape[1] - latent_dim)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight = case.kv_b.to(dtype).transpose(1, 2)
    out = torch.zeros(*case.q.shape[:2], weight.shape[2] - plain_dim, dtype=dtype, device=case.q.device)
    row = 0
    for (num_queries, kv_len), cached in zip(case.lens, case.rows, strict=True):
        queries = slice(row, row + num_queries)
        row += num_queries
        if kv_len == 0:
            continue
        latent, rotated = cached.to(dtype).split_with_sizes((latent_dim, cached.shape[1] - latent_dim), 1)
        made = latent @ weight  # [N, K, P + V]
        keys = torch.cat([made[..., :plain_dim], rotated.expand(len(made), -1, -1)], 2)
        q = case.q[queries].to(dtype).transpose(0, 1)
        unseen = torch.ones(num_queries, kv_len, dtype=torch.bool, device=q.device).triu(kv_len - num_queries + 1)
        scores = (q @ keys.transpose(1, 2) * SCALE).masked_fill(unseen, -torch.inf)
        out[queries] = (scores.to(wide).softmax(-1).to(dtype) @ made[..., plain_dim:]).transpose(0, 1)
    return out


def in_any_order(case: Case, dtype: torch.dtype, truth: Tensor) -> Tensor:
    """`dense` in `dtype` with the latent dims in that of some orders which errs most: one alone may be lucky."""
    latent_dim, found = case.kv_b.shape[2], [dense(case, dtype)]
    for seed in range(4):
        order = torch.randperm(latent_dim, generator=torch.Generator().manual_seed(seed)).to(case.q.device)
        rows = [torch.cat((row[:, :latent_dim][:, order], row[:, latent_dim:]), 1) for row in case.rows]
        found.append(dense(replace(case, kv_b=case.kv_b[:, :, order], rows=rows), dtype))
    return max(found, key=lambda out: (out.double() - truth).abs().max().item() if out.numel() else 0.0)


def attend(case: Case, library: Library[PlanFunction]) -> Tensor:
    planned = plan_mla_attention(case.step, kv_lora_rank=case.kv_b.shape[2], scale=SCALE, library=library)
    return planned(case.q, case.cache, case.kv_b, case.cache_scale)


def narrowed(case: Case, scale: float) -> Case:
    """The same with a cache of E4M3, and as the rows what its bytes stand for."""
    cache_scale = torch.tensor([scale], device=case.q.device)
    bytes_of = [to_e4m3(rows.float() / scale) for rows in (case.cache, *case.rows)]
    rows = [narrow.to(case.q.dtype) * scale for narrow in bytes_of[1:]]
    return replace(case, cache=bytes_of[0], rows=rows, cache_scale=cache_scale)


@library_runs(LIBRARIES, [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", ["decode", "all kinds"])
def test_a_cache_of_e4m3(library: Library[PlanFunction], device: str, dtype: torch.dtype, lens: str) -> None:
    """Nothing but the cache is narrow: the truth is of its values. A scale of 2^k leaves them exact in every dtype."""
    case = narrowed(make_case(STEPS[lens], dtype, device), 0.5)
    truth = dense(case, torch.float64)
    check_error(attend(case, library), truth, in_any_order(case, dtype, truth))


def one_sequence(case: Case, seq: int) -> Case:
    """The same alone in its step."""
    rows, step = take_sequences(case.step, [seq])
    return replace(case, step=step, q=case.q.index_select(0, rows), lens=[case.lens[seq]], rows=[case.rows[seq]])


def attend_invariantly(case: Case, library: Library[PlanFunction]) -> Tensor:
    planned = plan_mla_attention(
        case.step, kv_lora_rank=case.kv_b.shape[2], scale=SCALE, library=library, batch_invariant=True
    )
    return planned(case.q, case.cache, case.kv_b, case.cache_scale)


@library_runs(LIBRARIES, [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("narrow", [False, True])
def test_alone_and_in_a_batch_the_bits_are_the_same(
    library: Library[PlanFunction], device: str, dtype: torch.dtype, narrow: bool
) -> None:
    """Of sequences of one split, of several, and of several queries."""
    if library.name == "triton" and dtype == torch.float32:
        geometry = {"kv_lora_rank": 12, "batch_invariant": 1}
        reason = library.is_available(Target(device=torch.device("cuda"), dtype=dtype, geometry=geometry))
        assert reason == "its products with kv_b in float32 depend on the batch"
        return
    lens = [(1, 700), (1, 65), (3, 70), (1, 1100), (1, 0), (5, 5), (1, 513)]
    lens = [*lens, *([(1, 20000 + idx) for idx in range(40)] if device == "cuda" else [])]
    case = make_case(lens, dtype, device, Geometry(block_size=16))
    case = narrowed(case, 0.5) if narrow else case
    out = attend_invariantly(case, library)
    check_error(out, dense(case, torch.float64), dense(case, dtype))
    for seq in range(7):
        rows = slice(*case.step.host_query_start[seq : seq + 2].tolist())
        assert torch.equal(attend_invariantly(one_sequence(case, seq), library), out[rows]), lens[seq]


def test_without_asking_the_batch_decides_where_a_sequence_is_cut() -> None:
    """The planted fault: the test above would see it."""
    case = make_case([(1, 700), (1, 65), (1, 1100)], torch.bfloat16, geometry=Geometry(block_size=16))
    library = named(LIBRARIES, "triton")
    alone = attend(one_sequence(case, 0), library)
    assert not torch.equal(attend(case, library)[:1], alone)


@library_runs(LIBRARIES, [torch.float32])
def test_any_scale_of_the_cache(library: Library[PlanFunction], device: str, dtype: torch.dtype) -> None:
    case = narrowed(make_case(STEPS["all kinds"], dtype, device), 0.3)
    assert case.cache_scale is not None
    out = attend(case, library)
    check_error(out, dense(case, torch.float64), dense(case, dtype))
    case.cache_scale.mul_(1.1)
    assert (attend(case, library) - out).abs().max() > 1e-3, "it is read anew"


@library_runs(LIBRARIES, [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", STEPS)
def test_against_expanded_keys(library: Library[PlanFunction], device: str, dtype: torch.dtype, lens: str) -> None:
    case = make_case(STEPS[lens], dtype, device)
    out = attend(case, library)
    assert out.is_contiguous()
    check_error(out, dense(case, torch.float64), dense(case, dtype))


@library_runs(LIBRARIES, [torch.float32, torch.bfloat16], names=["triton"])
@pytest.mark.parametrize("heads", [20])
def test_decodes_follow_the_lengths_on_the_device(
    library: Library[PlanFunction], device: str, dtype: torch.dtype, heads: int
) -> None:
    """The host knows a bound only; on a GPU the launches are captured once, for lengths that come later."""
    geometry = Geometry(heads=heads, block_size=16)
    small, large = [(1, 129), (1, 0), (1, 65), (1, 3)], [(1, 4097), (1, 64), (1, 63), (1, 2000)]
    steps = (small, [(1, 0)] * 4, [(1, 64), (1, 130), (1, 0), (1, 1)] if device == "cpu" else large, small)
    cases = [make_case(lens, dtype, device, geometry) for lens in steps]
    width = max(case.step.page_table.shape[1] for case in cases)
    static = make_case([(1, 1)] * 4, dtype, device, geometry)
    static.step = replace(
        static.step,
        page_table=torch.zeros(4, width, dtype=torch.int32, device=device),
        host_kv_lens=np.full(4, width * 16, np.int32),
    )
    static.cache = torch.full((max(len(case.cache) for case in cases), 16), torch.nan, dtype=dtype, device=device)
    run = captured(lambda: attend(static, library), device)
    for case in cases:
        static.step.kv_lens.copy_(case.step.kv_lens)
        static.step.page_table.fill_(-1)[:, : case.step.page_table.shape[1]] = case.step.page_table
        static.cache.fill_(torch.nan)[: len(case.cache)] = case.cache
        static.q.copy_(case.q)
        static.kv_b.copy_(case.kv_b)
        check_error(run(), dense(case, torch.float64), dense(case, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("new", [1, 63, 512])
@pytest.mark.parametrize("history", [1, 63, 64, 4097])
@pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, 16), (torch.float16, 40), (torch.float32, 3)])
def test_histories(history: int, new: int, dtype: torch.dtype, heads: int) -> None:
    """New tokens on a history in DeepSeek's geometry, beside a decode, a fresh prompt and a padded row."""
    lens = [(new, history + new), (1, 300), (33, 33), (1, 0)]
    geometry = Geometry(heads=heads, plain=128, rotated=64, value=128, latent=512, block_size=16)
    case = make_case(lens, dtype, "cuda", geometry)
    case.q *= 0.2
    check_error(attend(case, named(LIBRARIES, "triton")), dense(case, torch.float64), dense(case, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "narrow"), [(16, False), (128, False), (6, True), (16, True)])
def test_decodes_by_cute(heads: int, narrow: bool) -> None:
    lens = [(1, 300), (1, 0), (1, 5000), (1, 64), (1, 65)]
    geometry = Geometry(heads=heads, plain=128, rotated=64, value=128, latent=512, block_size=64)
    case = make_case(lens, torch.bfloat16, "cuda", geometry)
    case.q *= 0.2
    case = narrowed(case, 0.5) if narrow else case
    check_error(attend(case, named(LIBRARIES, "cute")), dense(case, torch.float64), dense(case, torch.bfloat16))


def test_what_cute_takes_of_a_narrow_cache() -> None:
    def reason(heads: int, dtype: torch.dtype) -> str | None:
        geometry = {"kv_lora_rank": 512, "rope_dim": 64, "heads": heads, "cache_bytes": 1}
        target = Target(device=torch.device("cpu"), dtype=dtype, geometry=geometry)
        return named(LIBRARIES, "cute").is_available(target)

    assert reason(16, torch.bfloat16) == reason(128, torch.bfloat16) == "needs a GPU, not cpu"
    assert reason(16, torch.float16) == "takes a cache of E4M3 with bfloat16, not torch.float16"


@library_runs(LIBRARIES, [torch.bfloat16])
@pytest.mark.parametrize("quant_format", [QuantFormat.FP8, QuantFormat.MXFP8, QuantFormat.MXFP8_LINEAR])
@pytest.mark.parametrize("lens", ["decode", "all kinds"])
def test_the_quantised_result_is_that_of_the_rounded_one(
    library: Library[PlanFunction], device: str, dtype: torch.dtype, quant_format: QuantFormat, lens: str
) -> None:
    case = make_case(STEPS[lens], dtype, device, Geometry(heads=4, value=32, block_size=16))
    planned = plan_mla_attention(case.step, kv_lora_rank=case.kv_b.shape[2], scale=SCALE, library=library)
    check_quantized(planned, case, quant_format)


@pytest.mark.gpu
@pytest.mark.parametrize("quant_format", [QuantFormat.FP8, QuantFormat.MXFP8, QuantFormat.MXFP8_LINEAR])
@pytest.mark.parametrize(("heads", "narrow"), [(16, False), (128, False), (16, True), (128, True)])
def test_quantised_results_by_cute(quant_format: QuantFormat, heads: int, narrow: bool) -> None:
    """Decodes alone, then beside a prompt, which another library computes."""
    geometry = Geometry(heads=heads, plain=128, rotated=64, value=128, latent=512, block_size=64)
    for lens in ([(1, 300), (1, 0), (1, 5000)], [(1, 300), (70, 90), (1, 64)]):
        case = make_case(lens, torch.bfloat16, "cuda", geometry)
        case = narrowed(case, 0.5) if narrow else case
        planned = plan_mla_attention(
            case.step,
            kv_lora_rank=512,
            scale=SCALE,
            library=named(LIBRARIES, "triton"),
            generation=named(LIBRARIES, "cute"),
        )
        check_quantized(planned, case, quant_format)


def check_quantized(planned: Attend, case: Case, quant_format: QuantFormat) -> None:
    """The bytes of `quantize` on what is attended, and nothing left of what was there."""
    rows = planned(case.q, case.cache, case.kv_b, case.cache_scale).flatten(1)
    scale = torch.tensor([0.02], device=rows.device) if quant_format is QuantFormat.FP8 else None
    expected = quant_format.empty(*rows.shape, device=rows.device, scale=scale)
    reference_quantize(rows, expected)
    found = quant_format.empty(*rows.shape, device=rows.device, scale=scale)
    found.data.view(torch.uint8).fill_(0x7F)
    if scale is None:
        found.scales.fill_(0xFF)
    planned(case.q, case.cache, case.kv_b, case.cache_scale, found)
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)


def test_a_carrier_that_does_not_fit_is_refused() -> None:
    case = make_case([(1, 5)], torch.float32)
    planned = plan_mla_attention(case.step, kv_lora_rank=12, scale=SCALE, library=named(LIBRARIES, "reference"))
    carrier = QuantFormat.MXFP8_LINEAR.empty(2, 32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"can't fill a quantised \[2, 32\]"):
        planned(case.q, case.cache, case.kv_b, None, carrier)


@library_runs(LIBRARIES, names=["triton"])
def test_parts_of_sequences_and_heads_change_nothing(
    library: Library[PlanFunction], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expanded keys are made for a few sequences and heads at a time."""
    from dist_infer.kernels.triton import attention_tiles, mla_expanded

    case = make_case(STEPS["extend"], torch.float32, device)
    whole = attend(case, library)
    monkeypatch.setattr(attention_tiles, "_MAX_KEYS", 100)
    monkeypatch.setattr(mla_expanded, "_MAX_EXPANDED_BYTES", 97 * 16 * 4 * 2)
    torch.testing.assert_close(attend(case, library), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("narrow", [False, True])
def test_compiled_ahead_of_time(narrow: bool) -> None:
    """Cached rows come by 16 bytes; the second product is a wide matrix instruction of Hopper, nothing spills."""
    from dist_infer.kernels.triton.mla_absorbed import _absorbed_kernel

    signature = dict.fromkeys(("folded", "cache", "out"), "*bf16") | {"scale": "fp32", "num_splits": "i32"}
    signature |= dict.fromkeys(("split_total", "split_largest", "split_weight_sum"), "*fp32")
    signature |= {"kv_lens": "*i32", "page_table": "*i32", "num_heads": "i32:16", "table_stride": "i32"}
    signature |= dict.fromkeys(("seq_stride", "head_stride", "slot_stride"), "i32:16")
    constexprs: dict[str, object] = {"ROTATED_DIM": 64, "LATENT_DIM": 512, "BLOCK_SIZE": 16, "HEADS": 16, "KEYS": 32}
    constexprs |= {"ROTATED_BLOCK": 64, "LATENT_BLOCK": 512, "OVERLAP": True, "HAS_SCALE": narrow, "IS_FIXED": False}
    if narrow:
        signature |= {"cache": "*fp8e4nv", "cache_scale": "*fp32"}
    else:
        constexprs["cache_scale"] = None
    warps, stages = (8, 3) if narrow else (4, 5)
    compiled = compile_ahead(_absorbed_kernel, signature, constexprs, num_warps=warps, num_stages=stages)
    assert ("ld.global.v4" if narrow else "cp.async.cg.shared.global") in compiled.asm["ptx"]
    assert "wgmma" in compiled.asm["ptx"]
    assert compiled.spilled_bytes == 0


@pytest.mark.parametrize("max_absorbed", [0, 1, 2, 1000])
def test_absorbed_and_expanded_agree(max_absorbed: int) -> None:
    case = make_case(STEPS["all kinds"])
    planned = reference.plan_mla_attention(case.step, kv_lora_rank=L, scale=SCALE, max_absorbed=max_absorbed)
    torch.testing.assert_close(planned(case.q, case.cache, case.kv_b), dense(case, torch.float64), rtol=0, atol=1e-12)


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(STEPS["extend"])
    monkeypatch.setattr(reference, "_MAX_SCORES", 300)
    planned = reference.plan_mla_attention(case.step, kv_lora_rank=L, scale=SCALE)
    torch.testing.assert_close(planned(case.q, case.cache, case.kv_b), dense(case, torch.float64), rtol=0, atol=1e-12)


def test_a_past_of_zero_is_seen() -> None:
    """The planted fault: new tokens only, as if nothing were cached."""
    case = make_case([(5, 9)])
    forgetful = replace(case.step, kv_lens=case.step.kv_lens - 4, host_kv_lens=case.step.host_kv_lens - 4)
    planned = reference.plan_mla_attention(forgetful, kv_lora_rank=L, scale=SCALE)
    assert (planned(case.q, case.cache, case.kv_b) - dense(case, torch.float64)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("lens", "message"),
    [([(3, 2)], "are below the query lengths"), ([(1, 9)], "are above the 8 slots")],
)
def test_steps_that_cannot_be_are_refused(lens: list[tuple[int, int]], message: str) -> None:
    case = make_case(lens)
    step = replace(case.step, page_table=case.step.page_table[:, :2])
    with pytest.raises(ValueError, match=message):
        plan_mla_attention(step, kv_lora_rank=L, scale=SCALE, library=LIBRARIES[-1])


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = make_case([(2, 5)])
    planned = plan_mla_attention(case.step, kv_lora_rank=L, scale=SCALE, library=LIBRARIES[-1])
    planned(case.q, case.cache, case.kv_b)
    for q, cache, kv_b in (
        (case.q[:1], case.cache, case.kv_b),
        (case.q[:, :2], case.cache, case.kv_b),
        (case.q, case.cache[:, :L], case.kv_b),
        (case.q, case.cache, case.kv_b[..., :5]),
        (case.q.float(), case.cache, case.kv_b),
        (case.q, case.cache.to(torch.float8_e4m3fn), case.kv_b),
    ):
        with pytest.raises(ValueError, match="don't fit a latent of 12 and 2 tokens"):
            planned(q, cache, kv_b)
    with pytest.raises(ValueError, match="don't fit a latent of 12 and 2 tokens"):
        planned(case.q, case.cache, case.kv_b, torch.ones(1))


def test_each_phase_by_a_library_of_its_own() -> None:
    """A library that is given the other phase's sequences would be found out."""

    def plan(step: PagedStep, *, kv_lora_rank: int, scale: float, batch_invariant: bool = False) -> Attend:
        assert {*np.diff(step.host_query_start)} <= {1}
        return reference.plan_mla_attention(step, kv_lora_rank=kv_lora_rank, scale=scale)

    generating: Library[PlanFunction] = Library(name="generating", function=plan, phases=(Phase.GENERATION,))
    for lens in ("all kinds", "decode", "prefill", "nothing"):
        case = make_case(STEPS[lens])
        planned = plan_mla_attention(
            case.step, kv_lora_rank=L, scale=SCALE, library=LIBRARIES[-1], generation=generating
        )
        assert torch.equal(planned(case.q, case.cache, case.kv_b), attend(case, LIBRARIES[-1]))


def test_pages_that_cute_does_not_take_are_the_next_ones() -> None:
    cute = named(LIBRARIES, "cute")
    assert cute.phases == (Phase.GENERATION,)
    assert cute.supports({"block_size": 64}) is None
    assert cute.supports({"block_size": 24}) == "takes pages of (16, 32, 64, 128), not 24"


def test_only_the_reference_has_wide_latents() -> None:
    target = Target(device=torch.device("cuda"), dtype=torch.bfloat16, geometry={"kv_lora_rank": 1024, "rope_dim": 64})
    reasons = {library.name: library.is_available(target) for library in LIBRARIES}
    assert reasons["reference"] is None
    assert reasons["triton"] == "takes latents of up to 512, not 1024"
