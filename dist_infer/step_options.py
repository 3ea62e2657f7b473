"""What the requests of a step ask for beyond a plain choice of tokens, as arrays of its batch; scores read back.

Only batches with such a request come here. Host data only: no torch.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from dist_infer.sequences import Plan, Sequence, State
from dist_infer.types import Batch, Float64Array, Int64Array, LogitEdits, ScoreRows, StepOutput, TokenScore

_UNKNOWN_TOKEN = -1


def add_options(batch: Batch, plan: Plan) -> None:
    """Fill in the batch's min_p, edits and scores, before the sequences of the plan are advanced."""
    rows = [(row, plan.seqs[idx]) for row, idx in enumerate(batch.logit_seqs.tolist()) if plan.seqs[idx].has_options]
    if any(seq.request.sampling.min_p for _, seq in rows):
        batch.min_p = np.zeros(len(batch.logit_rows))
        for row, seq in rows:
            batch.min_p[row] = seq.request.sampling.min_p
    batch.edits = _edits(rows)
    batch.scores = _score_rows(batch, plan, rows)


def option_arrays(batch: Batch) -> Iterator[npt.NDArray[np.int64] | Float64Array]:
    """All arrays that `add_options` makes, for a digest of the schedule."""
    if batch.min_p is not None:
        yield batch.min_p
    for part in (batch.edits, batch.scores):
        if part is not None:
            values = (getattr(part, own.name) for own in fields(part))
            yield from (value for value in values if isinstance(value, np.ndarray))


def _edits(rows: Seq[tuple[int, Sequence]]) -> LogitEdits | None:
    biases = [(row, token_id, bias) for row, seq in rows for token_id, bias in _biases(seq)]
    penalised = [(row, seq) for row, seq in rows if seq.request.sampling.has_penalties]
    if not biases and not penalised:
        return None
    bias_rows, bias_ids, bias_values = zip(*biases, strict=True) if biases else ((), (), ())
    options = [seq.request.sampling for _, seq in penalised]
    histories = [_history(seq) for _, seq in penalised]
    return LogitEdits(
        bias_rows=np.array(bias_rows, np.int64),
        bias_ids=np.array(bias_ids, np.int64),
        biases=np.array(bias_values, np.float64),
        penalty_rows=np.array([row for row, _ in penalised], np.int64),
        repetition=np.array([sampling.repetition_penalty for sampling in options], np.float64),
        frequency=np.array([sampling.frequency_penalty for sampling in options], np.float64),
        presence=np.array([sampling.presence_penalty for sampling in options], np.float64),
        token_owners=np.repeat(np.arange(len(histories)), [len(ids) for ids, _ in histories]),
        token_ids=_joined([ids for ids, _ in histories]),
        token_counts=_joined([counts for _, counts in histories]),
    )


def _biases(seq: Sequence) -> Iterator[tuple[int, float]]:
    sampling = seq.request.sampling
    yield from sampling.logit_bias
    if seq.target - seq.prompt_len < sampling.min_tokens:
        yield from ((token_id, -np.inf) for token_id in sampling.stop_token_ids)


def _history(seq: Sequence) -> tuple[Int64Array, Int64Array]:
    """The ids that penalties look at, and how often each stands for a generated one."""
    answer = seq.tokens[seq.prompt_len : seq.num_known]
    parts = [answer, np.full(seq.num_unknown, _UNKNOWN_TOKEN, np.int64)]
    if seq.request.sampling.repetition_penalty != 1:
        if seq.prompt_ids_once is None:
            seq.prompt_ids_once = np.unique(seq.tokens[: seq.prompt_len])
        parts.append(seq.prompt_ids_once)
    ids = np.concatenate(parts)
    counts = np.zeros(len(ids), np.int64)
    counts[: len(answer) + seq.num_unknown] = 1
    return ids, counts


def _score_rows(batch: Batch, plan: Plan, rows: Seq[tuple[int, Sequence]]) -> ScoreRows | None:
    sampled = [(row, num) for row, seq in rows if (num := seq.request.sampling.logprobs) is not None]
    token_rows, next_ids, widths = [], [], [num for _, num in sampled]
    for idx, (seq, start, end) in enumerate(zip(plan.seqs, plan.starts, plan.ends, strict=True)):
        first, last = max(start, seq.num_scored), min(end, seq.num_to_score)
        if first < last:
            token_rows.append(np.arange(first, last) + (int(batch.query_start[idx]) - start))
            next_ids.append(seq.tokens[first + 1 : last + 1])
            widths.append(seq.request.sampling.prompt_logprobs or 0)
    if not widths:
        return None
    return ScoreRows(
        logit_rows=np.array([row for row, _ in sampled], np.int64),
        token_rows=_joined(token_rows),
        next_ids=_joined(next_ids),
        num_top=max(widths),
    )


def _joined(arrays: Seq[Int64Array]) -> Int64Array:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepScores:
    """Scores of a step by the index of the sequence in its batch."""

    of_token: Mapping[int, tuple[TokenScore, ...]]
    of_prompt: Mapping[int, tuple[TokenScore, ...]]

    def added_to(self, outputs: Mapping[int, StepOutput], seqs: Seq[Sequence]) -> dict[int, StepOutput]:
        """The outputs of a batch by sequence, with their scores, and one without tokens for a mere part of a prompt."""
        told = {}
        for idx, seq in enumerate(seqs):
            prompt_scores = self.of_prompt.get(idx, ())
            seq.num_scored += len(prompt_scores)
            output = outputs.get(idx)
            if output is None:
                if not prompt_scores or seq.state is State.ENDED:
                    continue
                output = StepOutput(request_id=seq.request.request_id, token_ids=())
            output.scores, output.prompt_scores = self.of_token.get(idx, ()), prompt_scores
            told[idx] = output
        return told


def read_scores(
    batch: Batch, rows: ScoreRows, seqs: Seq[Sequence], token_ids: Int64Array, scores: Float64Array | None
) -> StepScores:
    """What the sampler's scores of `rows` say of each sequence.

    Shapes: scores [Q + P, 2 + 2 K].
    Errors: ValueError when there are not as many as the batch asks for.
    """
    if scores is None or len(scores) != len(rows):
        raise ValueError(f"{len(rows)} scores are due, not {0 if scores is None else len(scores)}")
    num_sampled = len(rows.logit_rows)
    of_token = {}
    for idx, token_id, values in zip(
        batch.logit_seqs[rows.logit_rows].tolist(),
        token_ids[rows.logit_rows].tolist(),
        scores[:num_sampled].tolist(),
        strict=True,
    ):
        of_token[idx] = (_read(token_id, values, seqs[idx].request.sampling.logprobs or 0),)
    of_prompt: dict[int, list[TokenScore]] = {}
    prompt_seqs = np.searchsorted(batch.query_start, rows.token_rows, side="right") - 1
    for idx, token_id, values in zip(
        prompt_seqs.tolist(), rows.next_ids.tolist(), scores[num_sampled:].tolist(), strict=True
    ):
        num_top = seqs[idx].request.sampling.prompt_logprobs or 0
        of_prompt.setdefault(idx, []).append(_read(token_id, values, num_top))
    return StepScores(of_token, {idx: tuple(own) for idx, own in of_prompt.items()})


def _read(token_id: int, values: Seq[float], num_top: int) -> TokenScore:
    width = (len(values) - 2) // 2
    ids, logprobs = values[2 : 2 + width], values[2 + width :]
    top = tuple((int(top_id), logprob) for top_id, logprob in zip(ids[:num_top], logprobs[:num_top], strict=True))
    return TokenScore(token_id, values[0], int(values[1]), top)
