"""A step's batch on the device. T tokens, S sequences, L rows whose logits are needed."""

from dataclasses import dataclass

from torch import Tensor

from dist_infer.kernels.carriers import PagedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What the layers and the runner read of a `Batch`.

    `logit_state_rows` says where the token sampled for each logit row is kept for the next step (see runner).

    Shapes: token_ids, positions, slots [T] int64; logit_rows, logit_state_rows [L] int64.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    paged: PagedStep
    logit_rows: Tensor
    logit_state_rows: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_logits(self) -> int:
        """L."""
        return len(self.logit_rows)
