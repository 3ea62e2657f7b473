"""Which module may import what, beyond the layers that import-linter checks."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.source_tree import ROOT, source_files

SOURCES = source_files()
# What is imported -> the only modules (or packages) that may import it. First match counts.
DOORS = {
    "mpi4py": "dist_infer.launch",
    "cloudpickle": "dist_infer.launch.pool",
    "pickle": "dist_infer.launch.pool",
    "torch.distributed": "dist_infer.comm",
    "triton": "dist_infer.kernels.triton",
    "cutlass": "dist_infer.kernels.cute",
}
CONTAINERS = ("list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter", "local", "count")
WRITES = ("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")


def parse(name: str) -> ast.Module:
    return ast.parse(SOURCES[name].read_text())


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names of all that a module imports, anywhere in it, and of torch.distributed where it is spelled out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "distributed" and ast.unparse(node.value) == "torch":
            yield "torch.distributed"


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def door_faults(name: str, tree: ast.Module) -> list[str]:
    return [
        f"{name} imports {what}; only {owner} may"
        for what in imported(tree)
        for door, owner in DOORS.items()
        if is_in(what, door) and not is_in(name, owner)
    ]


def environment_faults(name: str, tree: ast.Module) -> list[str]:
    """The environment is read in launch and cli; a kernel's compiler cache is configured by its caller."""
    if is_in(name, "dist_infer.launch") or is_in(name, "dist_infer.cli"):
        return []
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
    return [f"{name}:{node.lineno} reads the environment" for node in nodes]


def rank_faults(name: str, tree: ast.Module) -> list[str]:
    """Rank and size come by constructor; nobody asks torch.distributed for them, and nothing is unpickled from disk."""
    banned = ("get_rank", "get_world_size", "all_gather_object", "broadcast_object_list", "gather_object")
    faults = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        call = ast.unparse(node.func)
        if node.func.attr in banned or call == "torch.load":
            faults.append(f"{name}:{node.lineno} calls {call}")
    return faults


def state_faults(name: str, tree: ast.Module) -> list[str]:
    """No function rebinds a global, and a container at module level is a constant: so spelled, and never written to."""
    faults = [f"{name}:{node.lineno} has a global statement" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    written = set(_written(tree))
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_mutable(node.value):
            target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            if target != "__all__" and (not target.isupper() or target in written):
                faults.append(f"{name}:{node.lineno} {target} is module-level state")
    return faults


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    return isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in CONTAINERS


def _written(tree: ast.Module) -> Iterator[str]:
    """Names whose items are assigned or deleted, or that get a call which changes a container."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield ast.unparse(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITES:
            yield ast.unparse(node.func.value)


Check = Callable[[str, ast.Module], list[str]]
CHECKS: list[Check] = [door_faults, environment_faults, rank_faults, state_faults]


@pytest.mark.parametrize("check", CHECKS)
def test_no_module_breaks_the_rule(check: Check) -> None:
    assert [fault for name in SOURCES for fault in check(name, parse(name))] == []


@pytest.mark.parametrize(
    ("check", "code"),
    [
        (door_faults, "def f():\n    from mpi4py import MPI"),
        (door_faults, "import torch.distributed as dist"),
        (door_faults, "from torch import distributed"),
        (door_faults, "x = torch.distributed.is_initialized()"),
        (door_faults, "import triton.language as tl"),
        (environment_faults, "import os\nx = os.environ['A']"),
        (environment_faults, "import os\nx = os.getenv('A')"),
        (rank_faults, "dist.get_rank()"),
        (rank_faults, "torch.load('x')"),
        (state_faults, "cache = {}"),
        (state_faults, "CACHE: dict[str, int] = {}\ndef f():\n    CACHE['a'] = 1"),
        (state_faults, "SEEN = set()\ndef f():\n    SEEN.add(1)"),
        (state_faults, "cache = collections.defaultdict(list)"),
        (state_faults, "def f():\n    global x\n    x = 1"),
    ],
)
def test_the_rule_finds_a_planted_fault(check: Check, code: str) -> None:
    assert len(check("dist_infer.layers.planted", ast.parse(code))) == 1


def test_layers_hold() -> None:
    pytest.importorskip("importlinter", reason="pip: import-linter")
    code = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_itself_holds_its_version_only() -> None:
    tree = ast.parse(Path(SOURCES["dist_infer"]).read_text())
    names = [ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)]
    assert names == ["__version__"]
    assert len(tree.body) == 2
