"""The choice of a token among the likeliest, for rows of every option at once."""

import math

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.reference.sample_filtered import kept_prefix
from dist_infer.kernels.sample import row_keys
from dist_infer.kernels.sample_filtered import LIBRARIES, SampleFilteredFunction, sample_filtered
from dist_infer.kernels.triton.sample_filtered import _count, _find_cuts
from tests.kernels.aot import compile_ahead
from tests.kernels.library_cases import library_cases, library_devices

REFERENCE = LIBRARIES[-1]
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
OPTIONS = [
    *(
        (0.7, top_k, top_p, min_p)
        for top_k, top_p, min_p in (
            (0, 1.0, 0.0),
            (1, 1.0, 0.0),
            (5, 1.0, 0.0),
            (0, 0.6, 0.0),
            (0, 1.0, 0.2),
            (20, 0.9, 0.01),
            (500, 0.3, 0.0),
            (0, 0.0, 0.0),
            (0, 0.999, 1.0),
            (3, 0.5, 0.5),
        )
    ),
    (0.0, 5, 0.9, 0.1),
    (1.5, 0, 0.9, 0.0),
    (1.5, 50, 0.8, 0.3),
    (0.7, 200, 1.0, 0.0),  # to where weights are tiny
    (0.7, 0, 1.0, 1e-5),
    (0.4, 250, 0.99999999, 0.0),
    (0.3, 0, 0.99999999, 0.0),
]


def option_tensors(options: list[tuple[float, int, float, float]], device: str) -> tuple[Tensor, ...]:
    """temperature, top_k, top_p, min_p and keys of a row for each of the options."""
    temperature, top_k, top_p, min_p = zip(*options, strict=True) if options else ((), (), (), ())
    doubles = [torch.tensor(column, dtype=torch.float64, device=device) for column in (temperature, top_p, min_p)]
    rows = torch.arange(len(options))
    keys = row_keys(torch.full_like(rows, 11), rows).to(device)
    return doubles[0], torch.tensor(top_k, dtype=torch.int64, device=device), doubles[1], doubles[2], keys


