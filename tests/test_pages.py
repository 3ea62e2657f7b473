"""The block pool against a plain model of it, and its promises one by one."""

import random
import subprocess
import sys

import numpy as np
import pytest

from dist_infer.pages import BlockPool, chain_hash

A, B, C = (bytes([value]) * 32 for value in range(3))


def test_blocks_come_in_order_and_come_back_in_the_order_of_their_release() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(3)
    assert (first, second, pool.num_free) == ([0, 1], [2, 3, 4], 1)
    pool.release(second)
    pool.release(first)
    assert pool.num_free == 6
    assert pool.allocate(6) == [5, 4, 3, 2, 1, 0]


def test_more_than_is_free_is_refused_and_nothing_is_taken() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(ValueError, match="3 KV blocks wanted, 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_block_is_found_only_after_it_was_registered() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    assert pool.match([A]) == []
    pool.register(blocks[0], A)
    assert pool.match([A, B]) == blocks[:1]
    pool.register(blocks[1], B)
    assert pool.match([A, B, C]) == blocks
    assert pool.match([C, A]) == []


def test_matching_asks_for_no_hash_beyond_the_first_miss() -> None:
    asked = list[int]()
    pool = BlockPool(4)
    pool.register(pool.allocate(1)[0], A)
    pool.match(asked.append(idx) or hash_ for idx, hash_ in enumerate([A, B, C]))  # type: ignore[func-returns-value]
    assert asked == [0, 1]


def test_shared_blocks_are_free_when_the_last_holder_has_left() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.register(blocks[0], A)
    assert pool.num_free_among(blocks) == 0
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 1 and pool.num_holders(blocks[0]) == 1
    pool.release(blocks)
    assert pool.num_free == 2 and pool.num_free_among(blocks) == 1
    with pytest.raises(ValueError, match="block 0 is released but nobody holds it"):
        pool.release(blocks)
    pool.share(blocks)
    assert pool.num_free == 1 and pool.match([A]) == blocks


def test_the_first_of_two_equal_blocks_stays_registered() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.register(first, A)
    pool.register(second, A)
    assert pool.match([A]) == [first]
    pool.register(first, B)  # its content has not changed: it keeps its hash
    assert pool.match([B]) == []


def test_plain_blocks_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block, block_hash in zip(blocks, (A, B, C), strict=True):
        pool.register(block, block_hash)
    pool.release(blocks)  # the last of the sequence is the first to go
    pool.share(pool.match([A]))
    pool.release(blocks[:1])
    assert pool.allocate(1) == [3]
    assert pool.allocate(1) == blocks[2:] and pool.match([C]) == []
    assert pool.allocate(1) == blocks[1:2] and pool.match([A]) == blocks[:1]
    assert pool.counters.evicted == 2 and pool.counters.shared == 1 and pool.counters.allocated == 6


def test_without_a_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(2, prefix_cache=False)
    pool.register(pool.allocate(1)[0], A)
    assert pool.match([A]) == []


def test_a_hash_depends_on_all_tokens_before_it_and_on_nothing_else() -> None:
    ids = np.arange(4)
    first = chain_hash(b"", ids)
    assert chain_hash(b"", np.arange(8)[:4]) == first and len(first) == 32
    assert len({first, chain_hash(first, ids), chain_hash(b"", ids + 1), chain_hash(b"", ids[::-1].copy())}) == 4
    code = "import numpy; from dist_infer.pages import chain_hash; print(chain_hash(b'', numpy.arange(4)).hex())"
    other_process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other_process.stdout.strip() == first.hex()


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_keep_the_books(seed: int) -> None:
    """Held blocks are never handed out, nothing is lost, and two pools with equal calls are equal."""
    rng = random.Random(seed)
    pool, twin = BlockPool(12), BlockPool(12)
    held = list[list[int]]()
    content = dict[int, bytes]()  # what a registered block holds
    for _ in range(400):
        action = rng.choice(["allocate", "release", "share", "register"])
        if action == "allocate" and pool.num_free:
            count = rng.randint(1, pool.num_free)
            blocks = pool.allocate(count)
            assert twin.allocate(count) == blocks
            assert len(set(blocks)) == count and not {block for own in held for block in own} & set(blocks)
            for block in blocks:
                content.pop(block, None)
            held.append(blocks)
        elif action == "release" and held:
            blocks = held.pop(rng.randrange(len(held)))
            pool.release(blocks)
            twin.release(blocks)
        elif action == "share":
            hashes = [bytes([rng.randrange(6)]) * 32 for _ in range(2)]
            blocks = list(dict.fromkeys(pool.match(hashes)))
            assert [content[block] for block in blocks] == list(dict.fromkeys(hashes))[: len(blocks)]
            pool.share(blocks)
            twin.share(blocks)
            held.append(blocks)
        elif action == "register" and held and (own := rng.choice(held)):
            block, block_hash = rng.choice(own), bytes([rng.randrange(6)]) * 32
            if block not in content and block_hash not in content.values():
                content[block] = block_hash
            pool.register(block, block_hash)
            twin.register(block, block_hash)
        counts = [sum(block in own for own in held) for block in range(12)]
        assert [pool.num_holders(block) for block in range(12)] == counts
        assert pool.num_free == twin.num_free == counts.count(0)


def test_the_peak_counts_blocks_that_are_held_not_those_that_are_cached() -> None:
    pool = BlockPool(8)
    first = pool.allocate(3)
    pool.register(first[0], b"a")
    pool.release(first)
    assert pool.counters.peak_held == 3
    pool.share(pool.match([b"a"]))
    pool.allocate(1)
    assert pool.counters.peak_held == 3
    pool.allocate(4)
    assert pool.counters.peak_held == 6
