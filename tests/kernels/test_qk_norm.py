"""RMSNorm over all heads that several ranks hold, with the rotation, against the whole norm and kernels/rotary."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import ordered_sum
from dist_infer.kernels import all_reduce as all_reduce_op
from dist_infer.kernels import qk_norm as op
from dist_infer.kernels.all_reduce import PeerLayout, PeerSpace
from dist_infer.kernels.carriers import QkNorm, Rotation
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.qk_norm import SquaresFunction
from dist_infer.kernels.triton import qk_norm as kernels
from dist_infer.kernels.triton import reduced_qk_norm as reduced
from tests.kernels.aot import compile_ahead
from tests.kernels.library_cases import library_cases
from tests.yardstick import check_error

EPS = 1e-5
NUM_SLOTS = 40


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first channels of each head by complex numbers, halves paired."""
    rotated = 2 * cos.shape[1]
    low, high = x[..., :rotated].chunk(2, -1)
    pairs = torch.complex(low, high) * torch.complex(cos.to(x.dtype), sin.to(x.dtype))[:, None]
    return torch.cat([pairs.real, pairs.imag, x[..., rotated:]], -1)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    scale = torch.rsqrt(x.square().mean((1, 2), keepdim=True) + EPS)
    return x * scale * weight.to(x.dtype).view(x.shape[1:])


class Heads:
    """Queries, keys and values of all ranks, and the part of each. Keys of one head lie on two ranks each."""

    def __init__(self, num_tokens: int, dtype: torch.dtype, device: str, *, half: int = 4, head_dim: int = 12) -> None:
        generator = torch.Generator().manual_seed(num_tokens)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

        self.q, self.k = random(num_tokens, 6, head_dim), random(num_tokens, 2, head_dim)
        self.v = random(num_tokens, 2, head_dim)
        self.q_weight, self.k_weight = random(6 * head_dim), random(2 * head_dim)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angles = 9 * torch.rand(num_tokens, half, generator=generator, dtype=torch.float64)
        self.cos, self.sin = angles.cos().to(wide).to(device), angles.sin().to(wide).to(device)
        self.slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_tokens].to(device)
        self.head_dim = head_dim

    def part(self, rank: int) -> tuple[Tensor, QkNorm, Rotation]:
        """Of 3 ranks, with 2 query heads and 1 KV head each; the last two hold the same KV head."""
        heads, kv = slice(2 * rank, 2 * rank + 2), slice(min(rank, 1), min(rank, 1) + 1)
        qkv = torch.cat([self.q[:, heads], self.k[:, kv], self.v[:, kv]], 1)
        held = QkNorm(
            q_weight=self.q_weight.view(6, -1)[heads].flatten(),
            k_weight=self.k_weight.view(2, -1)[kv].flatten(),
            num_q_channels=6 * self.head_dim,
            num_k_channels=2 * self.head_dim,
            eps=EPS,
            counts_keys=(rank < 2,),
        )
        caches = [torch.full((NUM_SLOTS, 1, self.head_dim), 7.0, dtype=qkv.dtype, device=qkv.device) for _ in range(2)]
        slots = self.slots.clone()
        slots[2:3] = -1
        places = {"slots": slots, "k_cache": caches[0], "v_cache": caches[1]}
        return qkv, held, Rotation(cos=self.cos, sin=self.sin, interleaved=False, **places)


@pytest.mark.parametrize(("library", "device", "dtype"), library_cases(op.SQUARES_LIBRARIES))
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_parts_give_the_whole(
    library: Library[SquaresFunction], device: str, dtype: torch.dtype, num_tokens: int
) -> None:
    finish = next(own for own in op.NORM_ROTARY_LIBRARIES if own.name == library.name)
    heads = Heads(num_tokens, dtype, device)
    parts = [heads.part(rank) for rank in range(3)]
    squares = [op.head_squares(qkv, 1, counts_keys=held.counts_keys[0], library=library) for qkv, held, _ in parts]
    total = torch.stack(squares).sum(0)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    queries = [op.norm_rotary(qkv, total, held, rotation, library=finish) for qkv, held, rotation in parts]
    kept = [idx for idx in range(num_tokens) if idx != 2]
    slots = heads.slots[kept]
    untouched = torch.ones(NUM_SLOTS, dtype=torch.bool, device=device)
    untouched[slots] = False
    for rank, (_, _, rotation) in enumerate(parts):
        assert torch.equal(rotation.v_cache[slots], heads.v[kept][:, min(rank, 1)][:, None])
        assert (rotation.k_cache[untouched] == 7).all() and (rotation.v_cache[untouched] == 7).all()
    assert torch.equal(parts[1][2].k_cache, parts[2][2].k_cache)
    keys = torch.cat([rotation.k_cache[slots] for _, _, rotation in parts[:2]], 1)
    for ours, x, weight, rows in (
        (torch.cat(queries, 1), heads.q, heads.q_weight, list(range(num_tokens))),
        (keys, heads.k, heads.k_weight, kept),
    ):
        truth = turned(norm(x.double(), weight), heads.cos.double(), heads.sin.double())
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        yardstick = turned(norm(x.to(wide), weight).to(dtype).to(wide), heads.cos, heads.sin).to(dtype)
        check_error(ours, truth[rows], yardstick[rows])


