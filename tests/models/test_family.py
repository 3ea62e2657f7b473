"""What the families share."""

import pytest

from dist_infer.errors import UsageError
from dist_infer.models.config_fields import Fields
from dist_infer.models.family import check_top_k, number_of_experts, window_of_all_layers
from dist_infer.models.registry import FAMILIES, parse_config


def test_each_architecture_is_found_by_its_own_name() -> None:
    assert all(name == family.architecture for name, family in FAMILIES.items())
    assert len({family.model_type for family in FAMILIES.values()}) == len(FAMILIES)


def test_the_number_of_experts_has_several_names() -> None:
    assert number_of_experts(Fields({"num_experts": 3}), "num_local_experts", "num_experts") == 3
    assert number_of_experts(Fields({"num_local_experts": 4}), "num_local_experts", "num_experts") == 4
    with pytest.raises(UsageError, match="num_local_experts is missing"):
        number_of_experts(Fields({}), "num_local_experts", "num_experts")


@pytest.mark.parametrize(("window", "seen"), [(None, None), (99, 99), (100, None), (4096, None)])
def test_a_window_counts_where_it_hides_tokens(window: int | None, seen: int | None) -> None:
    config = parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 8,
            "intermediate_size": 8,
            "max_position_embeddings": 100,
            "num_attention_heads": 1,
            "num_hidden_layers": 1,
            "vocab_size": 9,
        }
    )
    assert window_of_all_layers(Fields({"sliding_window": window}), config, default=7) == seen
    assert window_of_all_layers(Fields({}), config, default=7) == 7
    assert window_of_all_layers(Fields({}), config) is None


def test_choices_that_cannot_be_made_are_refused() -> None:
    check_top_k(8, 4, num_groups=4, num_kept_groups=2)
    with pytest.raises(UsageError, match="num_experts_per_tok 5 is more than the 4 experts"):
        check_top_k(8, 5, num_groups=4, num_kept_groups=2)
