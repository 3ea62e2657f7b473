"""Vocabulary cut over the tensor-parallel ranks: the embedding and the head. T tokens, L rows with logits, V rows
held, D hidden.

Rows are split contiguously, ceil then floor, without padding, so no id beyond the vocabulary has a logit.
"""

from collections.abc import Iterator

from torch import Tensor

from dist_infer.comm.mesh import split_range
from dist_infer.kernels import embedding as embedding_op
from dist_infer.layers.product import Product
from dist_infer.layers.setup import LayerSetup
from dist_infer.layers.weights import WeightSlot


class VocabEmbedding:
    """Each rank gives the rows that it holds and zeros for the others; their sum is the embedding, exactly.

    Whoever calls it sums the parts (layers/rows).
    """

    def __init__(self, vocab_size: int, hidden_size: int, setup: LayerSetup) -> None:
        self.vocab_size = vocab_size
        self.held = split_range(vocab_size, setup.tp.size, setup.tp.rank)
        self.weight = setup.empty(len(self.held), hidden_size)
        self._library = setup.choose("embedding", embedding_op.LIBRARIES, hidden=hidden_size)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """This rank's part of the embeddings: the sum over the ranks is the whole.

        Shapes: token_ids [T] -> [T, D].
        Ranks: local.
        """
        return embedding_op.embedding(token_ids, self.weight, self.held.start, library=self._library)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """The tensor `{prefix}weight`."""
        yield vocab_slot(f"{prefix}weight", self.vocab_size, self.held, self.weight)


class VocabHead:
    """Logits of the vocabulary rows that this rank holds. A tied head is built on the embedding's own parameter."""

    def __init__(
        self, vocab_size: int, hidden_size: int, setup: LayerSetup, *, tied_to: VocabEmbedding | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.held = split_range(vocab_size, setup.tp.size, setup.tp.rank)
        self.tied = tied_to is not None
        shared = None if tied_to is None else tied_to.weight
        self._product = Product(len(self.held), hidden_size, setup, shared=shared, stays_wide=True)

    @property
    def weight(self) -> Tensor:
        """The rows held, once they are loaded in the form of the library that multiplies them.

        Shapes: [V, D].
        """
        return self._product.weight

    def __call__(self, hidden: Tensor) -> Tensor:
        """This rank's logits; gathering or reducing them is the sampler's.

        Shapes: hidden [L, D] -> [L, V].
        Ranks: local.
        """
        return self._product(hidden)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """The tensor `{prefix}weight`; none when tied."""
        if not self.tied:
            yield vocab_slot(f"{prefix}weight", self.vocab_size, self.held, self.weight)


def vocab_slot(name: str, vocab_size: int, held: range, weight: Tensor) -> WeightSlot:
    """The rows `held` of a [vocabulary, hidden] tensor, which a checkpoint may pad."""
    hidden_size = weight.shape[1]
    return WeightSlot(name, (vocab_size, hidden_size), (held, range(hidden_size)), weight, pads_rows=True)
