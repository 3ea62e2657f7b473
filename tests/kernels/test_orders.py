"""Orders of libraries as a user writes them."""

import re

import pytest

from dist_infer.errors import UsageError
from dist_infer.kernels.choices import check_orders
from dist_infer.kernels.orders import NAMES, OPS, order_of, parse_orders
from tests.source_tree import ROOT


def test_orders_by_op_and_phase() -> None:
    orders = parse_orders(["linear = torch", "mla_attention=-cute", "mla_attention.generation=cute,triton"])
    assert order_of(orders, "linear") == "torch"
    assert order_of(orders, "rms_norm") == ""
    assert order_of(orders, "mla_attention", "context") == "-cute"
    assert order_of(orders, "mla_attention", "generation") == "cute,triton"
    check_orders(orders)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["linear"], "--kernels 'linear': it must be OP=LIST"),
        (["linear="], "it must be OP=LIST"),
        (["linear=, ,"], "it must be OP=LIST"),
        (["lineer=torch"], "there is no op 'lineer', choose from .*embedding, .*mla_attention.generation"),
        (["linear.context=torch"], "there is no op 'linear.context'"),
        (["linear=torch", "linear=-torch"], "gives linear twice, 'torch' and '-torch'"),
    ],
)
def test_what_is_no_order_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_orders(texts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rms_norm=cute", "rms_norm has no library 'cute': choose from triton, torch"),
        ("mla_attention.context=torch", "mla_attention.context has no library 'torch': choose from cute, triton, ref"),
        ("linear=torch,-triton", "use one form"),
        ("linear=+", "linear has no library ''"),
        ("scaled_linear=+nope", "scaled_linear has no library 'nope'"),
    ],
)
def test_libraries_that_there_are_not(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_orders(parse_orders([text]))


def test_every_op_that_a_layer_chooses_has_a_name() -> None:
    chosen = set()
    for path in [*(ROOT / "dist_infer" / "layers").glob("*.py"), ROOT / "dist_infer" / "sampler.py"]:
        chosen |= set(re.findall(r"(?:choose|choose_phases|select|resolve)\(\s*\"([a-z_]+)\"", path.read_text()))
    assert {"linear", "sample", "mla_attention"} <= chosen <= {*OPS}
    assert len(NAMES) == len(set(NAMES)) == len(OPS) + 4
