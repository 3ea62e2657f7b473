"""What libraries make of a quantised weight before its first product."""

from typing import TypeAlias

from dist_infer.kernels.packed_weight import PackedWeight
from dist_infer.kernels.staged_weight import StagedWeight

PreparedWeight: TypeAlias = PackedWeight | StagedWeight
