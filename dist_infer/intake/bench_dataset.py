"""The requests of a benchmark: random ids, ShareGPT conversations, or lines as `run` reads them.

Random and ShareGPT requests ask for a number of tokens, not for an answer: greedy, and past the end of the sequence.
Lines keep their own options.

Source: the random and ShareGPT datasets of vLLM's benchmarks, their length rules included.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dist_infer.errors import RequestError, UsageError
from dist_infer.intake.protocol import BadLine, ParsedRequest, parse_line
from dist_infer.intake.text import TextCodec
from dist_infer.intake.validate import RequestLimits, build_requests
from dist_infer.types import Request, SamplingParams

_LEAST_TOKENS = 4  # of a ShareGPT prompt, and of its answer
_MAX_PROMPT_TOKENS = 1024
_MAX_TOKENS = 2048  # prompt and answer


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Lengths of random requests, each drawn evenly from (1 - spread) to (1 + spread) times its mean."""

    input_len: int
    output_len: int
    spread: float = 0.0
    shared_prefix_len: int = 0  # ids that all prompts begin with, beside input_len

    def draw(self, mean: int, count: int, random: np.random.Generator) -> list[int]:
        """`count` lengths of at least 1."""
        low, high = max(1, int(mean * (1 - self.spread))), max(1, int(np.ceil(mean * (1 + self.spread))))
        return [int(drawn) for drawn in random.integers(low, high + 1, count)]


def random_requests(
    lengths: RandomLengths, *, first_id: int, count: int, vocab_size: int, random: np.random.Generator
) -> list[Request]:
    """Prompts of evenly drawn ids."""
    shared = random.integers(0, vocab_size, lengths.shared_prefix_len).tolist()
    input_lens = lengths.draw(lengths.input_len, count, random)
    output_lens = lengths.draw(lengths.output_len, count, random)
    return [
        _request(first_id + idx, shared + random.integers(0, vocab_size, input_len).tolist(), output_len)
        for idx, (input_len, output_len) in enumerate(zip(input_lens, output_lens, strict=True))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReader:
    """Requests of a dataset file. `output_len` replaces the lengths of ShareGPT answers.

    Errors: UsageError naming the file, and the line where there is one.
    """

    text: TextCodec | None
    limits: RequestLimits
    eos_token_ids: Sequence[int]
    seed: int
    output_len: int | None = None

    def read(self, path: Path, *, first_id: int, count: int | None) -> list[Request]:
        """`count` requests of a ShareGPT file in random order, or the first ones of a file of lines; None: all."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--dataset {path} can't be read: {error}") from error
        # A JSON array is ShareGPT; of the forms with a line a request, none begins so.
        is_sharegpt = text.lstrip()[:1] == "["
        found = self._conversations(path, text, first_id, count) if is_sharegpt else self._lines(path, text, first_id)
        if not found or (count is not None and len(found) < count):
            raise UsageError(
                f"--dataset {path} has {len(found)} usable requests, --num-prompts asks for {count or 'all of them'}"
            )
        return found[:count]

    def _lines(self, path: Path, text: str, first_id: int) -> list[Request]:
        if self.output_len is not None:
            raise UsageError(f"--output-len: --dataset {path} says itself how long its answers are; leave it out")
        requests: list[Request] = []
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            parsed = parse_line(number, line)
            try:
                if isinstance(parsed, BadLine):
                    raise parsed.error
                requests += build_requests(
                    parsed,
                    self._encode(parsed),
                    first_id=first_id + len(requests),
                    limits=self.limits,
                    eos_token_ids=self.eos_token_ids,
                    run_seed=self.seed,
                )
            except RequestError as error:
                raise UsageError(f"--dataset {path}, line {number}: {error}") from error
        return requests

    def _encode(self, parsed: ParsedRequest) -> tuple[int, ...]:
        if isinstance(parsed.prompt, tuple) and parsed.endpoint == "completion":
            return parsed.prompt
        text = self._need_text()
        if parsed.endpoint == "chat":
            return text.encode_chat(parsed.messages)
        return text.encode_completion(str(parsed.prompt))

    def _conversations(self, path: Path, text: str, first_id: int, count: int | None) -> list[Request]:
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--dataset {path} is no JSON array of conversations: {error}") from error
        requests: list[Request] = []
        for idx in np.random.default_rng(self.seed % 2**64).permutation(len(entries)).tolist():
            if len(requests) == count:
                break
            request = self._conversation(entries[idx], first_id + len(requests))
            if request is not None:
                requests.append(request)
        return requests

    def _conversation(self, entry: Any, request_id: int) -> Request | None:
        """The first turn is the prompt, the second says how long the answer is; None where they aren't usable."""
        prompt, answer = _first_turns(entry)
        if prompt is None or answer is None:
            return None
        codec = self._need_text()
        prompt_ids = codec.encode_completion(prompt)
        output_len = self.output_len or len(codec.encode_completion(answer))
        too_short = len(prompt_ids) < _LEAST_TOKENS or (self.output_len is None and output_len < _LEAST_TOKENS)
        if too_short or len(prompt_ids) > _MAX_PROMPT_TOKENS or len(prompt_ids) + output_len > _MAX_TOKENS:
            return None
        request = _request(request_id, prompt_ids, output_len)
        try:
            self.limits.check_fits(request)
        except RequestError:
            return None
        return request

    def _need_text(self) -> TextCodec:
        if self.text is None:
            raise UsageError("--dataset holds text, but the model has no tokenizer.json: use lines with input_ids")
        return self.text


def warmup_requests(measured: Sequence[Request], *, count: int, vocab_size: int, seed: int) -> list[Request]:
    """Requests as long as the first measured ones, of other ids, so that they leave nothing in the prefix cache.

    Their ids are `count` numbers below that of the first measured request.
    """
    random = np.random.default_rng([seed % 2**64, 1])
    chosen = [measured[idx % len(measured)] for idx in range(count)]
    return [
        replace(
            request,
            request_id=measured[0].request_id - count + idx,
            prompt_ids=tuple(random.integers(0, vocab_size, len(request.prompt_ids)).tolist()),
        )
        for idx, request in enumerate(chosen)
    ]


def _request(request_id: int, prompt_ids: Sequence[int], output_len: int) -> Request:
    sampling = SamplingParams(max_tokens=output_len, temperature=0.0)
    return Request(request_id=request_id, prompt_ids=tuple(prompt_ids), sampling=sampling)


def _first_turns(entry: Any) -> tuple[str | None, str | None]:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None, None
    prompt, answer = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
    return (prompt if isinstance(prompt, str) else None), (answer if isinstance(answer, str) else None)
