from typing import Any

import pytest

from dist_infer.errors import CheckpointError
from dist_infer.intake.sampling_defaults import SamplingDefaults, read_sampling_defaults


def test_what_the_model_says() -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05, "do_sample": True}
    assert read_sampling_defaults(config) == SamplingDefaults(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0, repetition_penalty=1.05
    )


@pytest.mark.parametrize("config", [{}, {"temperature": None, "top_k": -1, "eos_token_id": 5}, {"top_k": 0}])
def test_silence_is_the_api(config: dict[str, Any]) -> None:
    assert read_sampling_defaults(config) == SamplingDefaults()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.5),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_k", 1.5),
        ("top_k", -2),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("repetition_penalty", [1]),
    ],
)
def test_what_can_not_be_used_is_named(name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config.json: {name} is"):
        read_sampling_defaults({name: value})
