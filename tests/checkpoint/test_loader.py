"""Every parameter exactly once, with the right part of the right tensor, or an error that names file and tensor."""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from dist_infer.checkpoint.loader import is_narrowing, load_weights
from dist_infer.errors import CheckpointError
from dist_infer.layers.weights import WeightSlot


@dataclass
class MemorySource:
    """Tensors in memory; each stands in a file of its own."""

    tensors: dict[str, Tensor]
    location: str = "memory"
    reads: list[str] = field(default_factory=list)

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def file_of(self, name: str) -> str:
        return f"file-of-{name}"

    def read(self, name: str, take: tuple[range, ...]) -> Tensor:
        self.reads.append(name)
        return self.tensors[name][tuple(slice(r.start, r.stop) for r in take)].clone()


def whole(name: str, into: Tensor) -> WeightSlot:
    return WeightSlot(name, tuple(into.shape), tuple(range(size) for size in into.shape), into)


def random_source(*names: str, dtype: torch.dtype = torch.float32) -> MemorySource:
    generator = torch.Generator().manual_seed(5)
    return MemorySource({name: torch.randn(6, 4, generator=generator).to(dtype) for name in names})


def test_parts_of_several_tensors_fill_packed_parameters() -> None:
    source = random_source("q", "k", "o")
    packed, columns = torch.full((5, 4), torch.nan), torch.full((6, 2), torch.nan)
    slots = [
        WeightSlot("q", (6, 4), (range(3, 6), range(4)), packed[:3]),
        WeightSlot("k", (6, 4), (range(2), range(4)), packed[3:]),
        WeightSlot("o", (6, 4), (range(6), range(1, 3)), columns),
    ]
    seen: list[str] = []
    num_bytes = load_weights(slots, source, on_tensor=seen.append)
    assert torch.equal(packed, torch.cat([source.tensors["q"][3:], source.tensors["k"][:2]]))
    assert torch.equal(columns, source.tensors["o"][:, 1:3])
    assert num_bytes == (packed.numel() + columns.numel()) * 4
    assert seen == source.reads == ["q", "k", "o"]


def test_a_rank_without_a_part_reads_nothing() -> None:
    source = random_source("w")
    slot = WeightSlot("w", (6, 4), (range(6, 6), range(4)), torch.empty(0, 4))
    assert load_weights([slot], source) == 0
    assert source.reads == []


def test_parameter_that_needs_a_gradient_is_filled() -> None:
    source, parameter = random_source("w"), torch.nn.Parameter(torch.empty(6, 4))
    load_weights([whole("w", parameter)], source)
    assert torch.equal(parameter, source.tensors["w"])


def test_missing_tensor() -> None:
    with pytest.raises(CheckpointError, match=r"^memory: tensor 'gone' is missing"):
        load_weights([whole("w", torch.empty(6, 4)), whole("gone", torch.empty(6, 4))], random_source("w"))


def test_unexpected_tensor_is_named_with_its_file() -> None:
    source = random_source("w", "x.extra", "x.inv_freq")
    with pytest.raises(CheckpointError, match=r"^file-of-x\.extra: tensor 'x\.extra' is unexpected"):
        load_weights([whole("w", torch.empty(6, 4))], source, ignored=[r".*inv_freq"])
    assert source.reads == []


def test_ignored_names_are_matched_as_a_whole() -> None:
    source = random_source("w", "w.more")
    with pytest.raises(CheckpointError, match="'w.more' is unexpected"):
        load_weights([whole("w", torch.empty(6, 4))], source, ignored=[r"\.more", "w"])
    load_weights([whole("w", torch.empty(6, 4))], source, ignored=[r"w\.\w+"])
    assert source.reads == ["w"]


def test_many_unexpected_tensors_are_counted() -> None:
    with pytest.raises(CheckpointError, match=r"'a', 'b', 'c' and 2 more"):
        load_weights([whole("w", torch.empty(6, 4))], random_source("w", "a", "b", "c", "d", "e"))


def test_wrong_shape() -> None:
    with pytest.raises(CheckpointError, match=r"^file-of-w: tensor 'w' has shape \[6, 4\], the model needs \[4, 6\]"):
        load_weights([whole("w", torch.empty(4, 6))], random_source("w"))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.int8, torch.float32),
        (torch.float32, torch.int64),
        (torch.float32, torch.float8_e4m3fn),
    ],
)
def test_cast_without_meaning(stored: torch.dtype, wanted: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=r"^file-of-w: tensor 'w' is stored as \w+ and can't become \w+"):
        load_weights([whole("w", torch.empty(6, 4, dtype=wanted))], random_source("w", dtype=stored))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_equal_dtype_is_copied_whatever_it_is(dtype: torch.dtype) -> None:
    source, into = random_source("w", dtype=dtype), torch.zeros(6, 4, dtype=dtype)
    load_weights([whole("w", into)], source)
    assert torch.equal(into.view(torch.uint8), source.tensors["w"].view(torch.uint8))


