"""Angles: against transformers' frequencies, and in float64 whatever the model's dtype."""

import math

import pytest
import torch

from dist_infer.comm.collectives import SingleCollectives
from dist_infer.config import RopeConfig
from dist_infer.layers.rope import RotaryAngles, frequencies
from dist_infer.models.config_fields import Fields
from dist_infer.models.rope_fields import parse_rope
from tests.layers.setups import setup_of
from tests.tiny_models import LiftToDouble

LLAMA3 = RopeConfig(
    kind="llama3",
    theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


@pytest.mark.parametrize("head_dim", [2, 64, 128])
def test_default_frequencies(head_dim: int) -> None:
    expected = [10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    assert frequencies(RopeConfig(), head_dim).tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_llama3_frequencies(head_dim: int) -> None:
    """All three zones occur: kept, blended, divided by the factor."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": LLAMA3.theta,
            "factor": LLAMA3.factor,
            "low_freq_factor": LLAMA3.low_freq_factor,
            "high_freq_factor": LLAMA3.high_freq_factor,
            "original_max_position_embeddings": LLAMA3.original_max_position_embeddings,
        },
    )
    init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"]
    with LiftToDouble():
        expected, _ = init(config, device="cpu")
    assert expected.dtype == torch.float64
    ours = frequencies(LLAMA3, head_dim)
    torch.testing.assert_close(ours, expected, rtol=1e-14, atol=0)
    ratio = ours / frequencies(RopeConfig(theta=LLAMA3.theta), head_dim)
    assert ratio.max() == 1
    assert ratio.min() == 1 / 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_angles_are_exact_at_large_positions(dtype: torch.dtype) -> None:
    """Computed in float32, the angle of position 1,000,001 would be off by 0.02 radians."""
    cos, sin = RotaryAngles(RopeConfig(), 64, setup_of(SingleCollectives(), dtype))(torch.tensor([0, 1, 1_000_001]))
    assert cos.dtype == sin.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert cos.shape == sin.shape == (3, 32)
    for row, position in enumerate((0, 1, 1_000_001)):
        for i in range(32):
            angle = position * 10000.0 ** (-2 * i / 64)
            assert cos[row, i].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[row, i].item() == pytest.approx(math.sin(angle), abs=1e-7)


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "truncate"),
    [(None, None, True), (1.0, 1.0, True), (0.7, 1.3, False), (1.0, None, True)],
)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_yarn_is_that_of_transformers(
    head_dim: int, mscale: float | None, mscale_all_dim: float | None, truncate: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    section = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "truncate": truncate,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }
    reference = transformers.LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=163840, rope_parameters=dict(section)
    )
    init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    with LiftToDouble():
        expected, factor = init(reference, device="cpu")
    config = parse_rope(Fields({"rope_parameters": section}), 163840)
    torch.testing.assert_close(frequencies(config, head_dim), expected, rtol=1e-13, atol=0)
    assert config.angle_factor == pytest.approx(factor, rel=1e-15)
    angles = RotaryAngles(config, head_dim, setup_of(SingleCollectives()))
    cos, sin = angles(torch.tensor([0, 1, 5000]))
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, factor**2), rtol=1e-12, atol=0)


def test_a_part_of_the_channels_has_its_own_frequencies() -> None:
    config = RopeConfig(rotary_dim=6)
    angles = RotaryAngles(config, 128, setup_of(SingleCollectives()))
    cos, _ = angles(torch.tensor([1]))
    torch.testing.assert_close(cos[0], frequencies(RopeConfig(), 6).cos(), rtol=0, atol=1e-15)
