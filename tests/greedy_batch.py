"""Greedy answers of a dense model to several prompts in one batch, on the ranks of a group."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.comm.mesh import split_heads
from dist_infer.kv_cache import KVCache
from dist_infer.runner import Runner
from tests.batches import Part, make_batch
from tests.tiny_models import load_tiny_model

BLOCK_SIZE = 8


def greedy_batch(
    folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int
) -> Callable[[Collectives], tuple[list[list[int]], Tensor]]:
    """Greedy tokens of all prompts in one batch, and the logits [prompt, token, V] that they were chosen from."""

    def main(tp: Collectives) -> tuple[list[list[int]], Tensor]:
        model = load_tiny_model(folder, tp)
        shard = split_heads(model.config.num_heads, model.config.num_kv_heads, tp.size, tp.rank)
        device = torch.device("cpu")
        kv_cache = KVCache(model.config, shard, 10 * len(prompts), BLOCK_SIZE, torch.float64, device)
        runner = Runner(model, kv_cache, max_num_seqs=len(prompts), device=device)
        # Pages far apart and out of order: sequence s has s, s + 3, ... from the end.
        pages = [list(range(seq, kv_cache.num_blocks, len(prompts)))[::-1] for seq in range(len(prompts))]
        seqs = [list(prompt) for prompt in prompts]
        rows = []
        for step in range(num_tokens):
            parts = [
                Part(token_ids=seq if step == 0 else seq[-1:], start=0 if step == 0 else len(seq) - 1, pages=own)
                for seq, own in zip(seqs, pages, strict=True)
            ]
            logits = runner.run(runner.prepare(make_batch(parts, block_size=BLOCK_SIZE)))
            assert logits.shape == (len(seqs), len(model.vocab_range))
            rows.append(tp.all_gather(logits.T.contiguous()).T)
            for seq, token_id in zip(seqs, rows[-1].argmax(1).tolist(), strict=True):
                seq.append(token_id)
        tokens = [seq[len(prompt) :] for seq, prompt in zip(seqs, prompts, strict=True)]
        return tokens, torch.stack(rows, 1)

    return main