def test_fp32_parameter_keeps_its_digits_in_a_bf16_model(caplog: pytest.LogCaptureFixture) -> None:
    """All four values are 7.0 in bf16: a bias that chooses experts must not pass through it."""
    bias = torch.tensor([7.000, 7.004, 7.008, 7.012])
    source = MemorySource({"bias": bias, "w": torch.ones(2, dtype=torch.bfloat16)})
    into = torch.zeros(4)
    with caplog.at_level(logging.WARNING):
        load_weights([whole("bias", into), whole("w", torch.zeros(2, dtype=torch.bfloat16))], source)
    assert torch.equal(into, bias) and int(into.argmax()) == 3
    assert caplog.records == []


def test_rounding_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    source = random_source("a", "b", "c")
    into = [torch.zeros(6, 4, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float64)]
    with caplog.at_level(logging.WARNING):
        load_weights([whole(name, tensor) for name, tensor in zip("abc", into, strict=True)], source)
    assert [record.getMessage() for record in caplog.records] == [
        "memory: 2 tensors are rounded from float32 to bfloat16"
    ]
    assert torch.equal(into[0], source.tensors["a"].to(torch.bfloat16))
    assert torch.equal(into[2], source.tensors["c"].double())


@pytest.mark.parametrize(
    ("stored", "wanted", "narrowing"),
    [
        (torch.float32, torch.float64, False),
        (torch.bfloat16, torch.float32, False),
        (torch.float16, torch.float32, False),
        (torch.float64, torch.float32, True),
        (torch.float32, torch.bfloat16, True),
        (torch.float16, torch.bfloat16, True),
        (torch.bfloat16, torch.float16, True),
    ],
)
def test_is_narrowing(stored: torch.dtype, wanted: torch.dtype, narrowing: bool) -> None:
    assert is_narrowing(stored, wanted) is narrowing


@pytest.mark.parametrize("value", [1e5, -1e5])
def test_overflow_in_the_cast(value: float) -> None:
    source = MemorySource({"w": torch.tensor([1.0, value], dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=r"^file-of-w: tensor 'w' has values from .* too large for float16"):
        load_weights([whole("w", torch.empty(2, dtype=torch.float16))], source)


def test_infinity_that_is_stored_is_no_overflow() -> None:
    source, into = MemorySource({"w": torch.tensor([1.0, -torch.inf])}), torch.empty(2, dtype=torch.float16)
    load_weights([whole("w", into)], source)
    assert into.tolist() == [1.0, -torch.inf]


def test_parameter_that_is_filled_twice_or_never() -> None:
    source, parameter = random_source("a", "b"), torch.empty(12, 4)
    with pytest.raises(CheckpointError, match="'a' and 'b' would be loaded into the same elements"):
        load_weights([whole("a", parameter[:6]), whole("b", parameter[5:11])], source)
    with pytest.raises(CheckpointError, match="elements that no tensor of the checkpoint fills"):
        load_weights([whole("a", parameter[:6])], source, ignored=["b"])
    slots = [whole("a", parameter[:6]), whole("b", parameter[6:])]
    with pytest.raises(CheckpointError, match="parameter 'forgotten' has elements"):
        load_weights(slots, source, parameters=[("p", parameter), ("forgotten", torch.empty(3))])
    assert source.reads == []


@pytest.mark.parametrize("equal", [True, False])
def test_tied_twin_is_compared_on_this_ranks_rows(equal: bool, caplog: pytest.LogCaptureFixture) -> None:
    source, into = random_source("embed"), torch.empty(3, 4, dtype=torch.bfloat16)
    source.tensors["head"] = source.tensors["embed"].clone()
    source.tensors["head"][0] = 7  # not a row of this rank
    source.tensors["head"][4] += 0 if equal else 1
    slot = WeightSlot("embed", (6, 4), (range(3, 6), range(4)), into)
    with caplog.at_level(logging.WARNING):
        load_weights([slot], source, tied={"head": "embed"})
    assert torch.equal(into, source.tensors["embed"][3:].to(torch.bfloat16))
    differs = [record.getMessage() for record in caplog.records if "differs from its twin" in record.getMessage()]
    assert len(differs) == (0 if equal else 1)
    assert all(message.startswith("file-of-head: tensor 'head' differs") for message in differs)


def test_tied_twin_may_be_absent_and_of_another_shape(caplog: pytest.LogCaptureFixture) -> None:
    source, into = random_source("embed"), torch.empty(6, 4)
    load_weights([whole("embed", into)], source, tied={"head": "embed"})
    assert caplog.records == []
    source.tensors["head"] = torch.zeros(8, 4)
    load_weights([whole("embed", into)], source, tied={"head": "embed"})
    assert "differs from its twin" in caplog.text
