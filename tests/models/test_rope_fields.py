"""Old and new spellings of the rotary embedding."""

import pytest

from dist_infer.config import RopeConfig
from dist_infer.errors import UsageError
from dist_infer.models.config_fields import Fields
from dist_infer.models.rope_fields import parse_rope

SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}
LLAMA3 = RopeConfig(
    kind="llama3",
    theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=4096,
)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 100000, "rope_scaling": None}, RopeConfig(theta=100000.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e5}}, RopeConfig(theta=2e5)),
        ({"rope_parameters": {"rope_theta": 2e5, "partial_rotary_factor": 1.0}}, RopeConfig(theta=2e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALING}}, LLAMA3),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}}, LLAMA3),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}}, LLAMA3),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, RopeConfig(theta=5e5)),
    ],
)
def test_spellings(fields: dict[str, object], expected: RopeConfig) -> None:
    assert parse_rope(Fields(fields), 131072) == expected


def test_original_length_defaults_to_the_model_s() -> None:
    scaling = {key: value for key, value in SCALING.items() if key != "original_max_position_embeddings"}
    rope = parse_rope(Fields({"rope_scaling": {"rope_type": "llama3", **scaling}}), 131072)
    assert rope.original_max_position_embeddings == 131072


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling.type 'linear' is not supported; supported: default, llama3",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor is missing"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.low_freq_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "llama3", **SCALING, "high_freq_factor": 1.0}},
            "is not below high_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported"),
        ({"rope_theta": "big"}, "rope_theta is 'big'; it must be a positive number"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; it must be an object"),
    ],
)
def test_what_is_not_supported_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_rope(Fields(fields), 2048)
