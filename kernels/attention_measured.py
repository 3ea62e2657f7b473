"""The fastest library of latent attention's decode: data. Where nothing was measured the op's own order holds.

The figures of `triton` include its products with kv_b, those of `cute` are the kernel's alone; it is the faster one by
more than these products take.
"""

from dist_infer.kernels.measured import Measured

_SOURCES = "bench_mla_decode-h200.json, bench_mla_attention-h200.json"

MEASURED: tuple[Measured, ...] = (
    Measured(
        device="NVIDIA H200",
        op="mla_attention.generation",
        library="cute",
        sizes={"heads": range(9, 17), "seqs": range(1, 129), "cache_bytes": range(2, 3)},
        figures="us, cute / triton: 1 x 1k 7.3 / 19.6, 8 x 4k 17.7 / 41.7, 32 x 4k 47.2 / 80.2, 128 x 4k 145.1 / 267.5"
        f" ({_SOURCES})",
    ),
    Measured(
        device="NVIDIA H200",
        op="mla_attention.generation",
        library="cute",
        sizes={"heads": range(65, 129), "seqs": range(1, 129), "cache_bytes": range(2, 3)},
        figures="us, cute / triton: 1 x 4k 16.2 / 64.3, 8 x 4k 33.3 / 105.9, 32 x 4k 77.9 / 298.4, 128 x 4k 234.3 /"
        f" 868.8 ({_SOURCES})",
    ),
)
