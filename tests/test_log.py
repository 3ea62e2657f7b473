import io
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from dist_infer.log import BarProgress, LineProgress, LogLevel, open_progress, setup_logging


@pytest.fixture(autouse=True)
def _restored_logger() -> Iterator[None]:
    logger = logging.getLogger("dist_infer")
    saved = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = saved


def log_of_all_levels(level: LogLevel, capsys: pytest.CaptureFixture[str]) -> list[str]:
    setup_logging(level=level, host="node%7", rank=3, size=8)
    logger = logging.getLogger("dist_infer.some.module")
    logger.debug("a %d", 1)
    logger.info("b")
    logger.warning("c")
    logger.error("d")
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_line_names_time_host_rank_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = log_of_all_levels("debug", capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d node%7 \[3/8\] DEBUG a 1", first)


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_level(level: LogLevel, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(log_of_all_levels(level, capsys)) == count


def test_set_up_again_each_line_is_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(level="info", host="before", rank=0, size=1)
    assert len(log_of_all_levels("info", capsys)) == 3


def test_the_log_follows_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    setup_logging(level="info", host="h", rank=0, size=1)
    elsewhere = io.StringIO()
    monkeypatch.setattr(sys, "stderr", elsewhere)
    logging.getLogger("dist_infer").info("hello")
    assert elsewhere.getvalue().endswith("hello\n")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_progress_without_a_terminal_is_a_line_each_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dist_infer")
    clock = Clock()
    progress = LineProgress(clock=clock)
    for second in range(25):
        clock.now = 100.0 + second
        progress.update(done=second, failed=0, known=50, all_known=second > 15, output_tokens=10 * second)
    clock.now = 125.0
    progress.update(done=50, failed=2, known=50, all_known=True, output_tokens=500)
    progress.close()
    assert caplog.messages == [
        "requests 10/50+ done, 10.0 tok/s",
        "requests 20/50 done, 10.0 tok/s",
        "requests 50/50 done, 2 failed, 20.0 tok/s overall",
    ]


def test_a_job_without_a_step_shows_no_progress(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dist_infer")
    LineProgress().close()
    assert caplog.messages == []


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("err_is_terminal", "out_is_terminal", "under_launcher", "answers_on_stdout", "bar"),
    [
        (True, True, False, False, True),
        (True, False, False, True, True),
        (True, True, False, True, False),
        (True, True, True, False, False),
        (False, True, False, False, False),
    ],
)
def test_a_bar_needs_a_terminal_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    err_is_terminal: bool,
    out_is_terminal: bool,
    under_launcher: bool,
    answers_on_stdout: bool,
    bar: bool,
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal() if err_is_terminal else io.StringIO())
    monkeypatch.setattr(sys, "stdout", Terminal() if out_is_terminal else io.StringIO())
    progress = open_progress(under_launcher=under_launcher, answers_on_stdout=answers_on_stdout)
    assert isinstance(progress, BarProgress if bar else LineProgress)
    progress.close()


def test_the_bar_shows_counts_and_rate_and_leaves_the_streams_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, out = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", out)
    clock = Clock()
    progress = BarProgress(terminal, clock=clock)
    assert terminal.getvalue() == ""
    progress.update(done=0, failed=0, known=2, all_known=False, output_tokens=0)
    setup_logging(level="info", host="h", rank=0, size=1)
    logging.getLogger("dist_infer").info("a log line")
    print("an answer")
    clock.now += 10
    progress.update(done=4, failed=1, known=7, all_known=True, output_tokens=123)
    progress.close()
    shown = terminal.getvalue()
    assert "a log line" in shown
    assert "4/7" in shown and "12.3 tok/s, 1 failed" in shown
    assert out.getvalue() == "an answer\n"
    assert sys.stderr is terminal and sys.stdout is out
