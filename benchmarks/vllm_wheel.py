"""Kernels of others to measure beside ours: vLLM where it is installed, or a wheel of it unpacked into a folder.

    python -m pip download --no-deps vllm==0.24.0 && unzip 'vllm-*.whl' -d FOLDER
    python -m benchmarks.bench_mla_decode --peers FOLDER

Of a folder only single files are used: compiled libraries by their torch ops, and Triton kernels of a file or two with
stand-ins for the little that they import, so that nothing else of vLLM needs to be there.
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_MOE = "vllm.model_executor.layers.fused_moe"
_FP8_BLOCK = 128


class PeerError(Exception):
    """Why a peer can't run."""


def parse_peers(doc: str | None, argv: Sequence[str], *choices: str) -> argparse.Namespace:
    """The options of a benchmark that has peers: `peers`, and `what`, one of the choices or None."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    if choices:
        parser.add_argument("what", nargs="?", choices=choices)
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="where a wheel of vLLM was unpacked")
    return parser.parse_args(argv)


def peer_or_reason(make: Callable[[], T]) -> T | str:
    """What `make` gives, or why it gives nothing."""
    try:
        return make()
    except (PeerError, ImportError, OSError, RuntimeError, AttributeError, TypeError, AssertionError) as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def vllm_folder(folder: Path | None) -> Path:
    """The package's files.

    Errors: PeerError where there are none.
    """
    if folder is not None:
        if not (folder / "vllm").is_dir():
            raise PeerError(f"{folder} has no folder vllm")
        return folder / "vllm"
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise PeerError("vLLM is not installed, and --peers names no folder with it")
    return Path(spec.submodule_search_locations[0])


def compiled_ops(folder: Path | None, library: str, namespace: str) -> Any:
    """torch.ops.<namespace> of a compiled library.

    Errors: PeerError where it is not there, OSError where it can't be loaded.
    """
    path = vllm_folder(folder) / library
    if not path.exists():
        raise PeerError(f"{library} is not there")
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    return getattr(torch.ops, namespace)


def deep_gemm(folder: Path | None) -> Any:
    """DeepGEMM's module, as vLLM brings it."""
    place = str(vllm_folder(folder) / "third_party")
    if place not in sys.path:
        sys.path.append(place)
    return importlib.import_module("deep_gemm")


def fused_moe(folder: Path | None) -> Any:
    """The module with the Triton kernels of experts. With a folder it stands on stand-ins for vLLM's other modules."""
    root = vllm_folder(folder)
    if folder is not None and "vllm" not in sys.modules:
        activations = compiled_ops(folder, "_C_stable_libtorch.abi3.so", "_C")
        experts = compiled_ops(folder, "_moe_C_stable_libtorch.abi3.so", "_moe_C")
        for name, module in _stand_ins(root, activations, experts).items():
            sys.modules[name] = module
    return importlib.import_module(f"{_MOE}.fused_moe")


class _Platform:
    """An NVIDIA GPU."""

    def get_device_name(self, *_: object) -> str:
        return torch.cuda.get_device_name()

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def is_cuda(self) -> bool:
        return True

    def is_rocm(self) -> bool:
        return False


class _Silent:
    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *args, **options: None


class _Experts:
    @staticmethod
    def adjust_N_for_activation(channels: int, _: object) -> int:  # noqa: N802 - their name
        return channels // 2


class _Activation:
    SILU = "silu"

    @staticmethod
    def from_str(name: str) -> str:
        return name


def _stand_ins(root: Path, activations: Any, experts: Any) -> dict[str, ModuleType]:
    triton = importlib.import_module("triton")

    def activate(name: str, out: Tensor, x: Tensor) -> None:
        if name == "swigluoai":
            activations.silu_and_mul_with_clamp(out, x, 7.0, 1.702, 1.0)
        else:
            activations.silu_and_mul(out, x)

    def quantise(  # the names of these arguments are theirs
        A: Tensor,
        A_scale: Tensor | None,
        quant_dtype: torch.dtype | None,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        if quant_dtype is None:
            return A, None
        data = torch.empty_like(A, dtype=quant_dtype)
        scales = torch.empty(*A.shape[:-1], A.shape[-1] // _FP8_BLOCK, dtype=torch.float32, device=A.device)
        activations.per_token_group_fp8_quant(A, data, scales, _FP8_BLOCK, 1e-10, -448.0, 448.0, False, False, False)
        return data, scales

    packages = {
        "vllm": root,
        "vllm.utils": root / "utils",
        "vllm.model_executor": root / "model_executor",
        "vllm.model_executor.layers": root / "model_executor/layers",
        _MOE: root / "model_executor/layers/fused_moe",
    }
    contents: dict[str, dict[str, Any]] = {
        _MOE: {"get_config": lambda: None},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm.logger": {"init_logger": lambda _: _Silent()},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": importlib.import_module("triton.language")},
        "vllm.utils.math_utils": {"round_up": lambda a, b: -(-a // b) * b, "cdiv": lambda a, b: -(-a // b)},
        "vllm.utils.torch_utils": {"direct_register_custom_op": lambda *args, **options: None},
        "vllm._custom_ops": {
            "moe_sum": experts.moe_sum,
            "moe_align_block_size": experts.moe_align_block_size,
        },
        f"{_MOE}.modular_kernel": {"FusedMoEExpertsModular": _Experts},
        f"{_MOE}.activation": {"MoEActivation": _Activation, "apply_moe_activation": activate},
        f"{_MOE}.config": {
            "FUSED_MOE_UNQUANTIZED_CONFIG": None,
            "FusedMoEQuantConfig": object,
            "_get_config_dtype_str": lambda **how: "fp8_w8a8" if how.get("use_fp8_w8a8") else None,
        },
        f"{_MOE}.utils": {"moe_kernel_quantize_input": quantise},
    }
    made: dict[str, ModuleType] = {}
    for name in dict.fromkeys([*packages, *contents]):
        module = ModuleType(name)
        module.__dict__.update(contents.get(name, {}))
        if name in packages:
            module.__path__ = [str(packages[name])]
        made[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
    return made
