"""The host's side of a latent decode: what lies in a block. Launches are run by test_mla_decode."""

import ctypes

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from dist_infer.kernels.cute import mla_call


def test_a_block_holds_integers_and_then_the_fraction() -> None:
    values = {name: 10 * place - 5 for place, name in enumerate(mla_call._INTEGERS)}
    block = mla_call.Block(scale=0.1, **values)
    words = (ctypes.c_int64 * len(values)).from_address(block.address)
    assert list(words) == list(values.values())
    fraction = ctypes.c_float.from_address(block.address + 8 * len(values))
    assert fraction.value == ctypes.c_float(0.1).value
    assert block.address % 8 == 0
    with pytest.raises(KeyError, match="layers"):
        mla_call.Block(scale=0.1, **{name: value for name, value in values.items() if name != "layers"})
