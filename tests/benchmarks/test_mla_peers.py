"""Which arguments peers of latent decode get; their kernels are made up here."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks import mla_peers as peers

SHAPE = peers.Shape(torch.tensor([128, 128], dtype=torch.int32), 2, 3, 64, 0.1)
Q = torch.randn(4, 3, 576)
ROWS = torch.randn(4 * 64, 576)
TABLE = torch.arange(4, dtype=torch.int32).view(2, 2)


def test_flash_mla_plans_at_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[tuple[object, object]] = []

    def decode(
        q: Tensor,
        cache: Tensor,
        latent: int,
        kv_lens: Tensor,
        table: Tensor,
        scale: float,
        causal: bool,
        plan: Tensor | None,
        splits: Tensor | None,
        out: Tensor | None,
    ) -> list[Tensor]:
        plans.append((plan, splits))
        assert q.shape == (2, 2, 3, 576) and cache.shape == (4, 64, 1, 576) and latent == 512 and causal
        return [q[..., :512], kv_lens, torch.ones(1), torch.ones(2)]

    monkeypatch.setattr(peers, "compiled_ops", lambda *_: SimpleNamespace(dense_decode_fwd=decode))
    run = peers.flash_mla(SHAPE, None)
    for _ in range(2):
        assert torch.equal(run((Q, ROWS, TABLE))[0].view(4, 3, 512), Q[..., :512])
    assert plans[0] == (None, None) and [len(part) for part in plans[1] if isinstance(part, Tensor)] == [1, 2]


def test_flash_attention_has_latents_as_values(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, tuple[object, ...]] = {}

    def fwd(*given: object) -> list[object]:
        seen["fwd"] = given
        return [given[5]]

    def plan(*given: object) -> str:
        seen["plan"] = given
        return "plan"

    monkeypatch.setattr(peers, "compiled_ops", lambda *_: SimpleNamespace(fwd=fwd, get_scheduler_metadata=plan))
    out = peers.flash_attention(SHAPE, None)((Q, ROWS, TABLE))[0]
    assert torch.equal(out, Q[..., :512])
    q, keys, values = seen["fwd"][:3]
    assert isinstance(q, Tensor) and isinstance(keys, Tensor) and isinstance(values, Tensor)
    assert torch.equal(q, Q[..., 512:]) and keys.shape == (4, 64, 1, 64) and values.shape == (4, 64, 1, 512)
    assert len(seen["fwd"]) == 37 and "plan" in seen["fwd"] and seen["plan"][:7] == (2, 2, 128, 3, 1, 64, 512)
    starts = seen["plan"][9]
    assert isinstance(starts, Tensor) and starts.tolist() == [0, 2, 4]


def test_all_that_is_missing_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "compiled_ops", lambda *_: SimpleNamespace())
    found = peers.mla_peers(SHAPE, None)
    assert list(found) == ["FlashMLA", "FlashAttention-3"] and all(isinstance(peer, str) for peer in found.values())
