"""`dist-infer doctor`: looks at everything that a job needs, says what is wrong and what cures it."""

import importlib.util
import os
import time
from collections.abc import Mapping

from dist_infer.cache_folder import open_private_folder
from dist_infer.cli.environment import Environment
from dist_infer.cli.findings import AFTER_START, Finding, show
from dist_infer.errors import ExitCode, UsageError
from dist_infer.launch.host_checks import HOST_CHECKS, Host
from dist_infer.launch.mpirun import find_launcher
from dist_infer.launch.preflight import CHECKS, Surroundings

_PACKAGES = {  # that some jobs need, and what for
    "mpi4py": "more than one rank: pip install 'dist-infer[mpi]'",
    "gguf": "GGUF files and the default model: pip install gguf",
    "triton": "fast kernels on GPUs: pip install 'dist-infer[gpu]'",
    "cutlass": "fast kernels on GPUs: pip install 'dist-infer[gpu]'",
}

_SPEAKING_S = 5.0  # launchers end all ranks when one fails: a silent one leaves the rank that speaks the time to


def doctor() -> int:
    """Check this host, or under mpirun or srun all hosts of a job: launcher, MPI, ranks, devices, memory.

    \b
    dist-infer doctor
    mpirun -n 2 dist-infer doctor

    Exit code: 0 all fine, 1 something is wrong; what and its fix are printed.
    """
    environment = Environment.read(os.environ)
    findings = [*find_surroundings(Surroundings(env=os.environ)), find_cache(environment), *find_packages()]
    if environment.launcher is None:
        findings += find_host(os.environ)
    if environment.speaks:
        show(findings)
    if any(finding.wrong for finding in findings):
        if not environment.speaks:
            time.sleep(_SPEAKING_S)
        return ExitCode.ERROR
    # Imported here: it brings torch and MPI, which what is wrong so far may keep from loading.
    from dist_infer.cli.examine import examine

    return examine(environment.launcher.name if environment.launcher else None)


def find_surroundings(around: Surroundings) -> list[Finding]:
    """The checks that `run` executes before it starts MPI."""
    found = [(check.name, check.find(around)) for check in CHECKS if check.name not in AFTER_START]
    return [Finding(name, wrong=str(problem) if problem else "") for name, problem in found]


def find_host(env: Mapping[str, str]) -> list[Finding]:
    """What would keep an mpirun from starting ranks here; a job of one process needs none."""
    try:
        launcher = find_launcher(env=env)
    except UsageError as error:
        return [Finding("mpirun", note=str(error))]
    host = Host(launcher=launcher, env=env)
    found = [(name, find(host)) for name, find in HOST_CHECKS]
    return [Finding("mpirun", detail=launcher.path)] + [
        Finding(name, note=str(problem) if problem else "") for name, problem in found
    ]


def find_cache(environment: Environment) -> Finding:
    """The cache folder is there, or can be made, and is the user's own."""
    try:
        return Finding("cache folder", detail=str(open_private_folder(environment.cache_dir)))
    except UsageError as error:
        return Finding("cache folder", wrong=str(error))


def find_packages() -> list[Finding]:
    """Optional packages; one that is absent is nothing wrong."""
    absent = "not installed; for "
    return [
        Finding(name, detail="installed" if importlib.util.find_spec(name) is not None else absent + purpose)
        for name, purpose in _PACKAGES.items()
    ]
