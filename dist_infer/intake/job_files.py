"""Input and output of a job, and the run file beside the output: opened, compared with an earlier run, begun.

Four moments, so that nothing of the user's is lost and a job that fails early leaves nothing behind. `open`: the input
is there, the output may be written, its lock is ours. `check`: the model is the earlier run's. `begin`: everything is
known; the output is made, emptied or cut, then the run file is written, and only then records. `end`: all ranks have
left together, and the run file says so.
"""

import contextlib
import os
import secrets
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dist_infer.errors import DistInferError, UsageError
from dist_infer.intake.batch_file import Answers, Lines, PromptLines, ReadableWriter, RecordStream, open_lines
from dist_infer.intake.fingerprint import digest_file, digest_texts
from dist_infer.intake.line_filter import LineFilter, Shard
from dist_infer.intake.output_lock import OutputLock
from dist_infer.intake.record_file import RecordFile
from dist_infer.intake.resume import EarlierOutput, cut_output, read_output
from dist_infer.intake.run_file import Identity, RunFile, write_run_file


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """What the user said about files. `input_path` None: `prompts` are the input; `output_path` None: print them."""

    input_path: str | None = None
    prompts: Sequence[str] = ()
    output_path: str | None = None
    overwrite: bool = False
    resume: bool = False
    shard: Shard | None = None
    seed: int | None = None
    job_id: str | None = None


class JobFiles:
    """`lines` to read, `answers` to write after `begin`, the run's `seed`, and `num_failed` answers of earlier runs."""

    def __init__(
        self,
        *,
        lines: Lines,
        answers: Answers,
        identity: Identity,
        output: "_Output | None" = None,
        earlier: EarlierOutput | None = None,
    ) -> None:
        self.lines = lines
        self.answers = answers
        self.seed = int(identity["seed"] or 0)
        self.num_failed = earlier.num_failed if earlier else 0
        self._identity = dict(identity)
        self._output = output
        self._earlier = earlier
        self._facts: Mapping[str, object] = {}

    @classmethod
    def open(cls, options: FileOptions, *, on_progress: Callable[[], None] = lambda: None) -> Self:
        """Look at everything, change nothing.

        Errors: UsageError naming the file, or the field in which an earlier run differs.
        """
        seed = secrets.randbits(63) if options.seed is None else options.seed
        lines: Lines = (
            open_lines(options.input_path) if options.input_path is not None else PromptLines(options.prompts)
        )
        path = _regular_output(options)
        if path is None:
            if options.resume:
                raise UsageError("--resume needs an output that is a file: -o FILE")
            lines = _part_of(lines, options, EarlierOutput())
            return cls(lines=lines, answers=_open_stream(options), identity={"seed": seed})
        lock = OutputLock.take(path, job_id=options.job_id)
        try:
            return cls._open_file(options, path, lock, lines, seed, on_progress)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _open_file(
        cls,
        options: FileOptions,
        path: Path,
        lock: OutputLock,
        lines: Lines,
        seed: int,
        on_progress: Callable[[], None],
    ) -> Self:
        if not (options.resume or options.overwrite) and path.exists():
            raise UsageError(
                f"output {path} exists: --resume continues it, --overwrite replaces it, or give another file"
            )
        identity = {
            "input": _digest_input(options, on_progress),
            "shard": f"{options.shard.number}/{options.shard.count}" if options.shard else None,
            "seed": seed,
        }
        output = _Output(path, RecordFile(path, lock=lock), options.overwrite)
        earlier = None
        if options.resume and (path.exists() or RunFile.path_for(path).exists()):
            output.run = _earlier_run(path)
            if output.run is not None:
                if options.seed is None:
                    identity["seed"] = output.run.identity.get("seed")
                output.run.check(identity)
            if path.exists():
                earlier = read_output(path, max_line=_max_line(options))
        lines = _part_of(lines, options, earlier or EarlierOutput())
        return cls(lines=lines, answers=output.file, identity=identity, output=output, earlier=earlier)

    @property
    def summary(self) -> str:
        """What a resumed run found, for the log; empty for any other."""
        if self._earlier is None:
            return ""
        run = self._output.run if self._output is not None else None
        vanished = run is not None and not run.has_ended
        return (
            f"resuming: {self._earlier.num_kept} records stay, "
            f"{self._earlier.num_dropped} of requests that died with a job are answered again"
            f"{'; the earlier run has no end: it was killed, or a rank of it vanished' if vanished else ''}"
        )

    @property
    def num_resumed(self) -> int:
        """Records of earlier runs that stay."""
        return self._earlier.num_kept if self._earlier is not None else 0

    @property
    def keeps_run_file(self) -> bool:
        """The output is a file, with a run file beside it."""
        return self._output is not None

    def check(self, more: Identity) -> None:
        """Add what has become known of this run, and compare it with the run that is resumed.

        Errors: UsageError naming the field.
        """
        self._identity |= more
        if self._output is not None and self._output.run is not None:
            self._output.run.check(more)

    def begin(self, facts: Mapping[str, object]) -> None:
        """Make the output ready for records, and write what the run is made of; `facts` are for people.

        Errors: DistInferError.
        """
        self._facts = facts
        if self._output is not None:
            self._output.begin(self._earlier)
            write_run_file(self._output.path, self._identity, facts)

    def end(self, ended: Mapping[str, object]) -> None:
        """Write how the run has ended, in order.

        Errors: DistInferError.
        """
        if self._output is not None:
            write_run_file(self._output.path, self._identity, {**self._facts, "ended": ended})

    def close(self) -> None:
        """Close both files and give the lock back, whatever happened. A second call does nothing."""
        with contextlib.suppress(DistInferError):  # whoever ended the job has closed them before, and was told
            self.answers.close()
        self.lines.close()


