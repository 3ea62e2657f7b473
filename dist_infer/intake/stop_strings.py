"""Stop strings in a text that comes in pieces: found wherever they lie across pieces, and never shown.

The stop that is complete first counts, and of several that end at one character the longest, so the result doesn't
depend on how the text is cut into pieces. Each stop is followed by its own automaton (Knuth, Morris, Pratt), a step a
character, so neither long stops nor texts full of beginnings make it slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Automaton:
    """How much of one stop the text so far ends with."""

    stop: str
    fallback: list[int]  # of each prefix the longest shorter one that it ends with
    matched: int = 0

    def step(self, char: str) -> bool:
        """One more character; true when it completes the stop."""
        if self.matched == len(self.stop):
            self.matched = self.fallback[self.matched]
        while self.matched and self.stop[self.matched] != char:
            self.matched = self.fallback[self.matched]
        self.matched += self.stop[self.matched] == char
        return self.matched == len(self.stop)

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that a stop may begin with."""
        return self.fallback[self.matched] if self.matched == len(self.stop) else self.matched


class StopStrings:
    """Passes text on until a stop is complete; `found` is that stop then. No text may follow it."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._automata = [_Automaton(stop, _fallbacks(stop)) for stop in stops]
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that may be shown. Stops that are complete within a text that isn't `armed` don't count."""
        text_so_far = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            complete = [automaton.stop for automaton in self._automata if automaton.step(char)]
            if complete and armed:
                self.found = max(complete, key=len)
                self._held = ""
                return text_so_far[: end if self._include else end - len(self.found)]
        num_held = max((automaton.num_held for automaton in self._automata), default=0)
        num_shown = len(text_so_far) - num_held
        self._held = text_so_far[num_shown:]
        return text_so_far[:num_shown]

    def finish(self) -> str:
        """What was held back, now that the text has ended without the rest of a stop."""
        held, self._held = self._held, ""
        return held


def _fallbacks(stop: str) -> list[int]:
    fallback = [0, 0]
    matched = 0
    for char in stop[1:]:
        while matched and stop[matched] != char:
            matched = fallback[matched]
        matched += stop[matched] == char
        fallback.append(matched)
    return fallback
