"""The fastest library of experts with quantised weights: data. Where nothing was measured the op's own order holds.

`cute` leaves few pairs to the products of `triton` where these are faster, so it is chosen for any number of rows.
"""

from dist_infer.kernels.measured import Measured, exactly
from dist_infer.kernels.quantized_experts import geometry_of
from dist_infer.kernels.scaled_linear import WeightFormat

_SOURCES = "bench_quantized_experts-h200.json"


def _entry(weight_format: WeightFormat, experts: int, width: int, intermediate: int, figures: str) -> Measured:
    sizes = geometry_of(weight_format, experts=experts, width=width, intermediate=intermediate)
    return Measured(
        device="NVIDIA H200",
        op="quantized_experts",
        library="cute",
        sizes=exactly(sizes),
        figures=f"us, cute / triton: {figures} ({_SOURCES})",
    )


_FP8, _MXFP8, _NVFP4 = WeightFormat.FP8_BLOCK, WeightFormat.MXFP8, WeightFormat.NVFP4

MEASURED: tuple[Measured, ...] = (
    _entry(_FP8, 256, 7168, 256, "16 tokens 143 / 151, 64 292 / 304, 1024 422 / 509, 4096 794 / 1246"),
    _entry(_MXFP8, 256, 7168, 256, "16 tokens 160 / 289, 64 338 / 406, 1024 566 / 788, 4096 1139 / 1808"),
    _entry(_NVFP4, 256, 7168, 256, "16 tokens 135 / 285, 64 255 / 379, 1024 469 / 934, 4096 1045 / 2033"),
    _entry(_FP8, 128, 6144, 384, "16 tokens 99 / 105, 64 202 / 208, 1024 268 / 327, 4096 478 / 736"),
    _entry(_MXFP8, 128, 6144, 384, "16 tokens 121 / 208, 64 255 / 273, 1024 377 / 488, 4096 744 / 1182"),
    _entry(_NVFP4, 128, 6144, 384, "16 tokens 104 / 202, 64 177 / 246, 1024 311 / 547, 4096 677 / 1237"),
    _entry(_FP8, 128, 2048, 768, "16 tokens 100 / 106, 64 146 / 155, 1024 200 / 274, 4096 481 / 788"),
    _entry(_MXFP8, 128, 2048, 768, "16 tokens 113 / 136, 64 162 / 197, 1024 293 / 438, 4096 716 / 1280"),
    _entry(_NVFP4, 128, 2048, 768, "16 tokens 87 / 121, 64 126 / 172, 1024 257 / 488, 4096 654 / 1308"),
)
