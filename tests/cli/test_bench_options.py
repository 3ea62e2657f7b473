"""What the command's own tests don't reach."""

import pytest

from dist_infer.cli.bench_options import BenchOptions
from dist_infer.errors import UsageError


def test_a_dataset_may_have_a_count_and_a_rate() -> None:
    BenchOptions(dataset="d", num_prompts=5, request_rate=1.0, output_len=3, warmup=0)


@pytest.mark.parametrize(
    "values", [{"range_ratio": float("nan")}, {"request_rate": float("nan")}, {"result": ""}, {"seed": 2**63}]
)
def test_values_that_make_no_sense(values: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        BenchOptions(**values)  # type: ignore[arg-type]
