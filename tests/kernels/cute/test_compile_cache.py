"""Compiled kernels on disk: found again, never believed when broken, made once by several processes."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from dist_infer.kernels.cute import compile_cache


class _Double:
    @cute.jit  # type: ignore[untyped-decorator]
    def __call__(self, x: cute.Tensor, stream: Any) -> None:
        self._kernel(x).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel  # type: ignore[untyped-decorator]
    def _kernel(self, x: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        x[thread] = x[thread] * 2.0


@pytest.fixture(scope="module")
def compiled() -> Any:
    x = make_fake_compact_tensor(cutlass.Float32, (32,))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(_Double(), x, stream, options="--enable-tvm-ffi --gpu-arch sm_90a")


@pytest.fixture
def counted(compiled: Any) -> tuple[Callable[[], Any], list[int]]:
    calls: list[int] = []

    def compile_now() -> Any:
        calls.append(1)
        time.sleep(0.02)  # time for another thread to come
        return compiled

    return compile_now, calls


def is_the_kernel(function: Callable[..., Any]) -> bool:
    with pytest.raises(TypeError, match=r"Expects 1 parameters.*x: Tensor\(\[32\], float32\)"):
        function()
    return True


def test_the_second_start_compiles_nothing(counted: Any, tmp_path: Path) -> None:
    compile_now, calls = counted
    for _ in range(2):
        assert is_the_kernel(compile_cache.load_or_compile("double", "32", compile_now, folder=tmp_path / "c"))
    assert len(calls) == 1
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700


def test_other_arguments_or_sources_are_another_kernel(
    counted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_now, calls = counted
    compile_cache.load_or_compile("double", "32", compile_now, folder=tmp_path / "c")
    compile_cache.load_or_compile("double", "64", compile_now, folder=tmp_path / "c")
    monkeypatch.setattr(compile_cache, "_surroundings", lambda: ("another source",))
    compile_cache.load_or_compile("double", "32", compile_now, folder=tmp_path / "c")
    assert len(calls) == 3


@pytest.mark.parametrize("broken", ["cut", "changed", "no object"])
def test_a_broken_entry_is_compiled_anew(
    counted: Any, broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compile_now, calls = counted
    compile_cache.load_or_compile("double", "32", compile_now, folder=tmp_path / "c")
    (entry,) = (tmp_path / "c").glob("*.o")
    data = entry.read_bytes()
    if broken == "cut":
        entry.write_bytes(data[:-1000])
    elif broken == "changed":
        entry.write_bytes(data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    else:
        stem = entry.name.split(".")[0]
        entry.unlink()
        other = tmp_path / "c" / "draft"
        other.write_bytes(b"no object at all")
        entry = other.rename(tmp_path / "c" / f"{stem}.{compile_cache._digest_of_file(other)}.o")
    with caplog.at_level(logging.WARNING):
        assert is_the_kernel(compile_cache.load_or_compile("double", "32", compile_now, folder=tmp_path / "c"))
    assert len(calls) == 2
    assert "is compiled anew" in caplog.text and str(entry) in caplog.text
    assert len(list((tmp_path / "c").glob("*.o"))) == 1


def test_several_at_once_compile_once(counted: Any, tmp_path: Path) -> None:
    compile_now, calls = counted
    found: list[Callable[..., Any]] = []

    def start() -> None:
        found.append(compile_cache.load_or_compile("double", "32", compile_now, folder=tmp_path / "c"))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len(found) == 4


def test_a_folder_that_is_open_to_others_is_not_used(
    counted: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compile_now, calls = counted
    (tmp_path / "c").mkdir(mode=0o777)
    (tmp_path / "c").chmod(0o777)
    with caplog.at_level(logging.WARNING):
        compile_cache.load_or_compile("double", "32", compile_now, folder=tmp_path / "c")
    assert len(calls) == 1 and "open to other users" in caplog.text
    assert list((tmp_path / "c").iterdir()) == []
