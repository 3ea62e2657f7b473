"""How layers choose kernel libraries."""

from dataclasses import replace

import pytest
import torch

from dist_infer.comm.collectives import SingleCollectives
from dist_infer.comm.mesh import Mesh
from dist_infer.errors import UsageError
from dist_infer.kernels import rms_norm as op
from dist_infer.kernels.dispatch import Library
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
    assert len(lines) == 1 and lines[0].startswith("rms_norm: torch")


def test_what_no_graph_can_hold_is_kept() -> None:
    safe, unsafe = (Library(name=name, function=max, graph_safe=name == "safe") for name in ("safe", "unsafe"))
    made = setup({}, [])
    made.choose("first", (safe, unsafe))
    assert made.graph_blockers == set()
    replace(made, dtype=torch.float32).choose("second", (unsafe, safe))
    assert made.graph_blockers == {"second by unsafe"}


def test_order_of_the_op_is_obeyed() -> None:
    lines: list[str] = []
    with pytest.raises(UsageError, match="rms_norm has no library 'nope'"):
        setup({"rms_norm": "nope"}, lines).choose("rms_norm", op.LIBRARIES)
    setup({"linear": "nope"}, lines).choose("rms_norm", op.LIBRARIES)


def test_parameters_have_the_dtype_of_the_model() -> None:
    parameter = setup({}, []).empty(2, 3)
    assert (parameter.shape, parameter.dtype) == ((2, 3), torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_wide_parameters_are_never_narrower_than_float32(dtype: torch.dtype, wide: torch.dtype) -> None:
    parameter = replace(setup({}, []), dtype=dtype).empty_wide(2, 3)
    assert (parameter.shape, parameter.dtype) == ((2, 3), wide)


def test_without_a_mesh_the_group_is_the_world() -> None:
    assert setup({}, []).expert_mesh == Mesh.create(world=1, rank=0)
    mesh = Mesh.create(world=4, rank=2, dp=4)
    assert replace(setup({}, []), mesh=mesh).expert_mesh is mesh


def test_all_layers_share_a_lane() -> None:
    made = setup({}, [])
    assert made.lane is replace(made, dtype=torch.float32).lane
