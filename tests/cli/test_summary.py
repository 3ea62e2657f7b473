import json
import logging
from pathlib import Path

import pytest

from dist_infer.cli.summary import RunSummary
from dist_infer.errors import ExitCode, UsageError
from dist_infer.types import Request, StepOutput


def test_it_is_written_as_strict_json(tmp_path: Path) -> None:
    now = [0.0]
    summary = RunSummary(str(tmp_path / "s.json"), lambda: now[0])
    now[0] = 2.0
    summary.mark("load")
    summary.meter.start()
    summary.meter.admitted(Request(request_id=0, prompt_ids=(1, 2)))
    now[0] = 3.0
    summary.meter.delivered([StepOutput(request_id=0, token_ids=(7,), finish_reason="stop")])
    now[0] = 6.0
    summary.mark("serve")
    summary.facts = {"model": "m"}
    summary.reports = [{"rank": 0}]
    summary.write(ExitCode.DONE)
    fields = json.loads((tmp_path / "s.json").read_text(), parse_constant=pytest.fail)
    assert fields["schema"] == 1
    assert (fields["exit_code"], fields["outcome"], fields["error"]) == (0, "done", None)
    assert fields["seconds"] == {"load": 2.0, "serve": 4.0}
    assert fields["tokens"] == {"prompt": 2, "output": 1}
    assert fields["per_second"] == {"output_tokens": 0.25, "total_tokens": 0.75, "requests": 0.0}
    assert fields["latency_s"]["first_token_from_admission"]["p50"] == pytest.approx(1.0, rel=0.01)
    assert fields["latency_s"]["between_tokens"]["p99"] is None
    assert fields["latency_s"]["whole_request"]["mean"] == 1.0
    assert fields["latency_s"]["per_later_token"]["count"] == 0
    assert (fields["model"], fields["ranks"]) == ("m", [{"rank": 0}])


@pytest.mark.parametrize(
    ("code", "error", "outcome"),
    [(3, None, "done with failed requests"), (75, None, "drained"), (1, "rank 1 died", "failed"), (1, None, "failed")],
)
def test_how_it_ended(tmp_path: Path, code: int, error: str | None, outcome: str) -> None:
    summary = RunSummary(str(tmp_path / "s.json"))
    summary.write(code, error)
    fields = json.loads((tmp_path / "s.json").read_text())
    assert (fields["outcome"], fields["error"], fields["exit_code"]) == (outcome, error, code)
    assert fields["per_second"]["output_tokens"] is None


def test_its_place_is_checked_first(tmp_path: Path) -> None:
    RunSummary(None).check([None])
    RunSummary(str(tmp_path / "s.json")).check([None, "-", str(tmp_path / "in")])
    for path in (tmp_path, tmp_path / "no" / "s.json"):
        with pytest.raises(UsageError, match="give a file in a folder that exists"):
            RunSummary(str(path)).check([])
    with pytest.raises(UsageError, match="is the input or the output"):
        RunSummary(str(tmp_path / "out")).check([None, str(tmp_path / "." / "out")])


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunSummary(None).write(0)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_does_not_take_it_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    summary = RunSummary(str(tmp_path / "gone" / "s.json"))
    with caplog.at_level(logging.ERROR, logger="dist_infer"):
        logging.getLogger("dist_infer").propagate = True
        summary.write(0)
    assert "can't write the summary" in caplog.text


def test_it_tells_what_is_served_around(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    summary = RunSummary(str(path))
    assert summary.told(lambda: 3) == 3
    assert json.loads(path.read_text())["outcome"] == "done with failed requests"

    def fail() -> int:
        raise UsageError("no room")

    with pytest.raises(UsageError):
        summary.told(fail)
    fields = json.loads(path.read_text())
    assert (fields["outcome"], fields["error"], fields["exit_code"]) == ("failed", "UsageError: no room", 2)
    assert "until the failure" in fields["seconds"]


def test_other_ranks_write_nothing_but_know_that_it_is_wanted(tmp_path: Path) -> None:
    summary = RunSummary(str(tmp_path / "s.json"), writes=False)
    assert summary.wanted and summary.told(lambda: 0) == 0
    assert list(tmp_path.iterdir()) == []
