"""Latent decode over a paged cache in CuTe DSL for sm_90a: no public one is known for this architecture.

One launch (see mla_launch) on all multiprocessors, whatever the batch. Lengths, pages, heads and query tokens are
run-time data, so a model needs one variant for each of its numbers of query rows.

S sequences, Q query tokens of each, N heads, C slots of the cache, P pages of the longest sequence, W CTAs.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import cutlass.cute as cute
import torch
from torch import Tensor

from dist_infer.kernels.cute import mla_shared_tiles
from dist_infer.kernels.cute.compile_cache import load_or_compile
from dist_infer.kernels.cute.mla_call import Block, PackedLaunch, compile_arguments
from dist_infer.kernels.cute.mla_clerk import NUM_STATES
from dist_infer.kernels.cute.mla_launch import DTYPES, Variant
from dist_infer.kernels.cute.mla_parts import EMPTY, workspace_size
from dist_infer.kernels.cute.mla_tiles import LATENT, WIDTH
from dist_infer.kernels.multiprocessors import num_multiprocessors

PAGE_SIZES = (16, 32, 64, 128)
ROW_COUNTS = (8, 16, 32, mla_shared_tiles.NUM_ROWS)
MAX_HEADS = 128


def choose_rows(rows: int) -> int:
    """The padded query rows of a CTA for so many rows a sequence."""
    return next((count for count in ROW_COUNTS if rows <= count), ROW_COUNTS[-1])


class Workspace:
    """Parts of sequences, for any batch: it depends on the multiprocessors alone. `rows` are those of a CTA, padded.

    Launches that share one must not overlap.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.num_ctas = num_multiprocessors(device)
        self.memory = torch.full((workspace_size(rows, self.num_ctas),), EMPTY, dtype=torch.int32, device=device)
        self.states.zero_()
        self.address = self.memory.data_ptr()

    @property
    def states(self) -> Tensor:
        """What a launch needs to be zero. It leaves it so."""
        return self.memory[:NUM_STATES]

    @property
    def parts(self) -> Tensor:
        """What a launch needs to be EMPTY. It leaves it so."""
        return self.memory[NUM_STATES:]


class Decode:
    """Decodes of one shape whose arguments are checked and packed once, so that a call leaves the host little to do.

    What `mla_decode` says of its arguments holds. Lengths and table are read anew by each launch.
    """

    def __init__(
        self,
        q: Tensor,
        cache_rows: Tensor,
        page_table: Tensor,
        kv_lens: Tensor,
        *,
        page_size: int,
        query_len: int,
        scale: float,
        workspace: Workspace,
        lse: Tensor | None = None,
        layers: int = 1,
        num_workers: int | None = None,
        rounded: bool = False,
    ) -> None:
        self._call = _prepare(
            q.shape,
            q.dtype,
            cache_rows.shape[1],
            cache_rows.dtype,
            kv_lens.shape[0],
            page_size,
            query_len,
            scale,
            num_workers,
            rounded,
            workspace.num_ctas,
        )
        _check_memory(q, cache_rows, page_table, kv_lens)
        self.lse = torch.empty(self._call.num_rows, dtype=torch.float32, device=q.device) if lse is None else lse
        words = 2 if cache_rows.dtype == torch.float8_e4m3fn else 1  # of E4M3 in one of the launch's
        self._block = Block(
            page_table=page_table.data_ptr(),
            kv_lens=kv_lens.data_ptr(),
            num_seqs=len(page_table),
            num_pages=page_table.shape[1],
            table_pitch=page_table.stride(0),
            num_tokens=q.shape[0],
            heads=q.shape[1],
            cache_len=len(cache_rows),
            cache_pitch=cache_rows.stride(0) // words,
            lse=self.lse.data_ptr(),
            workspace=workspace.address,
            query_len=query_len,
            num_workers=self._call.num_workers,
            layers=layers,
            scale=self._call.scale,
        )
        self._kept = page_table, kv_lens, workspace
        self._shape, self._device_idx = q.shape, q.device.index
        # the bare handle: an object of torch costs the host as much as a launch
        self._stream_of = torch._C._cuda_getCurrentRawStream
        self._run = self._call.run if self._call.num_rows else _do_nothing

    def __call__(
        self,
        q: Tensor,
        cache_rows: Tensor,
        out: Tensor,
        *,
        layer: int = 0,
        cache_scale: Tensor | None = None,
    ) -> None:
        """Launches one. Queries, cache and output are contiguous and of the shapes, dtypes and device of before.

        Stream: the current one.
        Errors: ValueError for queries of another shape, and for memory that is not aligned to 16 bytes.
        """
        q_address, cache_address, out_address = q.data_ptr(), cache_rows.data_ptr(), out.data_ptr()
        if q.shape != self._shape or (q_address | cache_address | out_address) % 16:
            raise ValueError(
                f"mla_decode: q {list(q.shape)} is not {list(self._shape)}, or what is given isn't aligned"
            )
        self._run(
            self._block.address,
            q_address,
            cache_address,
            out_address,
            layer,
            0 if cache_scale is None else cache_scale.data_ptr(),
            self._stream_of(self._device_idx),
        )


