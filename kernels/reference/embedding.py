"""Rows of a vocabulary shard in plain torch; the contract stands in kernels/embedding.py."""

from torch import Tensor


def embedding(token_ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
    """See `dist_infer.kernels.embedding.embedding`."""
    num_rows = weight.shape[0]
    if num_rows == 0:
        return weight.new_zeros(len(token_ids), weight.shape[1])
    rows = token_ids - first_id
    absent = (rows < 0) | (rows >= num_rows)
    return weight.index_select(0, rows.clamp_(0, num_rows - 1)).masked_fill_(absent[:, None], 0)