@dataclass(slots=True)
class _Output:
    """An output file and the run that wrote it so far."""

    path: Path
    file: RecordFile
    overwrite: bool
    run: RunFile | None = None

    def begin(self, earlier: EarlierOutput | None) -> None:
        if earlier is not None:
            self.file.begin(keep_bytes=cut_output(self.path, earlier), num_kept=earlier.num_kept)
            return
        if self.overwrite:  # first, so that no old record is ever found beside a new run file
            RunFile.path_for(self.path).unlink(missing_ok=True)
        self.file.begin(overwrite=self.overwrite)


def _part_of(lines: Lines, options: FileOptions, earlier: EarlierOutput) -> Lines:
    return LineFilter(lines, shard=options.shard or Shard(), answered=earlier.answered)


def _regular_output(options: FileOptions) -> Path | None:
    """The file that is or will be written; None for streams and devices, which are neither locked nor resumed.

    Errors: UsageError for one that is the input, or that can't be written.
    """
    if options.output_path in (None, "-"):
        return None
    output = Path(str(options.output_path))
    if output.is_dir():
        raise UsageError(f"output {output} is a folder; give a file")
    if not output.parent.is_dir():
        raise UsageError(f"output {output}: the folder {output.parent} does not exist")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise UsageError(f"output {output} can't be written: permission denied")
    if output.exists() and options.input_path not in (None, "-") and os.path.samefile(output, str(options.input_path)):
        raise UsageError(f"input and output are one file, {output}: give another output")
    output = output.resolve()  # two links to one file are one output
    return output if not output.exists() or output.is_file() else None


def _open_stream(options: FileOptions) -> Answers:
    if options.output_path is None:
        return ReadableWriter(options.prompts, sys.stdout)
    if options.output_path == "-":
        return RecordStream(1, name="standard output")
    try:
        fd = os.open(options.output_path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"can't write output {options.output_path}: {error.strerror}") from error
    return RecordStream(fd, name=options.output_path)


def _earlier_run(path: Path) -> RunFile | None:
    """None where nothing was answered yet and nothing is known of the run: then this is the first."""
    run = RunFile.read(path)
    if run is None and path.exists() and path.stat().st_size:
        raise UsageError(
            f"can't resume: there is no {RunFile.path_for(path).name} that says how {path} was made; "
            "--overwrite replaces it, or give another output"
        )
    return run


def _digest_input(options: FileOptions, on_progress: Callable[[], None]) -> str | None:
    """None for a stream, which can be read only once and so not resumed."""
    if options.input_path is None:
        return digest_texts(options.prompts)
    if options.input_path != "-" and stat.S_ISREG(Path(options.input_path).stat().st_mode):
        return digest_file(Path(options.input_path), on_progress=on_progress)
    if options.resume:
        raise UsageError(f"--resume needs an input that can be read again; {options.input_path} is no file")
    return None


def _max_line(options: FileOptions) -> int:
    """No input has more lines than bytes."""
    if options.input_path is None:
        return len(options.prompts)
    return Path(options.input_path).stat().st_size
