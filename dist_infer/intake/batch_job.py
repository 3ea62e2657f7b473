"""The frontend of a batch: lines -> requests, outputs -> records. It lives on rank 0 and never waits.

A line is read when there is room for its request, so memory doesn't grow with the input. A bad line is answered
at once and costs nothing else. Prompts and answers are never logged.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dist_infer.dispatcher import Incoming
from dist_infer.errors import ExitCode, RequestError
from dist_infer.intake.batch_file import Answers, Line, Lines
from dist_infer.intake.detokenizer import Detokenizer
from dist_infer.intake.protocol import BadLine, ParsedRequest, line_id, parse_line
from dist_infer.intake.records import Answer, Failure, Outcome, Refusal
from dist_infer.intake.text import TextCodec
from dist_infer.intake.validate import RequestLimits, build_request
from dist_infer.log import ProgressView
from dist_infer.types import FinishReason, Request, StepOutput


@dataclass(slots=True, kw_only=True)
class _Open:
    """What is kept of a request until its record is written."""

    parsed: ParsedRequest
    prompt_len: int
    created: int
    detokenizer: Detokenizer | None
    token_ids: list[int]
    text: list[str]


class BatchJob:
    """Serves one batch; the Frontend of the dispatcher.

    `text` is None for a model without tokenizer: it serves prompts of token ids, and its answers hold ids and no text.
    """

    def __init__(
        self,
        *,
        lines: Lines,
        answers: Answers,
        text: TextCodec | None,
        limits: RequestLimits,
        eos_token_ids: Sequence[int],
        model_name: str,
        run_seed: int,
        num_failed_before: int = 0,
        progress: ProgressView | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._lines = lines
        self._answers = answers
        self._text = text
        self._limits = limits
        self._eos_token_ids = tuple(eos_token_ids)
        self._model_name = model_name
        self._run_seed = run_seed
        self._progress = progress
        self._now = now
        self._open: dict[int, _Open] = {}
        self._digests: dict[int, str] = {}  # by line, of those that have no record yet
        self._num_failed_before = num_failed_before  # by the run that this one resumes
        self._next_request_id = 0
        self._told_end = False
        self.num_lines = 0  # read so far; all of them once `input_ended`
        self.num_done = 0  # answered, well or badly
        self.num_failed = 0  # answered with an error
        self.num_output_tokens = 0

    @property
    def exit_code(self) -> ExitCode:
        """FAILED_REQUESTS once any line was answered with an error, in a run that is resumed too."""
        return ExitCode.FAILED_REQUESTS if self.num_failed + self._num_failed_before else ExitCode.DONE

    @property
    def input_ended(self) -> bool:
        """All lines were read."""
        return self._lines.ended()

    @property
    def exhausted(self) -> bool:
        """All lines were read and all requests answered."""
        return not self._open and self._lines.ended()

    def poll(self, room: int) -> Incoming:
        """Read at most `room` lines and hand over the good ones."""
        requests = []
        for _ in range(room):
            line = self._lines.take()
            if line is None:
                break
            self.num_lines += 1
            self._digests[line.number] = line.digest
            request = self._accept(line)
            if request is not None:
                requests.append(request)
        self._told_end = self._lines.ended()
        self._show_progress()
        return Incoming(requests=requests, end_of_input=self._told_end)

    def ready(self) -> bool:
        """There is a line to read, or the end to tell."""
        return not self._told_end and self._lines.ready()

    def deliver(self, output: StepOutput) -> None:
        """Take tokens of a request; at its end, write its record. Requests that are not open are ignored."""
        entry = self._open.get(output.request_id)
        if entry is None:
            return
        self.num_output_tokens += len(output.token_ids)
        entry.token_ids.extend(output.token_ids)
        if entry.detokenizer is not None:
            # The token that ends an answer is counted but is no part of its text.
            shown = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
            entry.text.append(entry.detokenizer.push(shown))
        if output.finish_reason is not None:
            self._finish(output.request_id, output.finish_reason)

    def fail_open(self, message: str) -> None:
        """Answer every open request with an error record (rule 19)."""
        for request_id in list(self._open):
            parsed = self._open.pop(request_id).parsed
            self._answer(Failure(line=parsed.line, custom_id=parsed.custom_id, message=message))

    def close(self) -> None:
        """Bring the output to the disk. Requests that are still open were given back: they get no record."""
        self._show_progress()
        self._lines.close()
        self._answers.close()

    def _show_progress(self) -> None:
        if self._progress is not None:
            self._progress.update(
                done=self.num_done,
                failed=self.num_failed,
                known=self.num_lines,
                all_known=self.input_ended,
                output_tokens=self.num_output_tokens,
            )

    def _accept(self, line: Line) -> Request | None:
        if line.error is not None:
            self._answer(Refusal(line=line.number, custom_id=line_id(line.number), error=line.error))
            return None
        parsed = parse_line(line.number, line.text)
        if isinstance(parsed, BadLine):
            self._answer(Refusal(line=parsed.line, custom_id=parsed.custom_id, error=parsed.error))
            return None
        try:
            request = build_request(
                parsed,
                self._encode(parsed),
                request_id=self._next_request_id,
                limits=self._limits,
                eos_token_ids=self._eos_token_ids,
                run_seed=self._run_seed,
            )
        except RequestError as error:
            self._answer(Refusal(line=parsed.line, custom_id=parsed.custom_id, error=error))
            return None
        self._next_request_id += 1
        self._remember(request, parsed)
        return request

    def _encode(self, parsed: ParsedRequest) -> tuple[int, ...]:
        if isinstance(parsed.prompt, tuple) and parsed.endpoint == "completion":
            return parsed.prompt
        if self._text is None:
            param = "messages" if parsed.endpoint == "chat" else "prompt"
            raise RequestError(
                f"{param} is text, but the model has no tokenizer.json: give a prompt of token ids",
                param=param,
                code="no_tokenizer",
            )
        if parsed.endpoint == "chat":
            return self._text.encode_chat(parsed.messages)
        return self._text.encode_completion(str(parsed.prompt))

    def _remember(self, request: Request, parsed: ParsedRequest) -> None:
        self._open[request.request_id] = _Open(
            parsed=parsed,
            prompt_len=len(request.prompt_ids),
            created=int(self._now()),
            detokenizer=self._text.open_detokenizer() if self._text is not None else None,
            token_ids=[],
            text=[],
        )

    def _finish(self, request_id: int, reason: FinishReason) -> None:
        entry = self._open.pop(request_id)
        if reason == "abort":
            return  # given back: no record, so a later run takes it up
        if entry.detokenizer is not None:
            entry.text.append(entry.detokenizer.finish())
        wants_ids = entry.parsed.return_token_ids or entry.detokenizer is None
        self._answer(
            Answer(
                line=entry.parsed.line,
                custom_id=entry.parsed.custom_id,
                endpoint=entry.parsed.endpoint,
                text="".join(entry.text),
                finish_reason=reason,
                prompt_len=entry.prompt_len,
                completion_len=len(entry.token_ids),
                created=entry.created,
                token_ids=tuple(entry.token_ids) if wants_ids else None,
            )
        )

    def _answer(self, outcome: Outcome) -> None:
        outcome = replace(outcome, digest=self._digests.pop(outcome.line, ""))
        self._answers.write(outcome, model=self._model_name)
        self.num_done += 1
        self.num_failed += not isinstance(outcome, Answer)
