"""Tiny random Llamas against transformers in float64: at every tp size, with every option of the family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.errors import UsageError
from tests.fake_collectives import run_group
from tests.greedy_batch import greedy_batch
from tests.tiny_models import LLAMA3_ROPE, LiftedOracle, fill, load_tiny_model, make_tiny_llama, safetensors_torch

NUM_TOKENS = 10
PROMPTS = [[7], [(5 * i * i + 3) % 131 for i in range(17)], [(11 * i + i * i) % 131 for i in range(63)]]

MODELS: dict[str, dict[str, Any]] = {
    "4/2 llama3 biases": {"heads": 4, "kv_heads": 2, "rope": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True},
    "9/3 tied": {"heads": 9, "kv_heads": 3, "tie": True},
    "6/1 wide heads": {"heads": 6, "kv_heads": 1, "head_dim": 12, "mlp_bias": True, "std": 0.15},
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), **MODELS[request.param])


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[list[int], Tensor]]:
    oracle = LiftedOracle(checkpoint)
    return [oracle.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_tokens_and_logits_equal_the_oracle(
    checkpoint: Path, expected: list[tuple[list[int], Tensor]], tp_size: int
) -> None:
    results = run_group(tp_size, greedy_batch(checkpoint, PROMPTS, NUM_TOKENS))
    for tokens, logits in results:
        assert tokens == [tokens for tokens, _ in expected]
        assert torch.equal(logits, results[0][1])
        torch.testing.assert_close(logits, torch.stack([rows for _, rows in expected]), rtol=0, atol=1e-9)


def test_oracle_is_lifted(checkpoint: Path) -> None:
    """Without the lift, transformers rounds norms, angles and softmax to float32: far above what is tested here."""
    plain = LiftedOracle(checkpoint, lift=False).logits(PROMPTS[2])
    assert (plain - LiftedOracle(checkpoint).logits(PROMPTS[2])).abs().max() > 1e-7


def test_more_ranks_than_heads_is_refused(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="--tp 10 leaves ranks without an attention head"):
        run_group(10, lambda tp: load_tiny_model(checkpoint, tp))


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_slots_cover_every_tensor_once(checkpoint: Path, tp_size: int) -> None:
    """Each parameter is filled once on a rank, and the ranks together hold every element of every tensor."""
    tensors = safetensors_torch.load_file(checkpoint / "model.safetensors")

    def main(tp: Collectives) -> list[tuple[str, tuple[range, ...]]]:
        model = load_tiny_model(checkpoint, tp)
        slots = list(model.weight_slots())
        for slot in slots:
            slot.into.zero_()
        for slot in slots:
            slot.into.add_(1)
        assert all(bool((slot.into == 1).all()) for slot in slots)
        return [(slot.name, slot.take) for slot in slots]

    held = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    for rank in run_group(tp_size, main):
        assert sorted(name for name, _ in rank) == sorted(tensors)
        for name, take in rank:
            held[name][tuple(slice(part.start, part.stop) for part in take)] += 1
    assert all(bool((count >= 1).all()) for count in held.values())
    assert bool((held["model.embed_tokens.weight"] == 1).all())
    assert bool((held["model.layers.0.self_attn.q_proj.weight"] == 1).all())


@pytest.mark.parametrize("tp_size", [1, 2])
def test_tied_head_shares_the_embedding(tmp_path: Path, tp_size: int) -> None:
    """Tied: no head tensor is asked for, and one in the file is skipped and named as a copy of the embedding."""
    folder = make_tiny_llama(tmp_path, 4, 2, tie=True)

    def main(tp: Collectives) -> None:
        model = load_tiny_model(folder, tp)
        assert model.head.weight is model.embedding.weight
        assert "lm_head.weight" not in {slot.name for slot in model.weight_slots()}
        assert "lm_head\\.weight" in model.ignored_weights
        assert model.tied_weights == {"lm_head.weight": "model.embed_tokens.weight"}

    run_group(tp_size, main)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_untied_head_has_its_own_tensor(tmp_path: Path, tp_size: int) -> None:
    """Untied: the head must be in the file; without it the loop over the slots finds nothing to read."""
    folder = make_tiny_llama(tmp_path, 4, 2, tie=False)
    tensors = safetensors_torch.load_file(folder / "model.safetensors")

    def main(tp: Collectives) -> None:
        model = load_tiny_model(folder, tp)
        assert torch.equal(
            model.head.weight, tensors["lm_head.weight"][model.vocab_range.start : model.vocab_range.stop]
        )
        assert not torch.equal(model.head.weight, model.embedding.weight)
        assert not any("lm_head" in pattern for pattern in model.ignored_weights)
        assert model.tied_weights == {}
        with pytest.raises(KeyError, match="lm_head"):
            fill(model, {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})

    run_group(tp_size, main)
