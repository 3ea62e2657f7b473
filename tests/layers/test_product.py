"""A matrix of a layer before and after it is loaded: as it is, in the form of a library, shared with another layer."""

import pytest
import torch

from dist_infer.comm.collectives import SingleCollectives
from dist_infer.kernels.linear import LIBRARIES
from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.layers.product import Product
from dist_infer.layers.setup import LayerSetup
from tests.layers.setups import random

ONEDNN = next(library for library in LIBRARIES if library.name == "onednn")
N, K = 70, 36


def setup_of(order: str, dtype: torch.dtype = torch.float32, weight_format: WeightFormat | None = None) -> LayerSetup:
    return LayerSetup(
        tp=SingleCollectives(),
        dtype=dtype,
        device=torch.device("cpu"),
        kernel_orders={"linear": order},
        weight_format=weight_format,
    )


def test_a_plain_weight_is_never_touched() -> None:
    setup = setup_of("torch")
    product = Product(N, K, setup)
    weight = product.weight.copy_(random(N, K))
    assert product.stays_plain and setup.on_loaded == []
    x = random(3, K, seed=1).float()
    assert torch.equal(product(x), torch.nn.functional.linear(x, weight)) and product.weight is weight


def packing(dtype: torch.dtype) -> LayerSetup:
    setup = setup_of("onednn,torch", dtype)
    if Product(N, K, setup).stays_plain:
        pytest.skip("host: oneDNN can't multiply in this dtype on this processor")
    setup.on_loaded.clear()
    return setup


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_packed_once_loaded_and_its_rows_are_gone(dtype: torch.dtype) -> None:
    setup = packing(dtype)
    product = Product(N, K, setup)
    weight = product.weight.copy_(random(N, K))
    x, bias = random(3, K, seed=1).to(dtype), random(N, seed=2).to(dtype)
    before = product(x, bias)
    assert [finish() for finish in setup.on_loaded] == [0]
    assert product.weight is not weight and product.weight.nbytes == weight.nbytes and product.weight.is_mkldnn
    torch.testing.assert_close(product(x, bias), before)
    torch.testing.assert_close(product(x, bias), torch.nn.functional.linear(x, weight, bias))


def test_a_shared_weight_is_copied_and_the_copy_is_counted() -> None:
    setup = packing(torch.float32)
    rows = random(N, K).float()
    product = Product(N, K, setup, shared=rows)
    assert [finish() for finish in setup.on_loaded] == [-rows.nbytes]
    x = random(3, K, seed=1).float()
    torch.testing.assert_close(product(x), x @ rows.T)
    assert not rows.is_mkldnn and torch.equal(rows, random(N, K).float())


def test_what_stays_wide_is_not_quantised() -> None:
    setup = setup_of("torch", weight_format=WeightFormat.FP8)
    narrow, wide = Product(N, K, setup), Product(N, K, setup, stays_wide=True)
    assert wide.stays_plain and not narrow.stays_plain and len(setup.on_loaded) == 1


def test_float64_and_empty_weights_are_the_references() -> None:
    assert Product(N, K, setup_of("", torch.float64)).stays_plain
    assert Product(0, K, setup_of("")).stays_plain and Product(N, 0, setup_of("")).stays_plain
