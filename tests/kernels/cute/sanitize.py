"""The kernels in CuTe DSL under compute-sanitizer, which comes with the CUDA toolkit. Needs an H100 or H200.

    python -m tests.kernels.cute.sanitize [NAME ...]

memcheck looks for accesses outside of memory, racecheck for accesses of shared memory that nothing orders. The launches
are those of sanitized_launches.

racecheck does not follow every order: not where one lane arrives at an mbarrier for its whole warp, nor where two
warpgroups wait for each other at a named barrier after one of them has waited for its own warps at another. The minimal
kernels of race_patterns show both, with and without --racecheck-indirect-barrier-dependency. So reports count where
they name an access to anything but `HANDED_OVER`: what warpgroups hand to each other in these ways. An access may have
the line where shared memory is allocated; then the one that it races with tells what it is of. In FP8 products lanes
read scales, and one of them arrives for its warp before they are overwritten: `SCALES`.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "kernels" / "cute"
TOOL = "compute-sanitizer"
CHECKS = ("memcheck", "racecheck")
LAUNCHES = (
    "decodes",
    "narrow_decodes",
    "grouped_products",
    "fp8_products",
    "mxfp8_products",
    "nvfp4_products",
    "staged_mxfp8",
    "staged_steep",
    "staged_nvfp4",
)
HANDED_OVER = ("stats[", "exchange[", "totals[", "shared[", "raised[")
SCALES = ("inline_ptx(copy, read_only", "inline_ptx(load, write_only", "wait_group(min(ahead")  # written and read there
_ALLOCATION = "SmemAllocator().allocate("
_TIMEOUT_S = 600
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_ACCESS = re.compile(r"(?:Read|Write) access at \S+(?: in (\w+\.py):(\d+))?")


class Report(NamedTuple):
    """What a check has found in launches: all, and what of it counts."""

    text: str
    found: Sequence[str]


def sanitize(check: str, launches: str, folder: Path) -> Report:
    """Runs launches under a check, all in processes of their own. Kernels are compiled once for all calls of a folder.

    Errors: RuntimeError with the output where the launches failed or the tool gave no summary.
    """
    # the driver's bindings ask for functions that a driver may not have: no error of a kernel
    command = [TOOL, "--tool", check, "--print-limit", "10000", "--report-api-errors", "no"]
    program = [sys.executable, "-m", "tests.kernels.cute.sanitized_launches", launches]
    environment = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # else accesses beyond the end of a tensor meet memory that torch keeps
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_CACHE_DIR": str(folder),  # not the one whose kernels don't know their lines
    }
    done = subprocess.run(
        [*command, *program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    text = done.stdout + done.stderr
    summary = _SUMMARY.findall(text)
    if f"{launches}: all launched" not in text or not summary:
        raise RuntimeError(f"{check} of {launches} gave no summary: {text[-3000:]}")
    num_found = int("".join(summary[-1]))
    if check == "memcheck":
        return Report(text, [f"{num_found} errors"] if num_found else [])
    known = (*HANDED_OVER, *SCALES) if launches == "fp8_products" else HANDED_OVER
    return Report(text, unexplained(text, {path.name: path.read_text() for path in SOURCES.glob("*.py")}, known))


def unexplained(text: str, sources: Mapping[str, str], known: Sequence[str] = HANDED_OVER) -> list[str]:
    """The accesses of racecheck's reports whose lines are of nothing that is known; one of an unknown line is such."""
    found = set()
    for report in text.split("Race reported"):
        lines = set()
        for name, line in _ACCESS.findall(report):
            source = sources[name].splitlines()[int(line) - 1].strip() if name in sources else "somewhere"
            lines.add(f"{name}:{line}: {source}")
        told = {line for line in lines if _ALLOCATION not in line}
        found |= {line for line in told or lines if not any(memory in line for memory in known)}
    return sorted(found)


def main() -> int:
    """The exit code: 1 where something was found that counts."""
    if shutil.which(TOOL) is None:
        sys.stderr.write(f"{TOOL} is not there: it comes with the CUDA toolkit\n")
        return 2
    num_found = 0
    with tempfile.TemporaryDirectory() as folder:
        for launches in sys.argv[1:] or LAUNCHES:
            for check in CHECKS:
                report = sanitize(check, launches, Path(folder))
                num_reports = report.text.count("Race reported")
                sys.stdout.write(f"{check} of {launches}: {report.found or 'nothing'}, {num_reports} reports\n")
                sys.stdout.flush()
                num_found += len(report.found)
    return int(num_found > 0)


if __name__ == "__main__":
    sys.exit(main())
