"""The fault table at 4 ranks under Open MPI, MPICH and srun: some cells in every run, the whole grid in the soak.

Whatever happens to a rank or to the launcher: all processes are gone in 20 s, with a code that is not 0 and a message
that names rank, host and cause. There are three exceptions. Nobody can speak for a launcher that is killed. MPICH's
mpirun gives 0 where a rank left by os._exit(0); what the job had not answered, --resume finds. And after the farewell
all work is done, so that sys.exit(0) is no fault.
"""

import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path

import pytest

from dist_infer.errors import UsageError
from dist_infer.launch import mpirun
from tests.launch.fault_cells import Cell, Launch, by_mpirun, run_cells, table
from tests.slurm_cluster import SlurmCluster, running_cluster, why_not

NUM_RANKS = 4
GONE_S = 20.0
LAUNCHERS = ("openmpi", "mpich", "srun")
PHASES = ("start-up", "load", "step", "idle", "shutdown")
DIED = r"rank 1 .*(its process ended without a word|exited on|exiting)|PID \d+ RUNNING AT \S+"  # MPICH's
TOLD = r"rank \d \(host .*got SIG(INT|TERM)"
SAYS: Mapping[str, str] = {
    "exception": r"rank 1 \(host \S+ pid \d+\) failed.*ValueError: broken on purpose",
    "exit": r"rank 1 \(host \S+ pid \d+\) failed.*left early(: its program ended| by sys.exit\(0\))",
    "hard exit": DIED,
    "kill": DIED,
    "crash": DIED,
    "stop": r"rank 1 \(host \S+ pid \d+\) failed.*(has been stopped for|no sign of life)",
    "memory": r"rank 1 \(host \S+ pid \d+\) failed.*MemoryError",
    "unpicklable": r"rank 1 \(host \S+ pid \d+\) failed.*UnpicklableError",
    "disk full": r"rank 1 \(host \S+ pid \d+\) failed.*No space left on device",
    "SIGINT": TOLD,
    "SIGTERM": TOLD,
    "SIGKILL launcher": "",
}
# srun kills at once, so it is srun that says which ranks, where and why.
SAYS_OF_SRUN = {"SIGTERM": r"(?s)srun: forcing job termination.*STEP \S+ ON \S+ CANCELLED.*tasks? [\d,-]+: Killed"}
CHOSEN = [
    ("openmpi", "stop", "start-up"),
    ("openmpi", "memory", "load"),
    ("mpich", "exception", "step"),
    ("mpich", "kill", "idle"),
    ("mpich", "SIGINT", "step"),
    ("srun", "exit", "step"),
    ("srun", "crash", "load"),
    ("srun", "SIGTERM", "idle"),
]
GRID = [(launcher, fault, phase) for launcher in LAUNCHERS for phase in PHASES for fault in SAYS]
MPICH = Path(sys.prefix) / "mpich"

CELL = ("launcher", "fault", "phase")
EVERY_FAULT = "test_every_fault_ends_the_job"

Key = tuple[str, str, str]


class Launchers:
    """How to launch a cell by each launcher; the Slurm is started at the first cell that needs it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._cluster: SlurmCluster | None = None

    def of(self, cell: Cell) -> Launch:
        if cell.launcher == "srun":
            return self._by_srun
        if cell.launcher == "openmpi":
            return by_mpirun(mpirun.find_launcher())
        return self._by_mpich

    def _by_mpich(self, num_ranks: int, argv: list[str], env: dict[str, str]) -> mpirun.Command:
        launcher = mpirun.find_launcher(str(MPICH / "bin" / "mpirun"))
        library = {"MPI4PY_LIBMPI": str(MPICH / "lib" / "libmpi.so.12")}
        return by_mpirun(launcher)(num_ranks, argv, env | library)

    def _by_srun(self, num_ranks: int, argv: list[str], env: dict[str, str]) -> mpirun.Command:
        if self._cluster is None:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dist-infer-slurm-")))
            self._cluster = self._stack.enter_context(running_cluster(folder / "c", num_nodes=1, cpus=16, gpus=0))
        flags = ["--mpi=pmix", "--kill-on-bad-exit=0", "--wait=60", f"--ntasks={num_ranks}"]
        outer = mpirun.scrub(self._cluster.env) | {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"}
        conf = {"SLURM_CONF": self._cluster.env["SLURM_CONF"]}
        return mpirun.Command(argv=("srun", *flags, *argv), env=outer | conf | env)


@cache
def missing(launcher: str) -> str | None:
    """Why there are no cells of that launcher here."""
    if launcher == "srun":
        return why_not()
    if launcher == "mpich" and not (MPICH / "bin" / "mpirun").exists():
        return "pip: no MPICH in the environment's folder mpich: make test installs it"
    try:
        family = mpirun.find_launcher().family
    except UsageError as error:
        return f"pip: {error}"
    return None if launcher == "mpich" or family == "openmpi" else "host: this environment's mpirun is not Open MPI's"


Run = Callable[[Sequence[Key]], dict[Key, Cell]]


@pytest.fixture(scope="module")
def run(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs cells, those of a launcher that is missing left out, and prints their table."""
    with ExitStack() as stack:
        launchers = Launchers(stack)

        def run_all(keys: Sequence[Key]) -> dict[Key, Cell]:
            made = {
                (launcher, fault, phase): Cell(fault, phase, NUM_RANKS, launcher)
                for launcher, fault, phase in keys
                if missing(launcher) is None
            }
            run_cells(list(made.values()), tmp_path_factory.mktemp("cells"), launchers.of)
            capture = pytestconfig.pluginmanager.get_plugin("capturemanager")
            with capture.global_and_fixture_disabled() if capture else nullcontext():
                print("\n" + table(list(made.values())))
            return made

        yield run_all


@pytest.fixture(scope="module")
def chosen(run: Run) -> dict[Key, Cell]:
    return run(CHOSEN)


@pytest.fixture(scope="module")
def grid(run: Run, request: pytest.FixtureRequest) -> dict[Key, Cell]:
    """The cells that this session asks for: with -k a part of the grid."""
    asked = [item for item in request.session.items if getattr(item, "originalname", "") == EVERY_FAULT]
    return run([tuple(item.callspec.params[name] for name in CELL) for item in asked])  # type: ignore[attr-defined]


def check(cells: Mapping[Key, Cell], key: Key) -> None:
    launcher, fault, phase = key
    reason = missing(launcher)
    if reason is not None:
        pytest.skip(reason)
    cell = cells[key]
    assert cell.met_at is not None, f"the fault was never met:\n{cell.output}"
    assert cell.gone_s is not None, f"processes were left:\n{cell.output}"
    assert cell.gone_s < GONE_S, cell.output
    if (fault, phase) == ("exit", "shutdown"):
        assert cell.returncode == 0, cell.output
        return
    assert cell.returncode != 0 or (launcher, fault) == ("mpich", "hard exit"), cell.output
    says = SAYS_OF_SRUN.get(fault, SAYS[fault]) if launcher == "srun" else SAYS[fault]
    assert re.search(says, cell.output), cell.output


@pytest.mark.parametrize(CELL, CHOSEN)
def test_fault_ends_the_job(chosen: dict[Key, Cell], launcher: str, fault: str, phase: str) -> None:
    check(chosen, (launcher, fault, phase))


@pytest.mark.soak
@pytest.mark.parametrize(CELL, GRID)
def test_every_fault_ends_the_job(grid: dict[Key, Cell], launcher: str, fault: str, phase: str) -> None:
    check(grid, (launcher, fault, phase))
