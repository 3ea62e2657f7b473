"""Routed experts by the Triton kernels of vLLM, and DeepGEMM's grouped products, in the builds that vLLM brings.

E experts, I intermediate channels, D model, T tokens, K experts a token.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from benchmarks.vllm_wheel import deep_gemm, fused_moe
from dist_infer.kernels.carriers import Fp8Tensor, GatedActivation

Experts: TypeAlias = Callable[[Tensor, Tensor, Tensor, Any, Any], Tensor]  # x, ids, factors, gate and up, down
_NAMES = {GatedActivation.SILU: "silu", GatedActivation.SWIGLUOAI: "swigluoai"}
_BLOCK = 128


def triton_experts(folder: Path | None, activation: GatedActivation) -> Experts:
    """vLLM's fused_experts: from routed rows to their weighted sums, as tuned for this GPU where it has a table.

    Weights are [E, 2 I, D] and [E, D, I] in the dtype of x, or Fp8Tensors of blocks of 128 x 128 with E rows of those.
    """
    run: Any = fused_moe(folder).fused_experts_impl
    name = _NAMES[activation]

    def experts(x: Tensor, ids: Tensor, factors: Tensor, up: Any, down: Any) -> Tensor:
        if isinstance(up, Tensor):
            found: Tensor = run(x, up, down, factors, ids, name)
            return found
        inner = down.shape[1]
        num_experts = up.shape[0] // (2 * inner)
        blocks = {
            "w1_scale": _by_expert(up.scales, num_experts, up),
            "w2_scale": _by_expert(down.scales, num_experts, down),
        }
        weights = up.data.view(num_experts, 2 * inner, -1), down.data.view(num_experts, -1, inner)
        narrow: Tensor = run(x, *weights, factors, ids, name, use_fp8_w8a8=True, block_shape=[_BLOCK, _BLOCK], **blocks)
        return narrow

    return experts


def _by_expert(scales: Tensor, num_experts: int, weight: Fp8Tensor) -> Tensor:
    return scales.view(num_experts, weight.shape[0] // num_experts // _BLOCK, weight.shape[1] // _BLOCK)


def deep_gemm_products(folder: Path | None, ids: Tensor, up: Any, down: Any) -> Callable[[], Tensor]:
    """Both grouped products of DeepGEMM on rows that stand as it wants them: no routing, activation or sum.

    `ids` [T, K] say how many rows each expert has.
    """
    module = deep_gemm(folder)
    narrow = not isinstance(up, Tensor)
    num_experts = (up.shape[0] // (2 * down.shape[1])) if narrow else len(up)
    inner, width = (down.shape[1], up.shape[1]) if narrow else (down.shape[2], up.shape[2])
    counts = torch.bincount(ids.flatten().long(), minlength=num_experts)
    padded = -(-counts // _BLOCK) * _BLOCK
    expert = torch.arange(num_experts, device=ids.device).repeat_interleave(padded)
    place = torch.arange(len(expert), device=ids.device) - (padded.cumsum(0) - padded)[expert]
    of_row = torch.where(place < counts[expert], expert, -1).int()
    product = getattr(module, f"m_grouped_{'fp8' if narrow else 'bf16'}_gemm_nt_contiguous")

    def operand(channels: int) -> Any:
        x = torch.randn(len(expert), channels, device=ids.device, dtype=torch.bfloat16)
        if not narrow:
            return x
        scales = torch.rand(len(expert), channels // _BLOCK, device=ids.device) + 0.5
        return x.to(torch.float8_e4m3fn), module.get_mn_major_tma_aligned_tensor(scales)

    def weight(of: Any, channels: int) -> Any:
        if not narrow:
            return of
        return of.data.view(num_experts, channels, -1), _by_expert(of.scales, num_experts, of)

    first, second = (operand(width), weight(up, 2 * inner)), (operand(inner), weight(down, width))
    hidden, out = (
        torch.empty(len(expert), channels, device=ids.device, dtype=torch.bfloat16) for channels in (2 * inner, width)
    )

    def run() -> Tensor:
        product(*first, hidden, of_row)
        product(*second, out, of_row)
        return out

    return run
