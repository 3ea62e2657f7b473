"""The vocabulary over the ranks."""

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives, SingleCollectives
from dist_infer.layers.embedding import VocabEmbedding, VocabHead
from tests.fake_collectives import run_group
from tests.layers.setups import close, fill, random, setup_of

VOCAB, HIDDEN = 10, 3
WEIGHT = random(VOCAB, HIDDEN)


@pytest.mark.parametrize("size", [1, 2, 4, 11])
def test_embedding_is_the_same_row_on_all_ranks(size: int) -> None:
    ids = torch.tensor([0, 9, 4, 4, 7])

    def main(tp: Collectives) -> Tensor:
        layer = VocabEmbedding(VOCAB, HIDDEN, setup_of(tp))
        fill(layer.weight_slots("e."), {"e.weight": WEIGHT})
        return tp.all_reduce(layer(ids))

    for rows in run_group(size, main):
        assert torch.equal(rows, WEIGHT[ids])


@pytest.mark.parametrize("size", [1, 2, 4, 11])
def test_head_gives_logits_of_real_ids_only(size: int) -> None:
    """10 rows over 4 ranks are 3, 3, 2, 2: no padded row can win."""
    hidden = random(2, HIDDEN, seed=1)

    def main(tp: Collectives) -> tuple[range, Tensor]:
        head = VocabHead(VOCAB, HIDDEN, setup_of(tp))
        fill(head.weight_slots("h."), {"h.weight": WEIGHT})
        return head.held, head(hidden)

    results = run_group(size, main)
    assert [idx for held, _ in results for idx in held] == list(range(VOCAB))
    close(torch.cat([logits for _, logits in results], 1), hidden @ WEIGHT.T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tied_head_has_no_tensor_of_its_own(dtype: torch.dtype) -> None:
    """One that is loaded once is the embedding's and the head's, also where the head keeps it in another form."""
    setup = setup_of(SingleCollectives(), dtype)
    layer = VocabEmbedding(VOCAB, HIDDEN, setup)
    head = VocabHead(VOCAB, HIDDEN, setup, tied_to=layer)
    assert list(head.weight_slots("h.")) == []
    fill(layer.weight_slots("e."), {"e.weight": WEIGHT})
    for finish in setup.on_loaded:
        finish()
    hidden = random(2, HIDDEN, seed=1).to(dtype)
    torch.testing.assert_close(head(hidden), hidden @ WEIGHT.to(dtype).T)
    assert torch.equal(layer(torch.tensor([3, 1])), WEIGHT.to(dtype)[[3, 1]])
