"""The script that makes the environment, with fakes of python3 and apt-get first in PATH: nothing is installed."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.source_tree import ROOT

MAY_INSTALL = os.geteuid() == 0 and Path("/etc/debian_version").exists()
# Knows its version; has venv once the flag is there; "makes" an environment by writing down how it was asked.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
    *version_info*) exit {old} ;;
    *ensurepip*) [ -e {flag} ] ;;
    *sys.executable*) echo fake 3.11.0 ;;
    *) echo "$*" > {made} ;;
esac
"""
FAKE_APT = """#!/bin/sh
echo "$*" >> {log}
case "$*" in *install*) touch {flag} ;; esac
"""


class Machine:
    """A PATH with a python3 of our making."""

    def __init__(self, folder: Path, *, old: bool = False, has_venv: bool = False) -> None:
        self.made, self.log, self.flag = folder / "made", folder / "apt.log", folder / "has-venv"
        self.bin = folder / "bin"
        self.bin.mkdir()
        if has_venv:
            self.flag.touch()
        self._write("python3", FAKE_PYTHON.format(old=int(old), flag=self.flag, made=self.made))
        for name in ("python3.14", "python3.13", "python3.12", "python3.11"):
            self._write(name, "#!/bin/sh\nexit 1\n")
        self._write("apt-get", FAKE_APT.format(log=self.log, flag=self.flag))

    def _write(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def make_venv(self, python: str = "") -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{self.bin}:/usr/bin:/bin", "PYTHON": python}
        command = [str(ROOT / ".ci" / "make-venv"), "env"]
        return subprocess.run(command, cwd=self.bin.parent, env=env, capture_output=True, text=True, timeout=60)

    def apt_calls(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def test_a_good_python_makes_the_environment_without_apt(tmp_path: Path) -> None:
    machine = Machine(tmp_path, has_venv=True)
    done = machine.make_venv()
    assert done.returncode == 0, done.stderr
    assert machine.made.read_text() == "-m venv --clear env\n"
    assert machine.apt_calls() == ""


def test_only_root_on_debian_gets_what_is_missing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    done = machine.make_venv()
    if MAY_INSTALL:
        assert done.returncode == 0, done.stderr
        assert "python3-venv" in machine.apt_calls()
        assert machine.made.exists()
    else:
        assert done.returncode == 2
        assert "apt-get install python3-venv" in done.stderr
        assert machine.apt_calls() == ""


@pytest.mark.parametrize("old", [True, False])
def test_a_chosen_python_is_never_replaced(tmp_path: Path, old: bool) -> None:
    machine = Machine(tmp_path, old=old)
    done = machine.make_venv(python="python3")
    assert done.returncode == 2
    assert ("no Python >= 3.11" if old else "its module venv is incomplete") in done.stderr
    assert machine.apt_calls() == ""
    assert not machine.made.exists()


def test_a_python_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = Machine(tmp_path).make_venv(python="/nowhere/python3")
    assert done.returncode == 2
    assert "/nowhere/python3" in done.stderr
