"""Files of the safetensors package read in parts, every way in which a file can be wrong, and the memory of a rank."""

import errno
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_infer.checkpoint.safetensors import SafetensorsSource, write_safetensors
from dist_infer.errors import CheckpointError, UsageError
from tests.checkpoint.load_memory import NUM_RANKS, write_random_model

ROOT = Path(__file__).parents[2]
MODEL_BYTES = 2 << 30
SLACK_BYTES = 150 << 20
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    pytest.importorskip("safetensors.torch").save_file(tensors, path)


def save_sharded(folder: Path, shards: dict[str, dict[str, Tensor]]) -> None:
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    for file, tensors in shards.items():
        save(folder / file, tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_raw(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(begin: int, end: int, shape: Sequence[int] = (2,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def everything(tensor: Tensor) -> tuple[range, ...]:
    return tuple(range(size) for size in tensor.shape)


def raw(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """A tensor as something that can be compared for equal bits."""
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_by_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.arange(-12, 12).reshape(4, 6).to(dtype)
    save(tmp_path / "model.safetensors", {"w": tensor})
    source = SafetensorsSource(tmp_path)
    assert source.dtype("w") == dtype and source.shape("w") == (4, 6)
    assert raw(source.read("w", everything(tensor))) == raw(tensor)
    assert raw(source.read("w", (range(1, 3), range(2, 5)))) == raw(tensor[1:3, 2:5])


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (5, 6), (1, 9), (9, 1), (3, 4, 5), (2, 3, 4, 2), (0, 3), (3, 0)], ids=str
)
def test_parts_of_every_kind(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    save(tmp_path / "model.safetensors", {"before": torch.zeros(3), "w": tensor, "z": torch.ones(2)})
    source, rng = SafetensorsSource(tmp_path), random.Random(2)
    for _ in range(60):
        bounds = [sorted((rng.randint(0, size), rng.randint(0, size))) for size in shape]
        if rng.random() < 0.5 and bounds:
            dim = rng.randrange(len(shape))
            bounds[dim] = [0, shape[dim]]
        expected = tensor[tuple(slice(low, high) for low, high in bounds)]
        assert raw(source.read("w", tuple(range(low, high) for low, high in bounds))) == raw(expected)


def test_parts_outside_the_tensor_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"w": torch.zeros(4, 6)})
    source = SafetensorsSource(tmp_path)
    for take in [(range(4),), (range(5), range(6)), (range(-1, 2), range(6)), (range(0, 4, 2), range(6))]:
        with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'w' of shape \[4, 6\] has no part"):
            source.read("w", take)


def test_index_spreads_tensors_over_files(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(4, 3) for i in range(5)}
    shards = {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in ("t0", "t1", "t2")},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in ("t3", "t4")},
    }
    save_sharded(tmp_path, shards)
    source = SafetensorsSource(tmp_path)
    assert set(source.names()) == tensors.keys()
    for file, names in shards.items():
        for name in names:
            assert source.file_of(name) == str(tmp_path / file)
            assert torch.equal(source.read(name, everything(tensors[name])), tensors[name])


def test_files_may_be_links_as_in_the_hub_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save(tmp_path / "blobs" / "abc", {"w": torch.ones(3)})
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/abc")
    assert torch.equal(SafetensorsSource(tmp_path / "snapshot").read("w", (range(3),)), torch.ones(3))


