"""A step's batch on the device. T tokens, S sequences, L rows whose logits are needed."""

from dataclasses import dataclass, replace

from torch import Tensor

from dist_infer.kernels.carriers import PagedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What the layers and the runner read of a `Batch`.

    `logit_state_rows` says where the token sampled for each logit row is kept for the next step (see runner).
    `rank_tokens` are the agreed tokens of every rank of the world, which experts need (0: it runs a token that is
    nobody's; None: all have as many); `eager_prefill` says whether the agreed step prefills outside of a graph. With
    `num_real` only so many of the first tokens are real, the rows behind them are padding; None: all are.

    Shapes: token_ids, positions, slots [T] int64; logit_rows, logit_state_rows [L] int64; num_real [1] int32.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    paged: PagedStep
    logit_rows: Tensor
    logit_state_rows: Tensor
    num_real: Tensor | None = None
    rank_tokens: tuple[int, ...] | None = None
    eager_prefill: bool = False

    def agreed(self, rank_tokens: tuple[int, ...], *, eager_prefill: bool) -> "StepInputs":
        """The same with what the ranks have agreed on since it was prepared."""
        return replace(self, rank_tokens=rank_tokens, eager_prefill=eager_prefill)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_logits(self) -> int:
        """L."""
        return len(self.logit_rows)
