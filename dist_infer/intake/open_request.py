"""What is kept of a request until its record is written: its `n` choices, each a sequence of its own in the pool."""

from typing import Literal

from dist_infer.intake.detokenizer import Detokenizer
from dist_infer.intake.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from dist_infer.intake.protocol import ParsedRequest
from dist_infer.intake.records import Answer, Choice, Timings
from dist_infer.intake.sampling_fields import SamplingFields
from dist_infer.intake.stop_strings import StopStrings
from dist_infer.intake.text import TextCodec
from dist_infer.types import StepOutput, TokenScore


class OpenRequest:
    """A line of input and the choices that it waits for."""

    def __init__(
        self, parsed: ParsedRequest, *, prompt_len: int, created: int, text: TextCodec | None, read_s: float = 0.0
    ) -> None:
        self.parsed = parsed
        self.choices = [OpenChoice(self, text) for _ in range(parsed.sampling.n)]
        self.prompt_scores: list[TokenScore] = []
        self._prompt_len = prompt_len
        self._created = created
        self._read_s = read_s
        self._first_token_s: float | None = None
        self._text = text

    @property
    def complete(self) -> bool:
        """All choices have ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def saw_tokens(self, now_s: float) -> None:
        """Tokens have come, by the clock of `read_s`."""
        if self._first_token_s is None:
            self._first_token_s = now_s

    def answer(self, now_s: float) -> Answer:
        """Its record, once it is complete."""
        parsed, choices = self.parsed, tuple(choice.as_record() for choice in self.choices)
        has_scores = parsed.sampling.prompt_logprobs is not None
        return Answer(
            line=parsed.line,
            custom_id=parsed.custom_id,
            endpoint=parsed.endpoint,
            choices=choices,
            prompt_len=self._prompt_len,
            completion_len=sum(choice.num_tokens for choice in self.choices),
            created=self._created,
            timings=self._timings(now_s),
            prompt_logprobs=prompt_logprobs(self.prompt_scores, self._text) if has_scores else None,
        )

    def _timings(self, now_s: float) -> Timings:
        first_s = now_s if self._first_token_s is None else self._first_token_s
        return Timings(first_token_s=first_s - self._read_s, total_s=now_s - self._read_s)


class OpenChoice:
    """One choice, token by token. `finish_reason` is set when it has ended."""

    def __init__(self, request: OpenRequest, text: TextCodec | None) -> None:
        asked = request.parsed.sampling
        self.request = request
        self.finish_reason: Literal["stop", "length"] | None = None
        self._asked: SamplingFields = asked
        self._text = text
        self._detokenizer: Detokenizer | None = None
        if text is not None:
            self._detokenizer = text.open_detokenizer(skip_special=asked.skip_special_tokens)
        self._stops = StopStrings(asked.stop, include=asked.include_stop) if asked.stop else None
        self._stop_id: int | None = None
        self._token_ids: list[int] = []
        self._scores: list[TokenScore] = []
        self._pieces: list[str] = []

    @property
    def num_tokens(self) -> int:
        """Tokens so far, those without text included."""
        return len(self._token_ids)

    def take(self, output: StepOutput) -> None:
        """New tokens, or the end. The choice may end before the output does, at a stop string."""
        self.request.prompt_scores += output.prompt_scores
        ends = output.finish_reason == "stop"
        for idx, token_id in enumerate(output.token_ids):
            self._token_ids.append(token_id)
            self._scores += output.scores[idx : idx + 1]
            is_stop_token = ends and idx == len(output.token_ids) - 1
            if is_stop_token and token_id in self._asked.stop_token_ids:
                self._stop_id = token_id
            # The token that ends an answer is counted but is no part of its text, unless asked for.
            if self._detokenizer is not None and (not is_stop_token or self._asked.include_stop):
                self._show(self._detokenizer.push((token_id,)))
            if self.finish_reason is not None:
                return
        if output.finish_reason == "stop" or output.finish_reason == "length":
            if self._detokenizer is not None:
                self._show(self._detokenizer.finish())
            self.finish_reason = self.finish_reason or output.finish_reason
            if self._stops is not None:
                self._pieces.append(self._stops.finish())

    def as_record(self) -> Choice:
        """What the record tells of it, once it has ended."""
        if self.finish_reason is None:
            raise ValueError("the choice has not ended")
        parsed = self.request.parsed
        logprobs = None
        if self._asked.logprobs is not None:
            tell = chat_logprobs if parsed.endpoint == "chat" else completion_logprobs
            logprobs = tell(self._scores, self._text)
        wants_ids = parsed.return_token_ids or self._text is None
        found = None if self._stops is None else self._stops.found
        return Choice(
            text="".join(self._pieces),
            finish_reason=self.finish_reason,
            token_ids=tuple(self._token_ids) if wants_ids else None,
            stop_reason=self._stop_id if found is None else found,
            logprobs=logprobs,
        )

    def _show(self, text: str) -> None:
        if self._stops is None:
            self._pieces.append(text)
            return
        # Text of the first min_tokens tokens never ends an answer.
        self._pieces.append(self._stops.push(text, armed=len(self._token_ids) > self._asked.min_tokens))
        if self._stops.found is not None:
            self.finish_reason = "stop"