def test_neighbours_are_paired_where_asked_for() -> None:
    heads = Heads(5, torch.float64, "cpu", half=6)
    qkv, held, rotation = heads.part(0)
    finish = op.NORM_ROTARY_LIBRARIES[-1]
    squares = torch.ones(5, 2, dtype=torch.float64)
    order = torch.arange(12).view(2, 6).T.flatten()  # halves to neighbours
    plain = op.norm_rotary(qkv, squares, held, rotation, library=finish)
    weights = {name: getattr(held, name).view(-1, 12)[:, order].flatten() for name in ("q_weight", "k_weight")}
    other = op.norm_rotary(
        qkv[..., order], squares, replace(held, **weights), replace(rotation, interleaved=True), library=finish
    )
    torch.testing.assert_close(other, plain[..., order])


def test_what_does_not_fit_is_refused() -> None:
    qkv, held, rotation = Heads(3, torch.float32, "cpu").part(0)
    library = op.NORM_ROTARY_LIBRARIES[-1]
    op.norm_rotary(qkv, torch.ones(3, 2), held, rotation, library=library)
    for squares in (torch.ones(3), torch.ones(2, 2), torch.ones(3, 2).double()):
        with pytest.raises(ValueError, match="squares"):
            op.norm_rotary(qkv, squares, held, rotation, library=library)
    with pytest.raises(ValueError, match=r"weight torch.float32 \[3\] is not"):
        op.norm_rotary(qkv, torch.ones(3, 2), replace(held, k_weight=torch.ones(3)), rotation, library=library)
    with pytest.raises(ValueError, match="don't fit"):
        op.norm_rotary(qkv, torch.ones(3, 2), held, replace(rotation, slots=torch.zeros(2)), library=library)
    with pytest.raises(ValueError, match="heads of three kinds"):
        op.head_squares(qkv, 2, counts_keys=True, library=op.SQUARES_LIBRARIES[-1])


