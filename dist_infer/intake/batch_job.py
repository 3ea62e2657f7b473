"""The frontend of a batch: lines -> requests, outputs -> records. It lives on rank 0 and never waits.

A line is read when there is room for its request, so memory doesn't grow with the input. A bad line is answered
at once and costs nothing else. Prompts and answers are never logged.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dist_infer.dispatcher import Incoming
from dist_infer.errors import ExitCode, RequestError
from dist_infer.intake.batch_file import Answers, Line, Lines
from dist_infer.intake.open_request import OpenChoice, OpenRequest
from dist_infer.intake.protocol import BadLine, ParsedRequest, line_id, parse_line
from dist_infer.intake.records import Answer, Failure, Outcome, Refusal
from dist_infer.intake.text import TextCodec
from dist_infer.intake.validate import RequestLimits, build_requests
from dist_infer.log import ProgressView
from dist_infer.types import Request, StepOutput


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
        clock: Callable[[], float] = time.perf_counter,
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
        self._clock = clock
        self._open: dict[int, OpenChoice] = {}
        self._aborts: list[int] = []  # ended here by a stop string; the pool does not know yet
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
        """Read lines while there is room for their requests, and hand over the good ones; the last may need more room.

        Requests that a stop string has ended are aborted here, so that the pool gives their blocks back.
        """
        requests: list[Request] = []
        for _ in range(room):
            if len(requests) >= room or (line := self._lines.take()) is None:
                break
            self.num_lines += 1
            self._digests[line.number] = line.digest
            requests += self._accept(line)
        self._told_end = self._lines.ended()
        self._show_progress()
        aborts, self._aborts = self._aborts, []
        return Incoming(requests=requests, aborts=aborts, end_of_input=self._told_end)

    def ready(self) -> bool:
        """There is a line to read, or the end to tell."""
        return not self._told_end and self._lines.ready()

    def deliver(self, output: StepOutput) -> None:
        """Take tokens of a request; at its end, write its record. Requests that are not open are ignored."""
        choice = self._open.get(output.request_id)
        if choice is None:
            return
        num_before = choice.num_tokens
        choice.take(output)
        self.num_output_tokens += choice.num_tokens - num_before
        if not num_before and choice.num_tokens:
            choice.request.saw_tokens(self._clock())
        if choice.finish_reason is None and output.finish_reason is None:
            return
        del self._open[output.request_id]
        if output.finish_reason is None:
            self._aborts.append(output.request_id)
        if choice.request.complete:  # never with a choice that was given back: a later run takes the line up
            self._answer(choice.request.answer(self._clock()))

    def fail_open(self, message: str) -> None:
        """Answer every open request with an error record (rule 19)."""
        lines = {choice.request.parsed.line: choice.request.parsed for choice in self._open.values()}
        self._open.clear()
        for parsed in lines.values():
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

    def _accept(self, line: Line) -> list[Request]:
        if line.error is not None:
            self._answer(Refusal(line=line.number, custom_id=line_id(line.number), error=line.error))
            return []
        parsed = parse_line(line.number, line.text)
        if isinstance(parsed, BadLine):
            self._answer(Refusal(line=parsed.line, custom_id=parsed.custom_id, error=parsed.error))
            return []
        try:
            requests = build_requests(
                parsed,
                self._encode(parsed),
                first_id=self._next_request_id,
                limits=self._limits,
                eos_token_ids=self._eos_token_ids,
                run_seed=self._run_seed,
            )
        except RequestError as error:
            self._answer(Refusal(line=parsed.line, custom_id=parsed.custom_id, error=error))
            return []
        self._next_request_id += len(requests)
        self._remember(requests, parsed)
        return requests

    def _encode(self, parsed: ParsedRequest) -> tuple[int, ...]:
        if self._text is None and parsed.sampling.stop:
            raise RequestError(
                "stop holds text, but the model has no tokenizer.json: give stop_token_ids",
                param="stop",
                code="no_tokenizer",
            )
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

    def _remember(self, requests: Sequence[Request], parsed: ParsedRequest) -> None:
        entry = OpenRequest(
            parsed,
            prompt_len=len(requests[0].prompt_ids),
            created=int(self._now()),
            text=self._text,
            read_s=self._clock(),
        )
        self._open |= {request.request_id: choice for request, choice in zip(requests, entry.choices, strict=True)}

    def _answer(self, outcome: Outcome) -> None:
        outcome = replace(outcome, digest=self._digests.pop(outcome.line, ""))
        self._answers.write(outcome, model=self._model_name)
        self.num_done += 1
        self.num_failed += not isinstance(outcome, Answer)