def _do_nothing(*_: int) -> None:
    """The launch of a call without rows."""


def mla_decode(
    q: Tensor,
    cache_rows: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    page_size: int,
    query_len: int,
    scale: float,
    workspace: Workspace,
    out: Tensor,
    lse: Tensor | None = None,
    layers: int = 1,
    layer: int = 0,
    num_workers: int | None = None,
    cache_scale: Tensor | None = None,
    rounded: bool = False,
) -> Tensor:
    """Fills `out` with the attended latents; the base-2 logarithm of each row's sum of exponentials.

    The `query_len` last tokens of each sequence are the queries: token t of them sees kv_len - query_len + 1 + t keys.
    Products of two 16-bit numbers are summed in float32, weights are rounded to the dtype of the cache. A row that sees
    no key gives 0 and -inf. What lies beyond kv_len never shows.

    With a `cache_scale` [1] the cache is E4M3 and stands for e4m3 * cache_scale; q is bfloat16. Queries are then exact
    but for what is below 2^-17 of a row's largest value. Scores are sums of 13 bits over a third of the dims, and of
    float32 above (see mla_narrow_keys). Weights are rounded to float16, those below 2^-31 of the largest one to 0;
    their products are summed in float32. If they are to be `rounded`, queries become E4M3, each row times a power of
    two, and so do weights of more than 32 query rows: those below 2^-16 of the largest one are 0, sums have 13 bits.

    The table holds logical page ids p; of a pool that keeps all layers of a page side by side, a layer's page is in
    slot p * layers + layer. `lse` is written if given. `num_workers` bounds the CTAs of a row tile, thereby the parts
    that sequences are cut into; without it as many work as the device has multiprocessors.

    Shapes: q [S * Q, N, 576] (folded latent, rotated), cache_rows [C, 576], page_table [S, P] int32, kv_lens [S] int32,
        out [S * Q, N, 512] -> lse [S * Q * N] float32.
    Stream: the current one; the host waits for nothing, and a CUDA graph may hold it.
    Errors: ValueError for shapes, dtypes, page sizes or numbers of workers that no variant takes.
    """
    if (cache_scale is None) is (cache_rows.dtype == torch.float8_e4m3fn):
        raise ValueError("mla_decode: a cache of E4M3 needs its scale, another one has none")
    rows = q.shape[0] * q.shape[1]
    has_room = lse is None or (lse.numel() == rows and lse.dtype == torch.float32 and lse.is_contiguous())
    if not has_room or out.shape != (*q.shape[:2], LATENT) or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(
            f"mla_decode: q {q.dtype} {list(q.shape)}: out {out.dtype} {list(out.shape)} or the logarithms don't fit it"
        )
    decode = Decode(
        q,
        cache_rows,
        page_table,
        kv_lens,
        page_size=page_size,
        query_len=query_len,
        scale=scale,
        workspace=workspace,
        lse=lse,
        layers=layers,
        num_workers=num_workers,
        rounded=rounded,
    )
    decode(q, cache_rows, out, layer=layer, cache_scale=cache_scale)
    return decode.lse


