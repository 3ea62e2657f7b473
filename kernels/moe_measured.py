"""The fastest library of the experts: data. Where nothing was measured the op's own order holds.

With few pairs an expert `cute` runs the products of `triton`, so it is chosen for any number of rows. Between the two
files pairs came to be put in order faster, which both libraries do: 50 us of the gain with 32768 pairs.
"""

from dist_infer.kernels.measured import Measured

_SOURCES = "bench_moe_many-h200.json, bench_moe-h200.json"


def _entry(experts: int, width: int, intermediate: int, figures: str) -> Measured:
    sizes = {"experts": experts, "width": width, "intermediate": intermediate}
    return Measured(
        device="NVIDIA H200",
        op="moe_experts",
        library="cute",
        sizes={name: range(size, size + 1) for name, size in sizes.items()},
        figures=f"us, cute / triton: {figures} ({_SOURCES})",
    )


MEASURED: tuple[Measured, ...] = (
    _entry(128, 2048, 768, "1024 tokens 352 / 370, 4096 577 / 711"),
    _entry(64, 2048, 1408, "1024 tokens 331 / 340, 4096 706 / 804"),
    _entry(256, 7168, 256, "1024 tokens 762 / 798, 4096 1132 / 1241"),
)
