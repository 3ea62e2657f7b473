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
    _entry(_FP8, 256, 7168, 256, "16 tokens 151 / 148, 64 310 / 308, 1024 456 / 512, 4096 893 / 1257"),
    _entry(_MXFP8, 256, 7168, 256, "16 tokens 289 / 292, 64 352 / 405, 1024 564 / 781, 4096 1153 / 1804"),
    _entry(_NVFP4, 256, 7168, 256, "16 tokens 282 / 282, 64 303 / 376, 1024 514 / 923, 4096 1075 / 2033"),
    _entry(_FP8, 128, 6144, 384, "16 tokens 105 / 98, 64 205 / 209, 1024 287 / 328, 4096 558 / 748"),
    _entry(_MXFP8, 128, 6144, 384, "16 tokens 209 / 209, 64 235 / 276, 1024 370 / 482, 4096 745 / 1182"),
    _entry(_NVFP4, 128, 6144, 384, "16 tokens 204 / 204, 64 203 / 233, 1024 338 / 548, 4096 705 / 1240"),
    _entry(_FP8, 128, 2048, 768, "16 tokens 106 / 104, 64 157 / 155, 1024 232 / 276, 4096 548 / 797"),
    _entry(_MXFP8, 128, 2048, 768, "16 tokens 121 / 142, 64 176 / 201, 1024 294 / 449, 4096 719 / 1279"),
    _entry(_NVFP4, 128, 2048, 768, "16 tokens 103 / 123, 64 146 / 175, 1024 262 / 486, 4096 666 / 1302"),
)
