"""What the wheel holds: a package that pyproject's list lacks would be missing from the wheel without a word."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.source_tree import PACKAGE_DIRS, ROOT, is_package, source_files

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOP_LEVEL = ["comm", "kernels", "launch"]


def run_python(*args: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    env |= {"PYTHONPATH": str(path)} if path else {}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_listed_packages_are_the_folders_with_an_init() -> None:
    folders = {name for name, path in source_files().items() if is_package(path)}
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in source_files().values()}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_package_dirs_are_the_links() -> None:
    mapping = PYPROJECT["tool"]["setuptools"]["package-dir"]
    assert mapping == {name: folder for folder, name in PACKAGE_DIRS.items()}
    for folder in TOP_LEVEL:
        link = ROOT / "dist_infer" / folder
        assert link.is_symlink()
        assert os.readlink(link) == f"../{folder}"


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_bare_import_is_refused(name: str) -> None:
    done = run_python("-c", f"import {name}", cwd=ROOT)
    assert done.returncode == 1
    last_line = done.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError")
    assert f"import dist_infer.{name}" in last_line or f"dist_infer.{name}'" in last_line


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools writes into the tree that it builds."""
    pytest.importorskip("setuptools", reason="pip: setuptools")
    tree = tmp_path_factory.mktemp("tree")
    for name in PACKAGE_DIRS:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    out = tmp_path_factory.mktemp("wheel")
    pip = ["-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-q", "-w", str(out), "."]
    done = run_python(*pip, cwd=tree)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def test_wheel_holds_every_module_once_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    modules = [name for name in names if ".dist-info/" not in name]
    expected = []
    for name, path in source_files().items():
        stem = name.replace(".", "/")
        expected.append(f"{stem}/__init__.py" if is_package(path) else f"{stem}.py")
    assert sorted(modules) == sorted(expected)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_works_away_from_the_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "target with blanks"
    zipfile.ZipFile(wheel).extractall(target)
    code = "import dist_infer.comm.mesh as m, dist_infer.launch.mpirun as r; print(m.__file__, r.__file__)"
    done = run_python("-P", "-c", code, cwd=tmp_path, path=target)
    assert done.stdout.count(str(target)) == 2, done.stderr
    shown = run_python("-P", "-m", "dist_infer", "--help", cwd=tmp_path, path=target)
    assert shown.returncode == 0, shown.stderr
    assert "run" in shown.stdout


def test_console_script_is_declared() -> None:
    assert PYPROJECT["project"]["scripts"] == {"dist-infer": "dist_infer.cli.main:main"}