def _check_memory(q: Tensor, cache_rows: Tensor, page_table: Tensor, kv_lens: Tensor) -> None:
    """What the launch takes by address it can't check."""
    fits = (
        page_table.dtype == kv_lens.dtype == torch.int32
        and page_table.device == kv_lens.device == cache_rows.device == q.device
        and page_table.dim() == 2
        and len(page_table) == len(kv_lens)
        and (page_table.stride(1) == 1 or page_table.shape[1] <= 1)
        and kv_lens.is_contiguous()
        and q.is_contiguous()
        and cache_rows.stride(1) == 1
        and not cache_rows.stride(0) * cache_rows.element_size() % 16
    )
    if not fits:
        raise ValueError(
            f"mla_decode: q {list(q.shape)} on {q.device}, cache {list(cache_rows.shape)} on {cache_rows.device}, table"
            f" {page_table.dtype} {list(page_table.shape)} on {page_table.device} or lengths {kv_lens.dtype}"
            f" {list(kv_lens.shape)} on {kv_lens.device} are of another kind, on several devices or not contiguous"
        )


class _Call(NamedTuple):
    run: Callable[..., Any]
    num_rows: int  # of all sequences
    scale: float  # for exponents of 2
    num_workers: int


@lru_cache(maxsize=4096)
def _prepare(
    q_shape: tuple[int, ...],
    dtype: torch.dtype,
    cache_width: int,
    cache_dtype: torch.dtype,
    num_seqs: int,
    page_size: int,
    query_len: int,
    scale: float,
    num_workers: int | None,
    rounded: bool,
    num_ctas: int,
) -> _Call:
    """What calls of equal shapes have in common."""
    num_tokens, heads, width = q_shape
    narrow = cache_dtype == torch.float8_e4m3fn
    fits = (
        page_size in PAGE_SIZES
        and width == cache_width == WIDTH
        and (dtype == torch.bfloat16 if narrow else dtype == cache_dtype)
        and dtype in DTYPES
        and 0 < heads <= MAX_HEADS
        and num_tokens == num_seqs * query_len
        and narrow >= rounded
    )
    if not fits:
        raise ValueError(
            f"mla_decode: q {dtype} {list(q_shape)}, cache {cache_dtype} of width {cache_width}, {num_seqs} sequences"
            f" of {query_len} queries or pages of {page_size} don't fit"
        )
    rows = choose_rows(query_len * heads)
    row_tiles = -(-query_len * heads // rows)
    most = num_ctas // row_tiles
    if num_workers is not None and not 1 <= num_workers <= most:
        raise ValueError(f"mla_decode: num_workers is {num_workers}, this device has room for 1 to {most}")
    pair = rows == ROW_COUNTS[-1] and row_tiles % 2 == 0 and not narrow
    variant = Variant(
        rows=rows,
        page_size=page_size,
        dtype=dtype,
        pair=pair,
        narrow=narrow,
        rounded=rounded,
    )
    return _Call(
        run=compiled(variant),
        num_rows=num_tokens * heads,
        scale=scale * math.log2(math.e),
        num_workers=num_workers or most,
    )


@cache
def compiled(variant: Variant, options: str = "") -> Callable[..., Any]:
    """The launch of a variant, on the current CUDA device and from the cache unless `options` compile it anew."""
    if not options:
        return load_or_compile("mla_decode", repr(variant), lambda: _compile(variant))
    launch: Callable[..., Any] = _compile(variant, options)
    return launch


def _compile(variant: Variant, options: str = "") -> Any:
    return cute.compile(PackedLaunch(variant), *compile_arguments(), options=f"--enable-tvm-ffi {options}")
