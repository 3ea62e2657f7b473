"""Quantisation of activations on a GPU: every format and layout of scales.

    python -m benchmarks.bench_quantize

Peer: the reference under torch.compile, in `PEER_CASES` (a compilation each). Bound: torch's plain cast to E4M3,
without scales. The floor counts each byte of input, data and scales once, as a copy.
"""

import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.timing import Row, compare, floor_us, write_results
from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Mxfp8Tensor, Nvfp4Tensor, QuantizedTensor
from dist_infer.kernels.dispatch import Target, resolve
from dist_infer.kernels.quantize import LIBRARIES, QuantFormat
from dist_infer.kernels.reference import quantize as reference

TOKENS = (1, 4, 16, 128, 129, 1024, 4096)
PEER_FORMATS = (QuantFormat.FP8, QuantFormat.FP8_BLOCK128, QuantFormat.NVFP4, QuantFormat.MXFP8)
PEER_CASES = tuple((kind, tokens, 6144) for kind in PEER_FORMATS for tokens in (1, 16, 4096))
NUM_SAMPLES = 9

Inputs = tuple[Tensor, QuantizedTensor]


def scale_of(quant_format: QuantFormat, device: torch.device) -> Tensor | None:
    takes_scale = quant_format in (QuantFormat.FP8, QuantFormat.NVFP4, QuantFormat.NVFP4_LINEAR)
    return torch.full((1,), 2.0, device=device) if takes_scale else None


def make_inputs(quant_format: QuantFormat, tokens: int, hidden: int, device: torch.device) -> Inputs:
    x = torch.randn(tokens, hidden, device=device).to(torch.bfloat16)
    return x, quant_format.empty(tokens, hidden, device=device, scale=scale_of(quant_format, device))


def written(out: QuantizedTensor) -> list[Tensor]:
    """What a run writes: the scale of FP8 is given."""
    given = isinstance(out, Fp8Tensor) and out.scaling is Fp8Scaling.TENSOR
    return [out.data] if given else [out.data, out.scales]


def eager(out: QuantizedTensor) -> Callable[[Tensor, Tensor | None], Sequence[Tensor]]:
    """The reference as a function of tensors alone, so that it can be compiled."""
    if isinstance(out, Nvfp4Tensor):
        layout = out.layout

        def nvfp4(x: Tensor, scale: Tensor | None) -> Sequence[Tensor]:
            codes, scales = reference.nvfp4_codes(x, scale, reference.nearest_reciprocal)
            return codes[:, 0::2] | codes[:, 1::2] << 4, reference.laid_out(scales, layout)

        return nvfp4
    if isinstance(out, Mxfp8Tensor):
        mx_layout = out.layout

        def mxfp8(x: Tensor, scale: Tensor | None) -> Sequence[Tensor]:
            data, scales = reference.mxfp8_values(x)
            return data, reference.laid_out(scales, mx_layout)

        return mxfp8
    if out.scaling is Fp8Scaling.TENSOR:
        return lambda x, scale: [reference.to_e4m3(x.float() * (1.0 / scale))]  # type: ignore[operator]
    return lambda x, scale: reference.fp8_blocks(x, 1)


def compiled(out: QuantizedTensor) -> Callable[[Inputs], Sequence[Tensor]]:
    function = torch.compile(eager(out), dynamic=False)

    def run(inputs: Inputs) -> Sequence[Tensor]:
        x, carrier = inputs
        scale = carrier.global_scale if isinstance(carrier, Nvfp4Tensor) else carrier.scales
        return list(function(x, None if isinstance(carrier, Mxfp8Tensor) else scale))

    return run


def cases() -> Iterator[tuple[QuantFormat, int, int]]:
    yield from ((kind, tokens, 6144) for kind in QuantFormat for tokens in TOKENS)
    yield from ((kind, tokens, 7168) for kind in QuantFormat for tokens in (1, 4096))


def measure(quant_format: QuantFormat, tokens: int, hidden: int, device: torch.device) -> Row:
    def make(_: int) -> Inputs:
        return make_inputs(quant_format, tokens, hidden, device)

    x, out = make(0)
    library = resolve("quantize", LIBRARIES, Target(device=device, dtype=x.dtype)).pick()

    def ours(inputs: Inputs) -> Sequence[Tensor]:
        library.function(*inputs)
        return written(inputs[1])

    candidates: dict[str, Callable[[Inputs], Sequence[Tensor]]] = {
        "ours": ours,
        "cast": lambda inputs: [inputs[0].to(torch.float8_e4m3fn)],
    }
    if (quant_format, tokens, hidden) in PEER_CASES:
        candidates["torch.compile"] = compiled(out)
    num_bytes = sum(part.nbytes for part in (x, *written(out)))
    found = compare(candidates, make, device=device, bytes_per_call=num_bytes, num_samples=NUM_SAMPLES)
    peer = found.get("torch.compile")
    return Row(
        case=f"{quant_format.value} tokens={tokens} hidden={hidden}",
        ours_us=found["ours"].median_us,
        library=library.name,
        floor_us=floor_us(copy_bytes=num_bytes),
        peers={"torch.compile": peer.median_us} if peer else {},
        not_run={} if peer else {"torch.compile": "compiled for a few cases only"},
        bounds={"cast": found["cast"].median_us},
    )


def main() -> int:
    """Measures and writes the results."""
    device = torch.device("cuda")
    rows = []
    for case in cases():
        rows.append(measure(*case, device))
        row = rows[-1]
        peer = ", ".join(f"{name} {value:.2f}" for name, value in row.peers.items())
        sys.stdout.write(f"{row.case}: {row.ours_us:.2f} us, floor {row.floor_us:.2f}, {row.bounds} {peer}\n")
    write_results("bench_quantize", rows, device=device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
