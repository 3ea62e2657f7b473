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
    _entry(_FP8, 256, 7168, 256, "16 tokens 142 / 152, 64 298 / 312, 1024 432 / 510, 4096 815 / 1262"),
    _entry(_MXFP8, 256, 7168, 256, "16 tokens 167 / 289, 64 340 / 400, 1024 566 / 799, 4096 1144 / 1802"),
    _entry(_NVFP4, 256, 7168, 256, "16 tokens 132 / 282, 64 257 / 373, 1024 460 / 919, 4096 1053 / 2043"),
    _entry(_FP8, 128, 6144, 384, "16 tokens 90 / 96, 64 201 / 210, 1024 281 / 336, 4096 488 / 732"),
    _entry(_MXFP8, 128, 6144, 384, "16 tokens 124 / 209, 64 255 / 289, 1024 372 / 488, 4096 737 / 1172"),
    _entry(_NVFP4, 128, 6144, 384, "16 tokens 102 / 200, 64 189 / 245, 1024 305 / 539, 4096 667 / 1228"),
    _entry(_FP8, 128, 2048, 768, "16 tokens 104 / 109, 64 151 / 160, 1024 209 / 279, 4096 501 / 790"),
    _entry(_MXFP8, 128, 2048, 768, "16 tokens 115 / 133, 64 168 / 198, 1024 303 / 438, 4096 726 / 1271"),
    _entry(_NVFP4, 128, 2048, 768, "16 tokens 86 / 119, 64 125 / 171, 1024 253 / 478, 4096 652 / 1309"),
)
