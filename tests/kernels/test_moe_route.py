"""The choice of the experts of each token."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.carriers import RoutingMethod
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.moe_route import LIBRARIES, MoeRouteFunction, moe_route
from tests.devices import DEVICES

METHODS = {
    "deepseek v3": RoutingMethod(
        scoring="sigmoid",
        top_k=4,
        renormalise=True,
        renorm_epsilon=1e-20,
        scaling_factor=2.5,
        num_groups=4,
        num_kept_groups=2,
        group_score="top2_sum",
    ),
    "deepseek v2 greedy": RoutingMethod(scoring="softmax", top_k=6, scaling_factor=16.0),
    "deepseek v2 groups": RoutingMethod(scoring="softmax", top_k=3, num_groups=8, num_kept_groups=3),
    "qwen3 plain": RoutingMethod(scoring="softmax", top_k=8),
    "mixtral": RoutingMethod(scoring="softmax", top_k=2, renormalise=True),
    "minimax m2": RoutingMethod(scoring="sigmoid", top_k=8, renormalise=True),
    "all experts": RoutingMethod(scoring="softmax", top_k=32, renormalise=True),
}
NUM_EXPERTS = 32


def chosen(choice: list[float], method: RoutingMethod) -> list[int]:
    """The experts of one token by sorting, of equal ones the smaller id."""
    group_len = len(choice) // method.num_groups
    groups = [range(start, start + group_len) for start in range(0, len(choice), group_len)]
    num_best = 1 if method.group_score == "max" else min(2, group_len)

    def quality(group: range) -> float:
        return sum(sorted((choice[expert] for expert in group), reverse=True)[:num_best])

    kept = sorted(groups, key=lambda group: (-quality(group), group.start))[: method.num_kept_groups]
    eligible = [expert for group in kept for expert in group]
    return sorted(eligible, key=lambda expert: (-choice[expert], expert))[: method.top_k]


def weights_of(logits: Tensor, ids: Tensor, method: RoutingMethod) -> Tensor:
    """The formula in float64."""
    wide = logits.double()
    scores = wide.exp() / wide.exp().sum(1, keepdim=True) if method.scoring == "softmax" else 1 / (1 + (-wide).exp())
    weights = scores.gather(1, ids.long())
    if method.renormalise:
        weights = weights / (weights.sum(1, keepdim=True) + method.renorm_epsilon)
    return weights * method.scaling_factor


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_against_sorting(
    device: str, library: Library[MoeRouteFunction], dtype: torch.dtype, name: str, with_bias: bool
) -> None:
    method = METHODS[name]
    generator = torch.Generator().manual_seed(len(name))
    bias = torch.randn(NUM_EXPERTS, generator=generator, dtype=dtype).to(device) if with_bias else None
    for num_tokens in (0, 1, 63):
        logits = (2 * torch.randn(num_tokens, NUM_EXPERTS, generator=generator, dtype=dtype)).to(device)
        logits[1::2] = logits[1::2].round()  # ties
        ids, weights = moe_route(logits, bias, method, library=library)
        assert (ids.dtype, weights.dtype) == (torch.int32, dtype)
        assert ids.shape == weights.shape == (num_tokens, method.top_k)
        scores = logits.softmax(1) if method.scoring == "softmax" else logits.sigmoid()
        choice = scores if bias is None else scores + bias
        assert ids.tolist() == [chosen(row, method) for row in choice.tolist()]
        tolerance = 1e-14 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(weights.double(), weights_of(logits, ids, method), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_equal_logits_choose_the_smallest_ids(name: str) -> None:
    method = METHODS[name]
    ids, _ = moe_route(torch.zeros(2, NUM_EXPERTS), None, method, library=LIBRARIES[-1])
    assert ids.tolist() == [list(range(method.top_k))] * 2


def test_bias_changes_the_choice_and_no_weight() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    method = RoutingMethod(scoring="sigmoid", top_k=2)
    ids, weights = moe_route(logits, torch.tensor([5.0, 0, 0, 0]), method, library=LIBRARIES[-1])
    assert ids.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, logits.sigmoid()[:, [0, 3]])


def test_bias_that_bfloat16_would_round_away_decides() -> None:
    """Four biases that all become 7.0 in bfloat16."""
    bias = torch.tensor([7.000, 7.004, 7.008, 7.012])
    method = RoutingMethod(scoring="sigmoid", top_k=1)
    ids, _ = moe_route(torch.zeros(1, 4), bias, method, library=LIBRARIES[-1])
    assert ids.item() == 3
    with pytest.raises(ValueError, match=r"bias torch.bfloat16 \[4\] is not float32 or float64 \[4\]"):
        moe_route(torch.zeros(1, 4), bias.bfloat16(), method, library=LIBRARIES[-1])


@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
def test_groups_are_judged_by_their_best(group_score: str) -> None:
    """One group has the best expert, another the best two."""
    choice = torch.tensor([[0.9, 0.1, 0.1, 0.8, 0.7, 0.1]])
    logits = (choice / (1 - choice)).log()
    method = RoutingMethod(scoring="sigmoid", top_k=1, num_groups=2, num_kept_groups=1)
    if group_score == "top2_sum":
        method = replace(method, group_score="top2_sum")
    ids, _ = moe_route(logits, None, method, library=LIBRARIES[-1])
    assert ids.item() == (0 if group_score == "max" else 3)


def test_negative_choices_of_kept_groups_beat_dropped_groups() -> None:
    """A dropped group counts as -inf, not as zero."""
    bias = torch.tensor([-5.0, -6.0, -7.0, -8.0])
    method = RoutingMethod(scoring="sigmoid", top_k=2, num_groups=2, num_kept_groups=1, group_score="top2_sum")
    ids, _ = moe_route(torch.zeros(1, 4), bias, method, library=LIBRARIES[-1])
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("name", METHODS)
def test_nan_rows_still_give_different_experts(name: str) -> None:
    logits = torch.randn(3, NUM_EXPERTS)
    clean = moe_route(logits, None, METHODS[name], library=LIBRARIES[-1])
    logits[1] = math.nan
    ids, weights = moe_route(logits, None, METHODS[name], library=LIBRARIES[-1])
    assert len(set(ids[1].tolist())) == METHODS[name].top_k
    assert int(ids.min()) >= 0 and int(ids.max()) < NUM_EXPERTS
    for row in (0, 2):
        assert torch.equal(ids[row], clean[0][row]) and torch.equal(weights[row], clean[1][row])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("name", METHODS)
def test_padding_is_routed_nowhere(device: str, library: Library[MoeRouteFunction], name: str) -> None:
    logits = torch.randn(7, NUM_EXPERTS, device=device)
    logits[5:] = math.nan
    clean = moe_route(logits, None, METHODS[name], library=library)
    for num_real in (0, 1, 5, 7):
        count = torch.tensor([num_real], dtype=torch.int32, device=device)
        ids, weights = moe_route(logits, None, METHODS[name], count, library=library)
        assert torch.equal(ids[:num_real], clean[0][:num_real])
        torch.testing.assert_close(weights[:num_real], clean[1][:num_real], rtol=0, atol=0, equal_nan=True)
        assert (ids[num_real:] == -1).all() and (weights[num_real:] == 0).all()


def test_large_logits_neither_overflow_nor_vanish() -> None:
    logits = torch.tensor([[1000.0, -1000.0, 999.0]])
    method = RoutingMethod(scoring="softmax", top_k=2, renormalise=True)
    _, weights = moe_route(logits, None, method, library=LIBRARIES[-1])
    torch.testing.assert_close(weights, torch.tensor([[1 / (1 + math.exp(-1)), 1 / (1 + math.e)]]))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (RoutingMethod(scoring="softmax", top_k=0), "chooses 0 of 32 eligible"),
        (RoutingMethod(scoring="softmax", top_k=33), "chooses 33 of 32 eligible"),
        (RoutingMethod(scoring="softmax", top_k=17, num_groups=4, num_kept_groups=2), "chooses 17 of 16 eligible"),
        (RoutingMethod(scoring="softmax", top_k=1, num_groups=5, num_kept_groups=2), "2 of 5 equal groups of 32"),
        (RoutingMethod(scoring="softmax", top_k=1, num_groups=4, num_kept_groups=5), "5 of 4 equal groups of 32"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(method: RoutingMethod, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_route(torch.zeros(1, NUM_EXPERTS), None, method, library=LIBRARIES[-1])


def test_narrow_logits_and_wrong_shapes_are_refused() -> None:
    method = RoutingMethod(scoring="softmax", top_k=1)
    with pytest.raises(ValueError, match=r"logits torch.bfloat16 \[1, 4\] are not float32 or float64"):
        moe_route(torch.zeros(1, 4, dtype=torch.bfloat16), None, method, library=LIBRARIES[-1])
    with pytest.raises(ValueError, match=r"logits torch.float32 \[4\]"):
        moe_route(torch.zeros(4), None, method, library=LIBRARIES[-1])
    with pytest.raises(ValueError, match=r"bias torch.float32 \[3\] is not float32 or float64 \[4\]"):
        moe_route(torch.zeros(1, 4), torch.zeros(3), method, library=LIBRARIES[-1])
    with pytest.raises(ValueError, match=r"num_real torch.int64 \[1\] is not int32 \[1\]"):
        moe_route(torch.zeros(1, 4), None, method, torch.zeros(1, dtype=torch.int64), library=LIBRARIES[-1])
