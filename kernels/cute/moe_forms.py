"""Forms of the grouped products, by how many pairs an expert has on average: data, measured on an H200."""

from collections.abc import Sequence
from typing import NamedTuple

from dist_infer.kernels.cute.grouped_gemm_parts import DEPTH, SHORT


class Form(NamedTuple):
    """What of a variant is not what is computed; see grouped_gemm_parts.Variant."""

    sizes: tuple[int, ...]
    num_stages: int
    box: int
    pieces: int
    cluster: int = 1

    @property
    def is_short(self) -> bool:
        """Tiles are so short that weights are what takes time, and their order doesn't tell."""
        return self.sizes[-1] <= SHORT


_LONG = (16, 32, 48, 64, 80, 96, 104, 112, 120, 128, 136, 144)
# Up to so many pairs an expert. Where weights are what takes time, more of them are on their way in longer pieces; two
# CTAs load them together where many experts have more than a tile of pairs.
FORMS: Sequence[tuple[float, Form]] = (
    (4, Form((8, 16), 6, 64, 2)),
    (18, Form((8, 16, 24, 32), 5, 64, 2)),
    (26, Form((8, 16, 24, 32, 40, 48), 4, 64, 2)),
    (100, Form(_LONG, 4, 128, 1)),
    (float("inf"), Form(_LONG, 4, 128, 1, cluster=2)),
)


def form_for(num_pairs: int, num_experts: int, width: int, inner: int, place: int | None = None) -> Form:
    """The form in that place, None: the measured best. Rows of `width` are whole stages.

    Where the blocks of `inner` channels are odd in number no CTAs load together: one would be left without work.
    """
    if place is None:
        place = next(place for place, (density, _) in enumerate(FORMS) if num_pairs <= density * num_experts)
    form = FORMS[place][1]
    if -(-inner // form.box) % 2:
        form = form._replace(cluster=1)
    if width % (DEPTH * form.pieces):
        return form._replace(pieces=1, num_stages=form.num_stages * form.pieces)
    return form
