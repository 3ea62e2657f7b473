"""From a Hugging Face config.json to this rank's shard of a model; what isn't supported is refused by field."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import get_args

import torch

from dist_infer.comm.collectives import Collectives
from dist_infer.comm.mesh import Mesh
from dist_infer.config import DType, ModelConfig
from dist_infer.errors import UsageError
from dist_infer.kernels.measured import Measured
from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.layers.setup import LayerSetup
from dist_infer.models.config_fields import Fields
from dist_infer.models.decoder import Decoder
from dist_infer.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from dist_infer.models.family import Family
from dist_infer.models.llama import LLAMA
from dist_infer.models.minimax_m2 import MINIMAX_M2
from dist_infer.models.mistral import MISTRAL
from dist_infer.models.mixtral import MIXTRAL
from dist_infer.models.qwen2 import QWEN2
from dist_infer.models.qwen3 import QWEN3
from dist_infer.models.qwen3_moe import QWEN3_MOE

_FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3, MINIMAX_M2)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.architecture: family for family in _FAMILIES})
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({name: getattr(torch, name) for name in get_args(DType)})


def parse_config(hf_config: Mapping[str, object]) -> ModelConfig:
    """The geometry that a config.json describes. Absent optional fields have the defaults of the architecture.

    Errors: UsageError naming the field, its value and what is supported.
    Source: the config.json of Hugging Face transformers, old and new field names.
    """
    fields = Fields(hf_config)
    return _family(fields).parse(fields)


def build_model(
    config: ModelConfig,
    *,
    tp: Collectives,
    dtype: DType | torch.dtype,
    device: torch.device,
    mesh: Mesh | None = None,
    world: Collectives | None = None,
    max_moe_tokens: int | None = None,
    uniform_routing: bool = False,
    weight_format: WeightFormat | None = None,
    cached_as: torch.dtype | None = None,
    batch_invariant: bool = False,
    tuned: Sequence[Measured] = (),
    on_loaded: list[Callable[[], int]] | None = None,
    kernel_orders: Mapping[str, str] | None = None,
    on_choice: Callable[[str], None] | None = None,
) -> Decoder:
    """This rank's shard, its parameters not yet filled. `on_choice` gets one line for each kernel library chosen.

    `mesh` and `world` are those of the whole job, which experts are dealt to; without them the tp group is all there
    is. A MoE layer takes about `max_moe_tokens` rows of all ranks at a time, None: all of a step. `uniform_routing`
    deals rows to experts evenly, for benchmarks with dummy weights. `cached_as`: the dtype of the KV cache, if another.
    `batch_invariant`: attention of a sequence does not depend on the others of its step. `tuned`: measurements
    that go before the committed ones.
    Whoever asks for a `weight_format` calls what is in `on_loaded` after the load: it quantises the linear layers.

    Ranks: local; every rank builds its own.
    Errors: UsageError for a layout that the model can't be cut into, and for a wrong kernel order.
    """
    setup = LayerSetup(
        tp=tp,
        dtype=dtype if isinstance(dtype, torch.dtype) else _DTYPES[dtype],
        device=device,
        kernel_orders=kernel_orders or {},
        on_choice=on_choice or (lambda _: None),
        mesh=mesh,
        world=world,
        max_moe_tokens=max_moe_tokens,
        uniform_routing=uniform_routing,
        weight_format=weight_format,
        cached_as=cached_as,
        batch_invariant=batch_invariant,
        tuned=tuned,
        on_loaded=[] if on_loaded is None else on_loaded,
    )
    return Decoder(config, setup, FAMILIES[config.architecture].moe_names)


def _family(fields: Fields) -> Family:
    supported = ", ".join(FAMILIES)
    names = fields.strings("architectures")
    if not names:
        model_type = fields.string("model_type")
        for family in FAMILIES.values():
            if family.model_type == model_type:
                return family
        raise UsageError(
            f"config.json: architectures is missing and model_type {model_type!r} is not known; supported: {supported}"
        )
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    raise UsageError(f"config.json: architectures {list(names)} is not supported; supported: {supported}")