def truth(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Columns of a row that are in, by the definition, with exact sums."""
    values = [-math.inf if math.isnan(value) else value for value in row.tolist()]
    columns = sorted(range(len(values)), key=lambda column: (-values[column], column))
    first = values[columns[0]]
    if temperature == 0:
        return columns[:1]
    weights = {
        column: 1.0 if values[column] == first else math.exp((values[column] - first) / temperature)
        for column in columns
    }
    left = [column for column in columns if weights[column] >= min_p][: top_k or None]
    whole = math.fsum(weights[column] for column in left)
    kept = [
        column
        for place, column in enumerate(left)
        if top_p >= 1 or math.fsum(weights[earlier] for earlier in left[:place]) < top_p * whole
    ]
    return kept or columns[:1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_kept_are_those_of_the_definition(dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(len(OPTIONS), 60, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits[:, 7] = logits[:, 9] = torch.nan
    values, columns = logits.masked_fill(logits.isnan(), -torch.inf).sort(dim=1, descending=True, stable=True)
    temperature, top_k, top_p, min_p, _ = option_tensors(OPTIONS, "cpu")
    kept = kept_prefix(values.double(), temperature, top_k, top_p, min_p)
    for row, options in enumerate(OPTIONS):
        if options[0]:
            assert columns[row, kept[row]].tolist() == truth(logits[row], *options), options
        else:
            assert kept[row, 0]


@pytest.mark.parametrize(("library", "device", "dtype"), library_cases(LIBRARIES))
@pytest.mark.parametrize("num_columns", [1, 300])
def test_every_library_gives_the_tokens_of_the_reference(
    library: Library[SampleFilteredFunction], device: str, dtype: torch.dtype, num_columns: int
) -> None:
    generator = torch.Generator().manual_seed(num_columns)
    logits = (3 * torch.randn(len(OPTIONS), num_columns + 3, generator=generator)).to(dtype)[:, 3:]
    expected = sample_filtered(logits, *option_tensors(OPTIONS, "cpu"), library=REFERENCE)
    chosen = sample_filtered(logits.to(device), *option_tensors(OPTIONS, device), library=library)
    assert chosen.dtype == torch.int64 and chosen.tolist() == expected.tolist()


@pytest.mark.parametrize(("library", "device"), library_devices(LIBRARIES))
def test_of_equal_logits_the_first_columns_are_in(library: Library[SampleFilteredFunction], device: str) -> None:
    """Few values, so that the last column that is in has equals to its right, in other tiles too."""
    options = [(0.7, 0, 0.6, 0.0), (0.7, 5, 1.0, 0.0), (1.5, 4500, 0.999, 0.0), (0.7, 300, 0.9, 0.5)]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(0, 3, (len(options), 5000), generator=generator).bfloat16() / 256
    expected = sample_filtered(logits, *option_tensors(options, "cpu"), library=REFERENCE)
    chosen = sample_filtered(logits.to(device), *option_tensors(options, device), library=library)
    assert chosen.tolist() == expected.tolist()


@pytest.mark.parametrize(("library", "device"), library_devices(LIBRARIES))
def test_a_row_is_chosen_as_if_it_were_alone(library: Library[SampleFilteredFunction], device: str) -> None:
    logits = torch.randn(len(OPTIONS), 200, generator=torch.Generator().manual_seed(5)).bfloat16().to(device)
    options = option_tensors(OPTIONS, device)
    together = sample_filtered(logits, *options, library=library)
    for row in (3, 5, 12):
        own = tuple(option[row : row + 1] for option in options)
        alone = sample_filtered(logits[row : row + 1], *own, library=library)
        assert alone.tolist() == [together[row].item()]
    none = sample_filtered(logits[:0], *option_tensors(OPTIONS[:0], device), library=library)
    assert none.shape == (0,) and none.dtype == torch.int64


@pytest.mark.parametrize(
    ("library", "device"), [(REFERENCE, "cpu"), pytest.param(LIBRARIES[0], "cuda", marks=pytest.mark.gpu)]
)
def test_every_kept_column_is_drawn_and_no_other(library: Library[SampleFilteredFunction], device: str) -> None:
    num_rows = 400
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 1.0, -math.inf]]).bfloat16().repeat(num_rows, 1).to(device)
    by_option = {
        (2, 1.0, 0.0): {1, 2},
        (4, 1.0, 0.0): {0, 1, 2, 3},
        (0, 0.4, 0.0): {1, 2},
        (0, 1.0, 0.5): {1, 2, 3},
        (0, 1.0, 0.0): {0, 1, 2, 3, 4},
    }
    for (top_k, top_p, min_p), columns in by_option.items():
        options = option_tensors([(1.0, top_k, top_p, min_p)] * num_rows, device)
        assert set(sample_filtered(logits, *options, library=library).tolist()) == columns


@pytest.mark.parametrize(("library", "device"), library_devices(LIBRARIES))
def test_infinite_logits_and_zeros_of_both_signs(library: Library[SampleFilteredFunction], device: str) -> None:
    nan, inf = math.nan, math.inf
    rows = [[-inf, nan, -inf, nan], [nan, inf, 1, inf], [-0.0, 0.0, -0.0, -1], [nan, -inf, -5, nan]]
    logits = torch.tensor(rows).bfloat16().to(device)
    for own in ((1.0, 2, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 3, 0.6, 0.0), (0.1, 0, 1.0, 0.5)):
        options = [own] * 4
        expected = sample_filtered(logits.cpu(), *option_tensors(options, "cpu"), library=REFERENCE)
        chosen = sample_filtered(logits, *option_tensors(options, device), library=library)
        assert chosen.tolist() == expected.tolist()
        assert chosen[1].item() in (1, 3) and chosen[2].item() in (0, 1, 2) and chosen[3].item() in (2, 1, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_a_real_vocabulary_in_a_captured_graph(dtype: torch.dtype) -> None:
    logits = torch.empty(len(OPTIONS), 128256, device="cuda", dtype=dtype)
    options = option_tensors(OPTIONS, "cuda")
    logits.normal_()
    for library in LIBRARIES:
        sample_filtered(logits, *options, library=library)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = [sample_filtered(logits, *options, library=library) for library in LIBRARIES]
    for scale in (1.0, 4.0):
        logits.normal_().mul_(scale)
        graph.replay()
        assert chosen[0].tolist() == chosen[1].tolist()
        expected = sample_filtered(logits.cpu(), *option_tensors(OPTIONS, "cpu"), library=REFERENCE)
        assert chosen[0].tolist() == expected.tolist()


def test_ahead_of_time_loads_are_wide() -> None:
    options = {"temperature": "*fp64", "top_k": "*i64", "top_p": "*fp64", "min_p": "*fp64"}
    types = {
        "logits": "*bf16",
        **options,
        "counts": "*i32",
        "sums": "*i64",
        "num_columns": "i32:16",
        "row_stride": "i32:16",
    }
    made = compile_ahead(_count, types | {"part_len": "i32:16"}, {"BLOCK": 1024}, num_warps=4)
    assert "ld.global.v4.b32" in made.asm["ptx"] and made.spilled_bytes == 0
    made = compile_ahead(_find_cuts, types | {"cut_values": "*fp64", "last_ties": "*i32"}, {"TILE": 4096}, num_warps=8)
    assert "ld.global.v4.b32" in made.asm["ptx"] and made.spilled_bytes == 0


def test_what_does_not_fit_is_refused() -> None:
    options = option_tensors(OPTIONS[:2], "cpu")
    with pytest.raises(ValueError, match=r"logits \[2, 0\] are not"):
        sample_filtered(torch.zeros(2, 0), *options, library=REFERENCE)
    with pytest.raises(ValueError, match=r"temperature torch.float64 \[2\] must be torch.float64 \[rows\]"):
        sample_filtered(torch.zeros(3, 4), *options, library=REFERENCE)
    with pytest.raises(ValueError, match="top_k torch.int32"):
        sample_filtered(torch.zeros(2, 4), options[0], options[1].int(), *options[2:], library=REFERENCE)
