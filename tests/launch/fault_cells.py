"""Runs the cells of the fault tables as real launches, a few at a time, and looks for what they leave behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dist_infer.launch import mpirun

PROGRAM = Path(__file__).parent / "fault_program.py"
TO_LAUNCHER = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL launcher": signal.SIGKILL}

_MARK = "DIST_INFER_FAULT_CELL"
_LIMIT_S = 150.0
_AT_ONCE = 3

Launch = Callable[[int, list[str], dict[str, str]], mpirun.Command]  # ranks, program, more environment


def by_mpirun(launcher: mpirun.Launcher) -> Launch:
    """Cells on this machine."""

    def launch(num_ranks: int, argv: list[str], env: dict[str, str]) -> mpirun.Command:
        return mpirun.command(num_ranks, argv, launcher=launcher, oversubscribe=True, extra_env=env)

    return launch


@dataclass
class Cell:
    """One launch that meets one fault in one phase."""

    fault: str
    phase: str
    num_ranks: int = 2
    launcher: str = ""  # for the table
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: "subprocess.Popen[bytes] | None" = None
    output_path: str = ""
    started_at: float = 0.0
    met_at: float | None = None
    gone_s: float | None = None  # from the fault until no process is left
    returncode: int | None = None

    @property
    def output(self) -> str:
        """What the launcher and the ranks have printed so far."""
        return Path(self.output_path).read_text(errors="replace")

    def start(self, launch: Launch, folder: Path) -> None:
        """Launch it; what it prints goes into a file in `folder`."""
        env = {_MARK: self.mark, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
        argv = [sys.executable, str(PROGRAM), self.fault, self.phase]
        self.output_path = str(folder / self.mark)
        with open(self.output_path, "wb") as output:
            self.process = mpirun.start(launch(self.num_ranks, argv, env), output=output)
        self.started_at = time.monotonic()

    def is_over(self) -> bool:
        """Look after it; true when all its processes are gone or the patience is."""
        assert self.process is not None
        now = time.monotonic()
        if self.met_at is None and f"READY {self.phase}" in self.output:
            self.met_at = now
            if self.fault in TO_LAUNCHER:
                self.process.send_signal(TO_LAUNCHER[self.fault])
                if self.launcher == "srun" and self.fault == "SIGINT":  # srun wants it twice within a second
                    time.sleep(0.2)
                    self.process.send_signal(signal.SIGINT)
        if self.process.poll() is not None and not self.left_over():
            self.returncode = self.process.returncode
            self.gone_s = now - (self.met_at or self.started_at)
            return True
        return now - self.started_at > _LIMIT_S

    def left_over(self) -> list[int]:
        """Processes of this cell that are alive, the launcher's own included."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_mine(pid)]

    def _is_mine(self, pid: int) -> bool:
        try:
            return f"{_MARK}={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    def clean_up(self) -> None:
        """End what is left of it."""
        if self.process is not None and self.process.poll() is None:
            mpirun.stop(self.process)
        for pid in self.left_over():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run_cells(cells: Sequence[Cell], folder: Path, launches: Callable[[Cell], Launch]) -> None:
    """Run all cells to their end; what they print stays in `folder`."""
    waiting, running = list(cells), list[Cell]()
    try:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                running.append(waiting.pop(0))
                running[-1].start(launches(running[-1]), folder)
            for cell in [cell for cell in running if cell.is_over()]:
                running.remove(cell)
                cell.clean_up()
            time.sleep(0.05)
    finally:
        for cell in running:
            cell.clean_up()


def table(cells: Sequence[Cell]) -> str:
    """One line a cell."""
    lines = [f"{'launcher':9} {'fault':17} {'phase':11} {'gone after s':>12} {'exit code':>9}  message"]
    for cell in cells:
        said = [line for line in cell.output.splitlines() if line.startswith("dist-infer: ") or "process rank" in line]
        said.sort(key=lambda line: "rank 1 " not in line)  # the culprit's own first
        gone = "never" if cell.gone_s is None else f"{cell.gone_s:.1f}"
        text = said[0][:90] if said else ""
        lines.append(
            f"{cell.launcher:9} {cell.fault:17} {cell.phase:11} {gone:>12} {cell.returncode!s:>9}  {text}".rstrip()
        )
    return "\n".join(lines)
