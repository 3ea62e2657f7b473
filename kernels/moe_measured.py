"""The fastest library of the experts: data. Where nothing was measured the op's own order holds.

Of few pairs an expert both take as long, to 2 us; `cute` leaves those that meet in no expert to `triton`, so it is
chosen for any number of rows. Rows are routed at random.
"""

from dist_infer.kernels.measured import Measured, exactly

_SOURCES = "bench_moe-h200.json"


def _entry(experts: int, width: int, intermediate: int, figures: str) -> Measured:
    sizes = {"experts": experts, "width": width, "intermediate": intermediate}
    return Measured(
        device="NVIDIA H200",
        op="moe_experts",
        library="cute",
        sizes=exactly(sizes),
        figures=f"us, cute / triton: {figures} ({_SOURCES})",
    )


MEASURED: tuple[Measured, ...] = (
    _entry(128, 2048, 768, "1024 tokens 339 / 361, 4096 576 / 696"),
    _entry(64, 2048, 1408, "1024 tokens 323 / 348, 4096 737 / 876"),
    _entry(256, 7168, 256, "1024 tokens 753 / 796, 4096 1092 / 1238"),
    _entry(128, 6144, 384, "1024 tokens 478 / 479, 4096 662 / 738"),
)
