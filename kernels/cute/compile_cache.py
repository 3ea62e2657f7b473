"""Compiled kernels of CuTe DSL on disk: a start after the first compiles nothing, and ranks of a node compile once.

`cute.compile` compiles what it has compiled before. Here its result is kept as an object file, under the digest of all
that it was made of: the sources in this folder, the arguments, the versions, the architectures of device and host. The
file's name ends with the digest of its bytes, so a file that was cut or changed is known and made anew.
"""

import hashlib
import logging
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import cutlass
import torch
import tvm_ffi
from cutlass.base_dsl.cache_helpers import get_default_generated_ir_path
from cutlass.cute.runtime import load_module

from dist_infer.cache_folder import locked, open_private_folder
from dist_infer.errors import UsageError

_log = logging.getLogger(__name__)
_FUNCTION = "launch"


class Compiled(Protocol):
    """What `cute.compile` gives with --enable-tvm-ffi."""

    def export_to_c(self, object_file_path: str, function_name: str) -> None:
        """Writes an object file that has the function and its device code."""
        ...


def load_or_compile(
    name: str, arguments: str, compile_now: Callable[[], Compiled], *, folder: Path | None = None
) -> Callable[..., Any]:
    """The launch `name`, from the cache if it is there, else by `compile_now` and kept for all later starts.

    `arguments` spell all that `compile_now` depends on beside the sources. The function takes positional arguments and
    checks them; it is for any device of the current one's architecture. Without a cache folder that is the user's own
    the reason is logged and the kernel compiled as if it was the first time.
    """
    try:
        room = open_private_folder(folder or cache_folder())
        stem = f"{name}-{_digest(name, arguments)}"
        found = _load(room, stem)
        if found is not None:
            return found
        with locked(room / f"{stem}.lock", on_wait=lambda: None):
            return _load(room, stem) or _compile(room, stem, compile_now)
    except (UsageError, OSError) as error:
        _log.warning("%s is compiled at every start, its cache can't be used: %s", name, error)
        compiled: Any = compile_now()
        return compiled  # type: ignore[no-any-return]


def cache_folder() -> Path:
    """Below the folder of CuTe DSL's own cache, which CUTE_DSL_CACHE_DIR names."""
    return Path(get_default_generated_ir_path("CUTE_DSL")) / "kernels"


def _compile(room: Path, stem: str, compile_now: Callable[[], Compiled]) -> Callable[..., Any]:
    compiled = compile_now()
    draft = room / f"{stem}.draft"  # whoever writes it holds the lock
    compiled.export_to_c(str(draft), function_name=_FUNCTION)
    entry = room / f"{stem}.{_digest_of_file(draft)}.o"
    draft.replace(entry)
    _log.info("compiled %s, kept for later starts in %s", stem, room)
    return _open(entry)


def _load(room: Path, stem: str) -> Callable[..., Any] | None:
    """None when there is no entry, or only a broken one, which is removed."""
    for entry in sorted(room.glob(f"{stem}.*.o")):
        try:
            if entry.name == f"{stem}.{_digest_of_file(entry)}.o":
                return _open(entry)
            reason = "its bytes are not those that were written"
        except FileNotFoundError:  # another rank has removed a broken one
            continue
        except RuntimeError as error:
            reason = str(error)
        _log.warning("%s is compiled anew: %s: %s", stem, entry, reason)
        entry.unlink(missing_ok=True)
    return None


def _open(entry: Path) -> Callable[..., Any]:
    launch: Callable[..., Any] = load_module(str(entry), enable_tvm_ffi=True)[_FUNCTION]
    return launch


def _digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _digest(name: str, arguments: str) -> str:
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    text = repr((name, arguments, _surroundings(), capability))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _surroundings() -> tuple[str, ...]:
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.name.encode() + b"\0" + path.read_bytes())
    return sources.hexdigest(), cutlass.__version__, tvm_ffi.__version__, _host()


def _host() -> str:
    """The processor: an object has host code, and hosts of several kinds may share a folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {features}"
