"""The pool of KV blocks (pages) of one group, and the prefix cache on top of it. Host data only: no torch here.

A block is *free* when no sequence holds it. Blocks are never written while two sequences hold them: only a block
that is full and whose KV has really been computed is registered under its hash, and only a registered block can be
shared. The hash of a block is chained over the hash of the block before it, so equal hashes mean equal prefixes,
not only equal blocks.

A free block keeps its registration until it is needed for something else. Blocks without one are handed out first,
oldest release first, then the registered ones, least recently used first. All of this is a pure function of the
calls, so the ranks of a group hold equal pools.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from dist_infer.types import Int64Array

_HASH_BYTES = 32  # strong, because a collision would show one user's prompt to another


def chain_hash(parent: bytes, token_ids: Int64Array) -> bytes:
    """The hash of a full block: of its token ids and of all before them. `parent` is b"" for the first block."""
    return blake2b(parent + token_ids.tobytes(), digest_size=_HASH_BYTES).digest()


@dataclass(slots=True)
class PoolCounters:
    """What has happened to the blocks since the start."""

    allocated: int = 0
    shared: int = 0  # handed out again by their hash
    evicted: int = 0  # registrations given up for a new owner
    peak_held: int = 0  # most that sequences held at once


class BlockPool:
    """Block ids 0..num_blocks-1 with reference counts, a deterministic free list and a prefix cache.

    Ranks: local; equal calls give equal results.
    """

    def __init__(self, num_blocks: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.counters = PoolCounters()
        self._prefix_cache = prefix_cache
        self._num_holders = [0] * num_blocks
        self._plain: deque[int] = deque(range(num_blocks))  # free, not registered
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, registered; least recently used first
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds, registered ones included."""
        return len(self._plain) + len(self._cached)

    def num_holders(self, block: int) -> int:
        """How many sequences hold the block."""
        return self._num_holders[block]

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` free blocks to a new owner.

        Errors: ValueError when fewer are free; nothing is taken then.
        """
        if count > self.num_free:
            raise ValueError(f"{count} KV blocks wanted, {self.num_free} of {self.num_blocks} are free")
        blocks = []
        for _ in range(count):
            block = self._plain.popleft() if self._plain else self._evict()
            self._num_holders[block] = 1
            blocks.append(block)
        self.counters.allocated += count
        self._note_peak()
        return blocks

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest registered prefix, asked for up to the first miss; `share` then takes them."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks `share` would take from the free ones."""
        return sum(self._num_holders[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Take a further reference on registered blocks."""
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._cached[block]
            self._num_holders[block] += 1
        self.counters.shared += len(blocks)
        self._note_peak()

    def _note_peak(self) -> None:
        self.counters.peak_held = max(self.counters.peak_held, self.num_blocks - self.num_free)

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a full block reusable, once its KV has been computed; an equal block that is registered already wins."""
        if self._prefix_cache and self._hash_of[block] is None and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference of each block back, the last block first: prefixes outlive their continuations.

        Errors: ValueError when nobody holds the block.
        """
        for block in reversed(blocks):
            if self._num_holders[block] == 0:
                raise ValueError(f"KV block {block} is released but nobody holds it")
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                if self._hash_of[block] is None:
                    self._plain.append(block)
                else:
                    self._cached[block] = None

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None
        self.counters.evicted += 1
        return block
