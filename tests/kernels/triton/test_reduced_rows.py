"""What follows the sum of a row."""

import pytest
import torch
from torch import Tensor

from dist_infer.kernels import all_reduce as op
from dist_infer.kernels.all_reduce import Epilogue
from dist_infer.kernels.carriers import QuantizedTensor
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.kernels.triton.quantize import kernel_format
from tests.kernels import peer_code
from tests.kernels.all_reduce_cases import EPS, same, scale_for, separate_ops
from tests.kernels.triton_interpreter import TRITON_DEVICES


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("quant_format", [None, *QuantFormat])
@pytest.mark.parametrize("has_residual", [False, True])
def test_what_follows_the_sum_is_what_separate_ops_give(
    device: str, quant_format: QuantFormat | None, has_residual: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    summed, residual = (torch.randn(3, 256, generator=generator).bfloat16().to(device) for _ in range(2))
    weight = torch.randn(256, generator=generator).bfloat16().to(device)
    epilogue = Epilogue(
        residual=residual if has_residual else None,
        weight=weight,
        eps=EPS,
        quant_format=quant_format,
        scale=scale_for(quant_format, device),
    )
    ours = op.empty_reduced(summed, epilogue)
    data = scales = scale = name = None
    if ours.quantized:
        data, scales, scale = ours.quantized[0].data, ours.quantized[0].scales, epilogue.scale
        name = kernel_format(ours.quantized[0])[0]
    arguments = (summed, epilogue.residual, weight, ours.total, ours.normed, data, scales, scale)
    peer_code.finish_rows[3,](*arguments, EPS, HIDDEN=256, COLUMNS=256, FORMAT=name)
    theirs = separate_ops(summed, epilogue)
    assert same(ours.total, theirs.total)
    assert ours.normed is not None and theirs.normed is not None and same(ours.normed, theirs.normed)
    for mine, other in zip(ours.quantized, theirs.quantized, strict=True):
        assert same(mine.data.view(torch.uint8), other.data.view(torch.uint8))
        written = scales_of_rows(mine), scales_of_rows(other)
        assert same(*written)


def scales_of_rows(quantized: QuantizedTensor) -> Tensor:
    """Without those of rows that don't exist, which other programs write."""
    scales = quantized.scales.view(torch.uint8).flatten()
    if kernel_format(quantized)[2]:
        return scales.view(-1, 32, 4, 4)[:, :3, 0]
    return scales
