"""Kernels compile for a GPU while this process interprets them."""

import pytest

from tests.kernels import device_code
from tests.kernels.aot import compile_ahead

TYPES = {"x": "*fp32", "out": "*bf16"}


def test_a_kernel_compiles_with_wide_loads() -> None:
    made = compile_ahead(device_code.cast, TYPES | {"num_elements": "i32:16"}, {"BLOCK": 1024}, num_warps=4)
    assert "ld.global.v4.b32" in made.asm["ptx"] and "griddepcontrol.wait" in made.asm["ptx"]
    assert "LDG.E.128" in made.asm["sass"] and "ttg.num-warps" in made.asm["ttgir"]
    assert made.num_registers > 0 and made.spilled_bytes == 0 and made.shared_bytes == 0


def test_an_integer_that_16_may_not_divide_narrows_masked_loads() -> None:
    made = compile_ahead(device_code.cast, TYPES | {"num_elements": "i32"}, {"BLOCK": 1024})
    assert "ld.global.v4.b32" not in made.asm["ptx"]


@pytest.mark.parametrize(("capability", "instruction"), [(90, "wgmma.mma_async"), (100, "tcgen05.mma")])
def test_the_architecture_is_the_one_asked_for(capability: int, instruction: str) -> None:
    types = {"a": "*bf16", "b": "*bf16", "out": "*fp32"}
    made = compile_ahead(device_code.dot, types, {"SIZE": 128}, capability)
    assert instruction in made.asm["ptx"] and made.shared_bytes > 0


def test_what_does_not_compile_is_said() -> None:
    with pytest.raises(RuntimeError, match="device_code.cast does not compile: .*num_elements"):
        compile_ahead(device_code.cast, TYPES, {"BLOCK": 1024})
    with pytest.raises(RuntimeError, match="power of 2"):
        compile_ahead(device_code.cast, TYPES | {"num_elements": "i32"}, {"BLOCK": 1000})
