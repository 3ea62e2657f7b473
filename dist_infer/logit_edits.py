"""What a request changes in its logits before a token is chosen. L rows, V ids of this rank's shard.

In this order, each where it is asked for, all before temperature:
    bans        min_tokens: stop ids, EOS among them, have -inf until so many tokens are there
    bias        logit_bias is added
    repetition  of each id in prompt or answer: a positive logit is divided by the penalty, another one multiplied
    frequency   minus the penalty times the id's count in the answer
    presence    minus the penalty where the id is in the answer

The tokens so far travel with the batch, so a preempted or moved sequence needs no state here. What the host can't know
yet (the step in flight samples it) is the row's input token, which the device has. Each id's logit is changed by
itself, so the result doesn't depend on how the vocabulary is cut.

Rejected: counts per sequence on the device. They take vocabulary x sequences in memory, must be rebuilt after a
preemption, and spare only the copy of a few thousand ids a step.

Source: vLLM, vllm/v1/sample/sampler.py (the order) and vllm/v1/sample/ops/penalties.py; CTRL (Keskar et al., 2019) for
the repetition penalty; the OpenAI API reference for frequency and presence.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dist_infer.types import LogitEdits
from dist_infer.upload import upload

_PENALTY_ARRAYS = (
    "penalty_rows",
    "repetition",
    "frequency",
    "presence",
    "token_owners",
    "token_ids",
    "token_counts",
)


def edit_logits(logits: Tensor, held: range, edits: LogitEdits, input_ids: Tensor) -> Tensor:
    """The changed logits, at least float32, in a tensor of their own.

    `held` are the ids of the first columns; what follows them is padding. `input_ids` are the tokens that the rows have
    as input.

    Shapes: logits [L, V], input_ids [L] int64 -> [L, V].
    Ranks: local.
    """
    edited = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    mine = (edits.bias_ids >= held.start) & (edits.bias_ids < held.stop)
    sent = upload(
        {
            "bias_rows": edits.bias_rows[mine],
            "bias_columns": edits.bias_ids[mine] - held.start,
            "biases": edits.biases[mine],
            **{name: getattr(edits, name) for name in _PENALTY_ARRAYS},
        },
        logits.device,
    )
    if mine.any():
        places = (sent["bias_rows"], sent["bias_columns"])
        edited.index_put_(places, sent["biases"].to(edited.dtype), accumulate=True)
    if len(edits.penalty_rows) and len(held):
        rows = sent["penalty_rows"]
        values = edited.index_select(0, rows)
        values[:, : len(held)] = _penalised(values[:, : len(held)], held, sent, input_ids.index_select(0, rows))
        edited.index_copy_(0, rows, values)
    return edited


def _penalised(values: Tensor, held: range, sent: Mapping[str, Tensor], input_ids: Tensor) -> Tensor:
    """Rows with penalties. Shapes: values [R, held], input_ids [R] -> [R, held]."""
    owners, ids = sent["token_owners"], sent["token_ids"]
    ids = torch.where(ids < 0, input_ids[owners], ids)
    nowhere = len(held)  # one column more, for ids of other shards
    columns = torch.where((ids >= held.start) & (ids < held.stop), ids - held.start, nowhere)
    counts = values.new_zeros(len(values), nowhere + 1)
    counts.index_put_((owners, columns), sent["token_counts"].to(values.dtype), accumulate=True)
    seen = torch.zeros_like(counts, dtype=torch.bool)
    seen.index_put_((owners, columns), torch.ones_like(columns, dtype=torch.bool))  # a plain True would be uploaded
    counts, seen = counts[:, :nowhere], seen[:, :nowhere]
    repetition, frequency, presence = (
        sent[penalties].to(values.dtype)[:, None] for penalties in ("repetition", "frequency", "presence")
    )
    scaled = torch.where(values > 0, values / repetition, values * repetition)
    return torch.where(seen, scaled, values) - frequency * counts - presence * (counts > 0)
