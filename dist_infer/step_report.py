"""What the steps of a rank cost, for people: device busy, gaps, share of the memory floor, libraries."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from dist_infer.comm.agreement import EAGER
from dist_infer.metrics import Histogram
from dist_infer.step_floor import StepFloor
from dist_infer.step_meter import StepTimes
from dist_infer.step_profile import StepProfile
from dist_infer.types import BatchKind

_CHOICE = re.compile(r"([\w.]+): (\w+)(?:;|$)")  # see kernels/dispatch, Selection.explain
_NUM_KERNELS_NAMED = 20


@dataclass(slots=True)
class _Steps:
    """Of steps of one kind."""

    count: int = 0
    sequences: int = 0
    tokens: int = 0
    kv_tokens: int = 0
    as_graphs: int = 0
    floor_us: float = 0.0


class StepReport:
    """Collects the steps of a rank. Decode steps give the figures by step, all others are only counted and timed.

    A decode step goes on with sequences that ran before, so its gap is the host's, not a wait for requests.
    `tb_per_s` is the speed of the device's memory, None: unknown. `tp` ranks hold the same tokens.
    """

    def __init__(self, floor: StepFloor, *, tp: int, tb_per_s: float | None) -> None:
        self._floor = floor
        self._tp = tp
        self._tb_per_s = tb_per_s
        self.start()

    def start(self) -> None:
        """What came before doesn't count."""
        self._decodes, self._others = _Steps(), _Steps()
        self._busy, self._gap, self._busy_of_others = Histogram(), Histogram(), Histogram()

    def add(self, step: StepTimes) -> None:
        """A step of this rank; one of a group without tokens is nobody's."""
        if step.batch.kind is BatchKind.NONE:
            return
        is_decode = step.decision.kind is BatchKind.DECODE
        steps = self._decodes if is_decode else self._others
        steps.count += 1
        steps.sequences += step.batch.num_seqs
        steps.tokens += step.batch.num_tokens
        steps.as_graphs += step.decision.graph_bucket != EAGER
        if not is_decode:
            self._busy_of_others.add(step.busy_us / 1e6)
            return
        kv_tokens = int(step.batch.kv_lens.sum())
        steps.kv_tokens += kv_tokens
        self._busy.add(step.busy_us / 1e6)
        if step.gap_us is not None:
            self._gap.add(step.gap_us / 1e6)
        if self._tb_per_s is not None:
            num_tokens = sum(step.decision.rank_tokens) // self._tp
            steps.floor_us += self._floor.read_bytes(num_tokens=num_tokens, kv_tokens=kv_tokens) / self._tb_per_s / 1e6

    @property
    def usual_decode(self) -> tuple[int, int]:
        """Sequences, and tokens of each, of the mean decode step; zeros where there was none."""
        steps = self._decodes
        if not steps.count:
            return 0, 0
        return round(steps.sequences / steps.count), round(steps.kv_tokens / steps.sequences)

    def fields(self, profile: StepProfile | None) -> dict[str, object]:
        """All figures; None where there is nothing to tell. Units: microseconds, shares of 1.

        The device is busy with a step but for the gap before it and, as profiled, the holes between its kernels.
        """
        steps, busy_s, gap_s = self._decodes, self._busy.total_s, self._gap.total_s
        whole_s = busy_s + gap_s
        share = busy_s / whole_s if whole_s else None
        if share is not None and profile is not None:
            share *= profile.busy_us / profile.span_us
        others = self._others
        return {
            "decode": {
                "steps": steps.count,
                "as_graphs": steps.as_graphs,
                "sequences_mean": steps.sequences / steps.count if steps.count else None,
                "kv_tokens_mean": steps.kv_tokens / steps.count if steps.count else None,
                "busy_us": _in_us(self._busy),
                "gap_us": _in_us(self._gap),
                "busy_share": share,
                "floor_share": steps.floor_us / 1e6 / whole_s if steps.floor_us else None,
            },
            "others": {
                "steps": others.count,
                "tokens_mean": others.tokens / others.count if others.count else None,
                "busy_us": _in_us(self._busy_of_others),
            },
            "profile": None if profile is None else _describe(profile),
        }


def _in_us(histogram: Histogram) -> dict[str, float | int | None]:
    found = histogram.summary()
    return {name: value if name == "count" or value is None else value * 1e6 for name, value in found.items()}


def _describe(profile: StepProfile) -> dict[str, object]:
    named = [{"name": name, "launches": count, "us": us} for name, count, us in profile.kernels[:_NUM_KERNELS_NAMED]]
    return {**asdict(profile), "kernels": named}


def libraries_by_op(choices: Iterable[str]) -> dict[str, list[str]]:
    """The libraries that layers have chosen for each op, of the lines that they give (`LayerSetup.on_choice`)."""
    found: dict[str, list[str]] = {}
    for line in choices:
        if match := _CHOICE.match(line):
            own = found.setdefault(match[1], [])
            if match[2] not in own:
                own.append(match[2])
    return found
