"""The host's side of a latent decode: all that stays from layer to layer is packed once, and a call adds the rest.

A launch has some twenty arguments, and each that is handed over costs time of the host at every call, tensors most. So
those that are the same for all layers of a step lie in a block of the host's memory, which the launching function reads
by itself, and the others are addresses.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cuda.bindings import driver
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from dist_infer.kernels.cute.mla_launch import DTYPES, Launch, Variant
from dist_infer.kernels.cute.mla_tiles import LATENT, WIDTH

_INTEGERS = (
    "page_table",
    "kv_lens",
    "num_seqs",
    "num_pages",
    "table_pitch",
    "num_tokens",
    "heads",
    "cache_len",
    "cache_pitch",
    "lse",
    "workspace",
    "query_len",
    "num_workers",
    "layers",
)


class Block:
    """Integers, addresses among them, and a fraction in the host's memory: a call that reads it must not outlive it."""

    def __init__(self, *, scale: float, **integers: int) -> None:
        self._memory = (ctypes.c_int64 * (len(_INTEGERS) + 1))(*(integers[name] for name in _INTEGERS))
        self.address = ctypes.addressof(self._memory)
        ctypes.c_float.from_address(self.address + 8 * len(_INTEGERS)).value = scale


class PackedLaunch:
    """The launch of a variant, by a block and what changes from call to call."""

    def __init__(self, variant: Variant) -> None:
        self.launch = Launch(variant)
        self.dtype = DTYPES[variant.dtype]
        self.row_len = WIDTH // 2 if variant.narrow else WIDTH

    @cute.jit
    def __call__(
        self,
        block: Int64,
        q: Int64,
        cache_rows: Int64,
        out: Int64,
        layer: Int32,
        cache_scale: Int64,
        stream: driver.CUstream,
    ) -> None:
        words = cute.make_ptr(Int64, block, cute.AddressSpace.generic, assumed_align=8)
        integers = cute.make_tensor(words, cute.make_layout(len(_INTEGERS)))
        fraction = cute.make_ptr(Float32, block + 8 * len(_INTEGERS), cute.AddressSpace.generic, assumed_align=8)
        (
            page_table,
            kv_lens,
            num_seqs,
            num_pages,
            table_pitch,
            num_tokens,
            heads,
            cache_len,
            cache_pitch,
            lse,
            workspace,
            query_len,
            num_workers,
            layers,
        ) = (integers[place] for place in range(len(_INTEGERS)))
        seqs, tokens, heads = num_seqs.to(Int32), num_tokens.to(Int32), heads.to(Int32)
        cache_layout = cute.make_layout(
            (cache_len.to(Int32), self.row_len), stride=(cute.assume(cache_pitch, divby=8), 1)
        )
        table_layout = cute.make_layout((seqs, num_pages.to(Int32)), stride=(table_pitch, 1))
        self.launch(
            self._rows(q, tokens, heads, WIDTH),
            cute.make_tensor(_at(self.dtype, cache_rows, 16), cache_layout),
            cute.make_tensor(_at(Int32, page_table, 4), table_layout),
            cute.make_tensor(_at(Int32, kv_lens, 4), cute.make_layout((seqs,))),
            self._rows(out, tokens, heads, LATENT),
            cute.make_tensor(_at(Float32, lse, 4), cute.make_layout((tokens * heads,))),
            workspace,
            query_len.to(Int32),
            cute.make_tensor(fraction, cute.make_layout(1))[0],
            num_workers.to(Int32),
            layers.to(Int32),
            layer,
            cache_scale,
            stream,
        )

    def _rows(self, address, tokens, heads, width):
        layout = cute.make_layout((tokens, heads, width), stride=(heads * width, width, 1))
        return cute.make_tensor(_at(self.dtype, address, 16), layout)


def _at(dtype, address, alignment):
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=alignment)


def compile_arguments() -> Sequence[Any]:
    """For `cute.compile`."""
    addresses = [Int64(16)] * 4
    return (*addresses, Int32(0), Int64(0), make_fake_stream())
