"""Serves an input of many lines, then resumes it: prints by how many bytes each made the process grow.

python -m tests.intake.long_input FOLDER NUM_LINES
"""

import re
import sys
from pathlib import Path

from dist_infer.intake.batch_job import BatchJob
from dist_infer.intake.job_files import FileOptions, JobFiles
from dist_infer.intake.validate import RequestLimits
from dist_infer.types import StepOutput


def serve(folder: Path, *, resume: bool) -> int:
    """Records written."""
    files = JobFiles.open(
        FileOptions(input_path=str(folder / "in.jsonl"), output_path=str(folder / "out.jsonl"), resume=resume, seed=1)
    )
    files.begin({})
    job = BatchJob(
        lines=files.lines,
        answers=files.answers,
        text=None,
        limits=RequestLimits(vocab_size=500, max_model_len=100, check_fits=lambda request: None),
        eos_token_ids=(),
        model_name="m",
        run_seed=files.seed,
    )
    while not job.exhausted:
        for request in job.poll(256).requests:
            job.deliver(StepOutput(request_id=request.request_id, token_ids=(7,), finish_reason="length"))
    job.close()
    files.close()
    return job.num_done


def peak_bytes() -> int:
    """Of this process so far; what getrusage says includes the process that started it."""
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(peak) * 1024


def main(folder: Path, num_lines: int) -> None:
    with (folder / "in.jsonl").open("w") as file:
        file.writelines(f'{{"prompt": [{idx % 400}]}}\n' for idx in range(num_lines))
    before = peak_bytes()
    for resume, expected in ((False, num_lines), (True, 0)):
        assert serve(folder, resume=resume) == expected
        print(peak_bytes() - before)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
