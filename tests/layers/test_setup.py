"""How layers choose kernel libraries."""

import pytest
import torch

from dist_infer.comm.collectives import SingleCollectives
from dist_infer.errors import UsageError
from dist_infer.kernels import rms_norm as op
from dist_infer.layers.setup import LayerSetup


def setup(orders: dict[str, str], lines: list[str]) -> LayerSetup:
    return LayerSetup(
        tp=SingleCollectives(),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        kernel_orders=orders,
        on_choice=lines.append,
    )


def test_choice_is_reported() -> None:
    lines: list[str] = []
    assert setup({}, lines).choose("rms_norm", op.LIBRARIES, hidden=4) in op.LIBRARIES
    assert lines == ["rms_norm: torch"]


def test_order_of_the_op_is_obeyed() -> None:
    lines: list[str] = []
    with pytest.raises(UsageError, match="rms_norm has no library 'nope'"):
        setup({"rms_norm": "nope"}, lines).choose("rms_norm", op.LIBRARIES)
    setup({"linear": "nope"}, lines).choose("rms_norm", op.LIBRARIES)


def test_parameters_have_the_dtype_of_the_model() -> None:
    parameter = setup({}, []).empty(2, 3)
    assert (parameter.shape, parameter.dtype) == ((2, 3), torch.bfloat16)
