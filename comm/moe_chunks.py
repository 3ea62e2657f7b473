"""The MoE chunk scheduler: in how many chunks the MoE layers of a step run, and how many rows each rank has in each.

A pure function of the agreed table, in host integers, computed once a step and shared by all MoE layers, so that every
collective of every chunk has one size vector on all ranks. Each rank's rows are split over all chunks, contiguously,
the larger parts first: a quotient and a remainder a rank tell everything.

A rank may have nothing in a chunk (fewer rows than chunks, or none at all). Not every back-end can send nothing, so
there it stands in with one row of zeros that is routed to no expert and whose result is dropped. Every rank puts 1 for
every such rank, from the same untouched table: were each to patch only its own entry, their vectors would differ and
the collective would never end.

There are never more chunks than the fullest rank has rows, so no chunk consists of stand-ins only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How the rows of all ranks are spread over chunks; equal on all ranks.

    A chunk has fewer than max_tokens + ranks rows: the limit, and what each rank rounds up or stands in with.
    """

    num_chunks: int
    quotients: tuple[int, ...]  # of each rank's rows by num_chunks
    remainders: tuple[int, ...]
    selective: bool = False  # a row goes only to the ranks that hold one of its experts (see comm.expert)
    _vectors: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    def rows(self, rank: int) -> int:
        """All rows of a rank."""
        return self.quotients[rank] * self.num_chunks + self.remainders[rank]

    def sizes(self, chunk: int) -> tuple[int, ...]:
        """Rows of every rank in a chunk, stand-ins included: the size vector of its collectives."""
        vector = self._vectors.get(chunk)
        if vector is None:
            self._check(chunk)
            vector = tuple([(q + (chunk < r)) or 1 for q, r in zip(self.quotients, self.remainders, strict=True)])
            self._vectors[chunk] = vector
        return vector

    def own(self, rank: int, chunk: int) -> tuple[range, bool]:
        """The rows of a rank in a chunk; none, and True, where it stands in."""
        self._check(chunk)
        quotient, remainder = self.quotients[rank], self.remainders[rank]
        start = chunk * quotient + min(chunk, remainder)
        stop = start + quotient + (chunk < remainder)
        return range(start, stop), stop == start

    def _check(self, chunk: int) -> None:
        if not 0 <= chunk < self.num_chunks:
            raise ValueError(f"chunk {chunk} is not one of {self.num_chunks}")


def plan_chunks(rank_tokens: Sequence[int], max_tokens: int | None, *, selective: bool = False) -> ChunkPlan:
    """The plan for a table of rows by rank; a chunk takes about `max_tokens` rows of all ranks together.

    Errors: ValueError for an empty table, a negative entry or a limit below 1.
    """
    rows = tuple(rank_tokens)
    if not rows or min(rows) < 0 or (max_tokens is not None and max_tokens < 1):
        raise ValueError(f"plan_chunks: rows {list(rows)} must be >= 0, one a rank, and the limit {max_tokens} >= 1")
    num_chunks = 1 if max_tokens is None else max(1, min(-(-sum(rows) // max_tokens), max(rows)))
    quotients, remainders = zip(*[divmod(count, num_chunks) for count in rows], strict=True)
    return ChunkPlan(num_chunks, quotients, remainders, selective)