def test_one_file_of_any_name(tmp_path: Path) -> None:
    save(tmp_path / "weights.safetensors", {"w": torch.ones(3)})
    assert list(SafetensorsSource(tmp_path).names()) == ["w"]
    assert list(SafetensorsSource(tmp_path / "weights.safetensors").names()) == ["w"]
    save(tmp_path / "more.safetensors", {"v": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"2 \.safetensors files, but no model\.safetensors\.index\.json"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickled_weights_are_refused_and_not_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()  # opening it would be another error
    with pytest.raises(UsageError, match=f"{name}: pickled weights are never loaded"):
        SafetensorsSource(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no \.safetensors file"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    "file", ["../evil.safetensors", "/etc/evil.safetensors", "sub/a.safetensors", "a\\b.safetensors", "a.bin", "", 5]
)
def test_index_with_anything_but_plain_file_names(file: object, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for target in (tmp_path.parent / "evil.safetensors", tmp_path / "sub" / "a.safetensors"):
        save(target, {"w": torch.ones(3)})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match=r"index\.json: tensor 'w' is said to be in .* no plain"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": "f', "[" * 100_000]
)
def test_corrupt_index(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        SafetensorsSource(tmp_path)


def test_index_that_does_not_agree_with_its_files(tmp_path: Path) -> None:
    save_sharded(tmp_path, {"a.safetensors": {"x": torch.ones(1)}, "b.safetensors": {"y": torch.ones(1)}})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"b\.safetensors: tensor 'z' is missing"):
        SafetensorsSource(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"b\.safetensors: tensor 'x' is missing"):
        SafetensorsSource(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: can't be read: No such file"):
        SafetensorsSource(tmp_path)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    one = torch.ones(1)
    save_sharded(
        tmp_path, {"a.safetensors": {"x": one, "v": torch.zeros(1)}, "b.safetensors": {"x": one, "y": torch.zeros(1)}}
    )
    with pytest.raises(CheckpointError, match=r"b\.safetensors: tensor 'x' is also in a\.safetensors"):
        SafetensorsSource(tmp_path)


def test_tensor_that_the_index_forgets_is_still_seen(tmp_path: Path) -> None:
    """So that the loader can call it unexpected instead of leaving a weight out."""
    save_sharded(tmp_path, {"a.safetensors": {"x": torch.ones(1), "y": torch.ones(1)}})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert set(SafetensorsSource(tmp_path).names()) == {"x", "y"}


def test_file_cut_at_every_place(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(path, {"a": torch.ones(4), "b": torch.ones(2, 3)})
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
            SafetensorsSource(tmp_path)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"tensor '[ab]' ends at byte"):
        SafetensorsSource(tmp_path)
    path.write_bytes(data + b"x")
    with pytest.raises(CheckpointError, match="1 bytes after the last tensor"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (b'{"w": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "w": {}}', "'w' is there twice"),
        (b"\xff\xfe", "corrupt"),
        ([], "no JSON object"),
        ({"w": 3}, "'w' has no dtype"),
        ({"w": {"dtype": "F32", "shape": [2]}}, "'w' has no dtype, shape and data_offsets"),
        ({"w": entry(0, 8, shape=[-2])}, "'w' has a wrong"),
        ({"w": entry(0, 8, shape=[True])}, "'w' has a wrong"),
        ({"w": entry(8, 0)}, "'w' has a wrong"),
        ({"w": entry(0, 8, shape=[3])}, r"'w' of shape \[3\], F32 can't have 8 bytes"),
        ({"v": entry(0, 4, [1]), "w": entry(2, 8, [6], "U8")}, "'w' overlap"),
        ({"w": entry(4, 8, [1])}, "'w' overlap another tensor or leave a hole"),
        ({"v": entry(0, 4, [1]), "w": entry(4, 12)}, "'w' ends at byte"),
        ({"w": entry(0, 4, [1])}, "4 bytes after the last tensor"),
    ],
)
def test_corrupt_header(header: object, match: str, tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{match}"):
        SafetensorsSource(tmp_path)


def test_dtype_that_is_not_known_is_named_when_it_is_used(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", {"v": entry(0, 4, [1]), "w": entry(4, 8, [8], "F4")}, bytes(8))
    source = SafetensorsSource(tmp_path)
    assert source.read("v", (range(1),)).tolist() == [0.0]
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'w' has the unsupported dtype F4"):
        source.dtype("w")


def test_absent_tensor_names_the_folder(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"w": torch.ones(3)})
    with pytest.raises(CheckpointError, match=f"{tmp_path}: tensor 'x' is missing"):
        SafetensorsSource(tmp_path).shape("x")


def test_file_that_changes_between_header_and_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(path, {"w": torch.ones(300)})
    source = SafetensorsSource(tmp_path)
    os.truncate(path, path.stat().st_size - 40)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: can't read tensor 'w': the file has changed"):
        source.read("w", (range(300),))
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: can't read tensor 'w': .*No such file"):
        source.read("w", (range(300),))


def test_reads_that_give_less_than_asked_or_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(300.0).reshape(30, 10)
    save(tmp_path / "model.safetensors", {"w": tensor})
    source, preadv = SafetensorsSource(tmp_path), os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(fd, [buffers[0][:7]], offset)

    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", short)
    assert torch.equal(source.read("w", (range(30), range(2, 9))), tensor[:, 2:9])
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    with pytest.raises(CheckpointError, match="can't read tensor 'w': the file ends at byte"):
        source.read("w", everything(tensor))
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: can't read tensor 'w': .*Input/output error"):
        source.read("w", everything(tensor))


def test_only_the_wanted_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "model.safetensors", {"w": torch.zeros(64, 256)})
    source, preadv, counts = SafetensorsSource(tmp_path), os.preadv, list[int]()

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        counts.append(preadv(fd, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    source.read("w", (range(64), range(128, 256)))
    assert counts == [128 * 4] * 64
    counts.clear()
    source.read("w", (range(16, 32), range(256)))
    assert counts == [16 * 256 * 4]


def test_written_file_is_read_by_the_package(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    rng = np.random.default_rng(3)
    tensors = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in [("a", (3, 5)), ("b", ()), ("c", (0, 2))]
    }
    tensors["transposed"] = tensors["a"].T
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {name: array.shape for name, array in tensors.items()}, tensors.values())
    loaded, source = load_file(path), SafetensorsSource(path)
    assert loaded.keys() == tensors.keys() == set(source.names())
    for name, array in tensors.items():
        assert np.array_equal(loaded[name].numpy(), array)
        assert np.array_equal(source.read(name, tuple(range(size) for size in array.shape)).numpy(), array)


def test_writing_another_shape_than_announced(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensor 'a' has shape \[2\] instead of \[3\]"):
        write_safetensors(tmp_path / "x.safetensors", {"a": (3,)}, [np.zeros(2, np.float32)])


def test_memory_of_a_rank_stays_within_shard_and_one_tensor(tmp_path: Path) -> None:
    """2 GiB of random bf16 weights on two ranks: high-water mark minus what the imports cost."""
    largest_bytes = write_random_model(tmp_path / "model.safetensors", MODEL_BYTES)
    program, environment = (
        Path(__file__).with_name("load_memory.py"),
        os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    for rank in range(NUM_RANKS):
        command = [sys.executable, str(program), str(tmp_path), str(rank)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        print(report)
        assert 0.4 * MODEL_BYTES < report["shard_bytes"] < 0.6 * MODEL_BYTES
        assert report["peak_bytes"] <= report["shard_bytes"] + largest_bytes + SLACK_BYTES
    (tmp_path / "model.safetensors").unlink()
