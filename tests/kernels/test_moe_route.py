"""The choice of the experts of each token."""

import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.carriers import RoutingMethod
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.moe_route import LIBRARIES, MoeRouteFunction, moe_route
from tests.kernels.aot import compile_ahead
from tests.kernels.triton_interpreter import TRITON_DEVICES

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
TRITON, TORCH = LIBRARIES
RUNS = [
    *(
        pytest.param(TRITON, *device.values, marks=device.marks, id=f"triton-{device.values[0]}")
        for device in TRITON_DEVICES
    ),
    pytest.param(TORCH, "cpu", id="torch-cpu"),
    pytest.param(TORCH, "cuda", marks=pytest.mark.gpu, id="torch-cuda"),
]


def interpreted(library: Library[MoeRouteFunction], device: str) -> bool:
    """Then a token takes milliseconds for each expert that it chooses."""
    return library is TRITON and device == "cpu"


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


@pytest.mark.parametrize(("library", "device"), RUNS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("num_experts", [NUM_EXPERTS, 5 * NUM_EXPERTS])
def test_against_sorting(
    device: str, library: Library[MoeRouteFunction], name: str, with_bias: bool, num_experts: int
) -> None:
    dtype = torch.float32 if library is TRITON or name == "mixtral" else torch.float64
    method = METHODS[name]
    if interpreted(library, device) and method.top_k > 8:
        method = replace(method, top_k=5)
    generator = torch.Generator().manual_seed(len(name))
    bias = torch.randn(num_experts, generator=generator, dtype=dtype).to(device) if with_bias else None
    for num_tokens in (0, 2) if interpreted(library, device) else (0, 1, 15):
        logits = (2 * torch.randn(num_tokens, num_experts, generator=generator, dtype=dtype)).to(device)
        logits = (64 * logits).round() / 64  # two scores are equal or clearly apart
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


@pytest.mark.parametrize(("library", "device"), RUNS)
@pytest.mark.parametrize("name", METHODS)
def test_padding_is_routed_nowhere(device: str, library: Library[MoeRouteFunction], name: str) -> None:
    method = replace(METHODS[name], top_k=2) if interpreted(library, device) else METHODS[name]
    logits = torch.randn(3, NUM_EXPERTS, device=device)
    logits[2:] = math.nan
    clean = moe_route(logits, None, method, library=library)
    for num_real in (0, 1, 3):
        count = torch.tensor([num_real], dtype=torch.int32, device=device)
        ids, weights = moe_route(logits, None, method, count, library=library)
        assert torch.equal(ids[:num_real], clean[0][:num_real])
        torch.testing.assert_close(weights[:num_real], clean[1][:num_real], rtol=0, atol=0, equal_nan=True)
        assert (ids[num_real:] == -1).all() and (weights[num_real:] == 0).all()


@pytest.mark.parametrize(("library", "device"), RUNS)
@pytest.mark.parametrize("held", [range(8, 20), range(3), range(20, 32), range(7, 7)], ids=str)
def test_ids_count_from_the_first_expert_held(device: str, library: Library[MoeRouteFunction], held: range) -> None:
    method = METHODS["qwen3 plain"]
    logits = torch.randn(3, NUM_EXPERTS, device=device)
    count = torch.tensor([2], dtype=torch.int32, device=device)
    all_ids, all_weights = moe_route(logits, None, method, count, library=library)
    ids, weights = moe_route(logits, None, method, count, held=held, library=library)
    here = [[held.index(expert) if expert in held else -1 for expert in row] for row in all_ids.tolist()]
    assert ids.dtype == torch.int32 and ids.tolist() == here
    assert torch.equal(weights, all_weights)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("name", METHODS)
def test_triton_chooses_as_torch_does(device: str, name: str) -> None:
    """What is odd: NaN, infinities, scores that are equal by saturation, a uniform choice."""
    logits = (64 * torch.randn(7, NUM_EXPERTS, device=device)).round() / 64
    logits[0] = math.nan
    logits[1, ::2] = math.nan
    logits[2] = 0
    logits[3, 3], logits[4, 7] = math.inf, -math.inf
    logits[5] *= 100
    plain = replace(METHODS[name], top_k=5) if interpreted(TRITON, device) else METHODS[name]
    for method in (plain, replace(plain, uniform=True)):
        ids, weights = moe_route(logits, None, method, library=TRITON)
        expected_ids, expected_weights = moe_route(logits, None, method, library=TORCH)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("name", METHODS)
def test_a_uniform_choice_loads_all_experts_alike(name: str) -> None:
    method = replace(METHODS[name], uniform=True)
    logits = torch.zeros(4096, NUM_EXPERTS)
    logits[:, 3] = 9
    ids, _ = moe_route(logits, None, method, library=TORCH)
    share = ids.flatten().long().bincount(minlength=NUM_EXPERTS) / (len(ids) * method.top_k / NUM_EXPERTS)
    assert share.min() > 0.85 and share.max() < 1.15
    assert all(len(set(row)) == method.top_k for row in ids[:64].tolist())


def test_the_kernel_compiles_for_hopper() -> None:
    types = dict.fromkeys(("logits", "bias", "weights"), "*fp32") | dict.fromkeys(("num_real", "ids"), "*i32")
    types |= {"row_stride": "i32:16", "epsilon": "fp32", "scaling": "fp32"}
    method = {
        "OVERLAP": True,
        "HAS_BIAS": True,
        "HAS_PADDING": True,
        "SOFTMAX": False,
        "RENORMALISE": True,
        "UNIFORM": False,
        "FIRST_HELD": 64,
        "END_HELD": 128,
    }
    groups = {"GROUPS": 8, "GROUP_LEN": 32, "GROUP_BLOCK": 8, "EXPERT_BLOCK": 32, "KEPT": 4, "BEST_TWO": True}
    sizes = {"TOP_K": 8, "K_BLOCK": 8, "expert_stride": 1}
    kernel = import_module("dist_infer.kernels.triton.moe_route")._route_kernel
    made = compile_ahead(kernel, types, {**method, **groups, **sizes}, num_warps=1)
    assert made.spilled_bytes == 0
    assert "ld.global.v4" in made.asm["ptx"]


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
    for held in (range(2, 5), range(0, 4, 2), range(3, 1)):
        with pytest.raises(ValueError, match="are not experts of 4"):
            moe_route(torch.zeros(1, 4), None, method, held=held, library=LIBRARIES[-1])
    with pytest.raises(ValueError, match=r"num_real torch.int64 \[1\] is not int32 \[1\]"):
        moe_route(torch.zeros(1, 4), None, method, torch.zeros(1, dtype=torch.int64), library=LIBRARIES[-1])
