"""The fastest library of experts with quantised weights: data. Where nothing was measured the op's own order holds.

With few pairs an expert `cute` runs the products of `triton`, so it is chosen for any number of rows.
"""

from dist_infer.kernels.measured import Measured
from dist_infer.kernels.scaled_linear import WeightFormat


def _entry(weight_format: WeightFormat, experts: int, width: int, intermediate: int, figures: str) -> Measured:
    sizes = {"experts": experts, "width": width, "intermediate": intermediate, weight_format.value: 1}
    return Measured(
        device="NVIDIA H200",
        op="quantized_experts",
        library="cute",
        sizes={name: range(size, size + 1) for name, size in sizes.items()},
        figures=f"us of a graph's call, cute / triton, in one process: {figures}",
    )


MEASURED: tuple[Measured, ...] = (
    _entry(
        WeightFormat.FP8_BLOCK,
        *(256, 7168, 256),
        "4 tokens 56 / 68, 16 148 / 146, 64 300 / 297, 256 356 / 355, 1024 432 / 509, 4096 866 / 1249",
    ),
    _entry(
        WeightFormat.MXFP8,
        *(256, 7168, 256),
        "4 tokens 78 / 78, 16 174 / 286, 64 341 / 395, 256 433 / 473, 4096 1132 / 1790",
    ),
    _entry(
        WeightFormat.NVFP4,
        *(256, 7168, 256),
        "16 tokens 196 / 280, 64 367 / 373, 4096 1652 / 2046; with 4 it runs triton's products, 97 / 76 with its own",
    ),
)
