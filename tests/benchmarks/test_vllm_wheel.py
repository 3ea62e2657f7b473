"""Peers from a folder: single files on stand-ins, or a reason; a folder is made up here, its kernels are torch's."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks import vllm_wheel
from benchmarks.vllm_wheel import compiled_ops, fused_moe, parse_peers, peer_or_reason

pytest.importorskip("triton")

# What the file of a wheel imports, and some use of each.
SOURCE = """
import vllm.envs as envs
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import _custom_ops as ops
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.config import _get_config_dtype_str
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import round_up
from vllm.utils.torch_utils import direct_register_custom_op

init_logger(__name__).info_once("never shown", scope="global")
direct_register_custom_op("name", lambda: None)


def half(x, activation=MoEActivation.SILU):
    from vllm.model_executor.layers.fused_moe import get_config

    assert get_config() is None and envs.VLLM_TUNED_CONFIG_FOLDER is None and round_up(5, 4) == 8
    out = x.new_empty(len(x), mk.FusedMoEExpertsModular.adjust_N_for_activation(x.shape[1], activation))
    apply_moe_activation(MoEActivation.from_str(activation), out, x)
    return out


def quantised(x, dtype):
    return moe_kernel_quantize_input(A=x, A_scale=None, quant_dtype=dtype, per_act_token_quant=False, block_shape=[1])
"""


@pytest.fixture
def modules() -> Iterator[None]:
    before = dict(sys.modules)
    yield
    for name in [name for name in sys.modules.keys() - before.keys() if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, 1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def silu_and_mul_with_clamp(out: Tensor, x: Tensor, limit: float, alpha: float, beta: float) -> None:
    gate, up = x.chunk(2, 1)
    gate = gate.clamp(max=limit)
    out.copy_((up.clamp(-limit, limit) + beta) * gate * torch.sigmoid(alpha * gate))


def test_a_file_runs_on_stand_ins(tmp_path: Path, modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "vllm/model_executor/layers/fused_moe"
    place.mkdir(parents=True)
    (place / "fused_moe.py").write_text(SOURCE)
    groups: list[tuple[int, ...]] = []
    compiled = SimpleNamespace(
        silu_and_mul=silu_and_mul,
        silu_and_mul_with_clamp=silu_and_mul_with_clamp,
        per_token_group_fp8_quant=lambda x, data, scales, *rest: groups.append(tuple(scales.shape)),
        moe_sum=None,
        moe_align_block_size=None,
    )
    monkeypatch.setattr(vllm_wheel, "compiled_ops", lambda *_: compiled)
    found = fused_moe(tmp_path)
    x = 6 * torch.randn(3, 8)
    gate, up = x.chunk(2, 1)
    torch.testing.assert_close(found.half(x, "silu"), torch.nn.functional.silu(gate) * up)
    low = gate.clamp(max=7)
    torch.testing.assert_close(found.half(x, "swigluoai"), (up.clamp(-7, 7) + 1) * low * torch.sigmoid(1.702 * low))
    assert found.quantised(x, None) == (x, None)
    data, scales = found.quantised(torch.randn(3, 256), torch.float8_e4m3fn)
    assert data.dtype == torch.float8_e4m3fn and tuple(scales.shape) == (3, 2) and groups == [(3, 2)]


def test_what_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "vLLM is not installed" in str(peer_or_reason(lambda: compiled_ops(None, "a.so", "a")))
    assert "has no folder vllm" in str(peer_or_reason(lambda: compiled_ops(tmp_path, "a.so", "a")))
    (tmp_path / "vllm").mkdir()
    assert "a.so is not there" in str(peer_or_reason(lambda: compiled_ops(tmp_path, "a.so", "a")))
    (tmp_path / "vllm" / "a.so").write_text("no library")
    assert "OSError" in str(peer_or_reason(lambda: compiled_ops(tmp_path, "a.so", "a")))
    assert peer_or_reason(lambda: 3) == 3


def test_options() -> None:
    assert parse_peers("Doc.", ["--peers", "x"]).peers == Path("x")
    both = parse_peers("Doc.", ["many"], "many")
    assert both.what == "many" and both.peers is None
    with pytest.raises(SystemExit):
        parse_peers("Doc.", ["few"], "many")
