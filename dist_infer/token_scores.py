"""Log probabilities of given tokens from logits that are cut over the vocabulary.

They are those of the model's own logits, before edits and temperature, as vLLM's "raw_logprobs".

Q rows, V ids of this rank's shard, N ranks, K likeliest tokens.
"""

import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.kernels import top_k as top_k_op
from dist_infer.kernels.dispatch import Library
from dist_infer.types import LEAST_LOGPROB


def score_tokens(
    logits: Tensor,
    held: range,
    token_ids: Tensor,
    num_top: int,
    *,
    tp: Collectives,
    top_k_library: Library[top_k_op.TopKFunction] = top_k_op.LIBRARIES[-1],
) -> Tensor:
    """Of each token its log probability, its rank, the K likeliest ids and their log probabilities, side by side.

    Ranks count from 1; of equally likely ids the smaller one is first. Log probabilities are at least -9999. `held` are
    the ids of the columns. `num_top` (K) is at most the number of ids of all shards.

    Shapes: logits [Q, V], token_ids [Q] int64 -> [Q, 2 + 2 K] float64.
    Ranks: collective over tp; equal on all of them.
    """
    own = logits.double()
    own = own.masked_fill(own.isnan(), -torch.inf)
    ids = torch.arange(held.start, held.stop, device=logits.device)
    widths = (3, num_top, num_top)
    table = tp.all_gather(torch.cat([_sums(own, ids, token_ids), *_tops(own, ids, num_top, top_k_library)], 1)[None])
    sums, values, value_ids = table.split_with_sizes(widths, 2)
    chosen, largest = sums[..., 0].amax(0), sums[..., 1].amax(0)
    log_total = largest + _total(sums[..., 1], sums[..., 2], largest).log()
    before = (own > chosen[:, None]) | ((own == chosen[:, None]) & (ids < token_ids[:, None]))
    ranks = 1 + tp.all_gather(before.sum(1)[None]).sum(0)
    columns = [_floored(chosen - log_total)[:, None], ranks[:, None].double()]
    if num_top:
        tops, places = top_k_op.top_k(_side_by_side(values), num_top, library=top_k_library)
        columns += [_side_by_side(value_ids).gather(1, places), _floored(tops - log_total[:, None])]
    return torch.cat(columns, 1)


def _sums(own: Tensor, ids: Tensor, token_ids: Tensor) -> Tensor:
    """The token's logit (-inf where another shard has it), the largest one, and the sum relative to it.

    Shapes: -> [Q, 3].
    """
    if not len(ids):
        return own.new_tensor([-torch.inf, -torch.inf, 0.0]).expand(len(own), 3)
    columns = (token_ids - ids[0]).clamp(0, len(ids) - 1)
    chosen = own.gather(1, columns[:, None])[:, 0].masked_fill(ids[columns] != token_ids, -torch.inf)
    largest = own.amax(1)
    total = (own - largest[:, None]).exp().nan_to_num(nan=0.0).sum(1)  # a row of nothing but -inf has no weight
    return torch.stack([chosen, largest, total], 1)


def _tops(own: Tensor, ids: Tensor, num_top: int, library: Library[top_k_op.TopKFunction]) -> tuple[Tensor, Tensor]:
    """The shard's largest logits and their ids, filled up with ones that no id has. Shapes: [Q, K], [Q, K]."""
    num_own = min(num_top, len(ids))
    missing = (0, num_top - num_own)
    if num_own == 0:
        values, columns = own[:, :0], own[:, :0].long()
    else:
        values, columns = top_k_op.top_k(own, num_own, library=library)
    return (
        torch.nn.functional.pad(values, missing, value=-torch.inf),
        torch.nn.functional.pad(ids[columns].double(), missing, value=torch.inf),
    )


def _total(largest_of_shards: Tensor, sums: Tensor, largest: Tensor) -> Tensor:
    """The shards' sums relative to the largest logit of all, added in the order of the ranks. Shapes: [N, Q] -> [Q]."""
    total = torch.zeros_like(largest)
    for own_largest, own_sum in zip(largest_of_shards, sums, strict=True):
        total += torch.where(own_sum > 0, own_sum * (own_largest - largest).exp(), 0.0)
    return total


def _side_by_side(table: Tensor) -> Tensor:
    """Shapes: [N, Q, K] -> [Q, N K]."""
    return table.transpose(0, 1).flatten(1)


def _floored(logprobs: Tensor) -> Tensor:
    return logprobs.nan_to_num(nan=LEAST_LOGPROB).clamp(LEAST_LOGPROB, 0.0)
