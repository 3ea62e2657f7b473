"""Structures that ops take as one argument."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Mxfp8Tensor, Nvfp4Tensor, PagedStep, ScaleLayout


def test_paged_step_counts_come_from_the_host() -> None:
    step = PagedStep(
        query_start=torch.tensor([0, 3, 4], dtype=torch.int32),
        kv_lens=torch.tensor([3, 9], dtype=torch.int32),
        page_table=torch.zeros(2, 3, dtype=torch.int32),
        block_size=4,
        host_query_start=np.array([0, 3, 4], np.int32),
        host_kv_lens=np.array([3, 9], np.int32),
    )
    assert (step.num_seqs, step.num_tokens) == (2, 4)


def test_sizes_of_scale_buffers() -> None:
    assert ScaleLayout.SWIZZLED_128X4.num_bytes(1, 4) == 512 and ScaleLayout.LINEAR.num_bytes(1, 4) == 4
    assert ScaleLayout.SWIZZLED_128X4.num_bytes(129, 8) == 2048 and ScaleLayout.SWIZZLED_128X4.num_bytes(0, 8) == 0
    assert Fp8Scaling.TENSOR.scales_shape(5, 256) == (1,)
    assert Fp8Scaling.ROWS.scales_shape(5, 256) == (5, 1)
    assert Fp8Scaling.BLOCKS_1X128.scales_shape(5, 256) == (5, 2)
    assert Fp8Scaling.BLOCKS_128X128.scales_shape(576, 256) == (5, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": torch.zeros(3, 64, dtype=torch.uint8)}, r"NVFP4 data must be torch.uint8 \[3, 32\], not"),
        ({"data": torch.zeros(3, 32)}, "not torch.float32"),
        ({"data": torch.zeros(32, 3, dtype=torch.uint8).t()}, "not contiguous"),
        ({"scales": torch.zeros(12, dtype=torch.uint8)}, r"NVFP4 scales must be torch.uint8 \[512\], not"),
        ({"layout": ScaleLayout.LINEAR}, r"NVFP4 scales must be torch.uint8 \[12\]"),
        ({"shape": (3, 32)}, "needs a width that 64 divides, not 32"),
        ({"shape": (3, 0)}, "needs a width that 64 divides, not 0"),
        ({"global_scale": torch.zeros(2)}, "NVFP4 global scale must be one torch.float32"),
    ],
)
def test_parts_that_do_not_fit_a_carrier_are_refused(changed: dict[str, Any], message: str) -> None:
    whole = Nvfp4Tensor.empty(3, 64, ScaleLayout.SWIZZLED_128X4, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        replace(whole, **changed)


def test_the_scale_of_an_fp8_tensor_is_given_and_those_of_blocks_are_not() -> None:
    cpu = torch.device("cpu")
    assert Fp8Tensor.empty(3, 7, Fp8Scaling.TENSOR, device=cpu, scale=torch.ones(())).scales.numel() == 1
    assert Mxfp8Tensor.empty(3, 32, ScaleLayout.LINEAR, device=cpu).scales.shape == (3,)
    with pytest.raises(ValueError, match="FP8 with a scale for each tensor: no scale is given"):
        Fp8Tensor.empty(3, 128, Fp8Scaling.TENSOR, device=cpu)
    with pytest.raises(ValueError, match="FP8 with a scale for each 1x128: scale is given"):
        Fp8Tensor.empty(3, 128, Fp8Scaling.BLOCKS_1X128, device=cpu, scale=torch.ones(1))
    with pytest.raises(ValueError, match="can't have the width 576"):
        Fp8Tensor.empty(3, 576, Fp8Scaling.BLOCKS_128X128, device=cpu)