def _space(num_rows: int) -> PeerSpace:
    layout = PeerLayout(num_ranks=2, row_bytes=16, one_shot_rows=num_rows, two_shot_rows=1)
    memory, table = torch.zeros(0, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    return PeerSpace(layout=layout, memory=memory, table=table, rank=0, max_programs=4)


def test_what_does_not_fit_into_peer_memory_is_refused() -> None:
    qkv, held, rotation = Heads(3, torch.float32, "cpu").part(0)
    library = op.ONE_SHOT_LIBRARIES[0]
    with pytest.raises(ValueError, match="3 rows are more than 2"):
        op.reduced_norm_rotary(qkv, held, rotation, _space(2), library=library)
    with pytest.raises(ValueError, match="no contiguous tensor"):
        op.reduced_norm_rotary(qkv, replace(held, counts_keys=()), rotation, _space(3), library=library)


def test_ahead_of_time() -> None:
    """As MiniMax-M2 on two ranks: 24 query heads and 4 KV heads, half of 128 channels turned."""
    widths, num_warps = kernels.widths(32, 4, 128)
    sizes = {"Q_HEADS": 32, "K_HEADS": 4, "HEAD_DIM": 128, "HALF": 32, "INTERLEAVED": False}
    sizes |= {"HALF_BLOCK": 32, "REST_BLOCK": 64, "OVERLAP": True, **widths}
    types = dict.fromkeys(("qkv", "q_weight", "k_weight", "out", "k_cache", "v_cache"), "*bf16")
    types |= dict.fromkeys(("cos", "sin"), "*fp32") | {"slots": "*i64", "slot_stride": "i32:16", "num_tokens": "i32"}
    types |= {"token_stride": "i32:16", "q_channels": "fp32", "k_channels": "fp32", "eps": "fp32"}
    peers = dict.fromkeys(("first_rank", "slots_at", "slot_bytes", "row_stride", "counted", "cache_stride"), "i32")
    peers |= {"memory": "*u8", "memory_stride": "i64", "table": "*i64"}
    made = compile_ahead(reduced._reduced_kernel, types | peers, sizes | {"NUM_RANKS": 2}, num_warps=num_warps)
    assert "ld.relaxed.sys.global.v4.b32" in made.asm["ptx"] and made.spilled_bytes == 0
    alone_types = {"qkv": "*bf16", "out": "*fp32", "num_tokens": "i32", "token_stride": "i32:16"}
    alone = compile_ahead(
        kernels._squares_kernel, alone_types, {**widths, "COUNTS_KEYS": True, "OVERLAP": True}, num_warps=num_warps
    )
    assert _reduced_layouts(made) == _reduced_layouts(alone)


def _reduced_layouts(made: Any) -> set[str]:
    """The layouts of what `tt.reduce` adds up: they settle the order of the sums."""
    lines = made.asm["ttgir"].splitlines()
    types = {line.split("->")[0].split("tensor<")[-1] for line in lines if line.lstrip().startswith("}) : (tensor<")}
    definitions = {line.split(" ", 1)[0]: line.split("=", 1)[1].strip() for line in lines if line.startswith("#")}
    return {text.split(",")[0] + definitions["#" + text.split("#")[1].split(">")[0]] for text in types}


def check_virtual(num_ranks: int, space: PeerSpace, num_tokens: int) -> None:
    """All ranks as one launch, against the separate ops byte for byte. Two ranks share each KV head from 4 ranks on."""
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    shape = (num_ranks, num_tokens, 8, 128)  # 4 query heads, 2 KV heads
    qkv = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    if num_tokens > 2:
        qkv[num_ranks - 1, 1, 0, 3], qkv[0, 2, 5, 7] = float("nan"), float("inf")
    weights = [torch.randn(num_ranks, n * 128, device="cuda", generator=generator).bfloat16() for n in (4, 2)]
    counts = tuple(rank % 2 == 0 or num_ranks < 4 for rank in range(num_ranks))
    whole = QkNorm(
        q_weight=weights[0],
        k_weight=weights[1],
        num_q_channels=num_ranks * 512,
        num_k_channels=sum(counts) * 256,
        eps=EPS,
        counts_keys=counts,
    )
    angles = 9 * torch.rand(num_tokens, 32, device="cuda", generator=generator)
    slots = torch.randperm(2000, device="cuda", generator=generator)[:num_tokens]
    slots[::5] = -1
    caches = [torch.full((num_ranks, 2000, 2, 128), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    rotation = Rotation(
        cos=angles.cos(), sin=angles.sin(), slots=slots, k_cache=caches[0], v_cache=caches[1], interleaved=False
    )
    out = op.reduced_norm_rotary(qkv, whole, rotation, space, library=op.ONE_SHOT_LIBRARIES[0])
    squares = ordered_sum(
        [
            op.head_squares(qkv[rank], 2, counts_keys=counts[rank], library=op.SQUARES_LIBRARIES[0])
            for rank in range(num_ranks)
        ]
    )
    for rank in range(num_ranks):
        held, place = op._of_rank(whole, rotation, rank)
        place = replace(place, k_cache=caches[2][rank], v_cache=caches[3][rank])
        expected = op.norm_rotary(qkv[rank], squares, held, place, library=op.NORM_ROTARY_LIBRARIES[0])
        for ours, theirs in ((out[rank], expected), (place.k_cache, caches[0][rank]), (place.v_cache, caches[1][rank])):
            equal = ours.view(torch.int16) == theirs.view(torch.int16)
            assert (equal | (ours.isnan() & theirs.isnan())).all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_bytes_in_one_kernel(num_ranks: int) -> None:
    """Also between all-reduces of whole rows in the same space."""
    layout = PeerLayout(num_ranks=num_ranks, row_bytes=4096, one_shot_rows=1000, two_shot_rows=8)
    space = all_reduce_op.space_on_one_device(layout, torch.device("cuda"))
    x = torch.randn(num_ranks, 40, 2048, device="cuda").bfloat16()
    for num_tokens in (1, 33, 0, 129, 1000, 2, 32):
        check_virtual(num_ranks, space, num_tokens)
        reduced = all_reduce_op.one_shot(
            x, all_reduce_op.Epilogue(), space, library=all_reduce_op.ONE_SHOT_LIBRARIES[0]
        )
        assert all(torch.equal(total, ordered_sum(list(x))) for total in reduced.total)


@pytest.mark.gpu
def test_a_sum_that_is_not_waited_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: slots are read as they are."""
    from tests.kernels import peer_code

    kernel = peer_code.rebuilt(reduced._reduced_kernel, await_quad=peer_code.hasty_quad)
    monkeypatch.setattr(reduced, "_reduced_kernel", kernel)
    layout = PeerLayout(num_ranks=8, row_bytes=4096, one_shot_rows=200, two_shot_rows=8)
    space = all_reduce_op.space_on_one_device(layout, torch.device("cuda"))

    def calls() -> None:
        for num_tokens in (100, 33, 100):
            check_virtual(8, space, num_tokens)

    with pytest.raises(AssertionError):
        calls()
