"""Rows as words on their way to a peer."""

import pytest
import torch

from dist_infer.kernels.all_reduce import SENTINEL
from tests.kernels import peer_code
from tests.kernels.triton_interpreter import TRITON_DEVICES


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_words_are_the_elements_in_order(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    out = torch.empty_like(x)
    peer_code.unpack_words[1,](x.view(torch.int32), out, VECTORS=len(x) * x.element_size() // 16)
    assert torch.equal(out, x)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_only_the_sentinel_is_not_sent(device: str) -> None:
    words = torch.tensor(
        [SENTINEL, SENTINEL + 1, -1, 0, 1, 0x3F80, -32768, 2**31 - 1], dtype=torch.int32, device=device
    )
    sent = torch.empty_like(words)
    peer_code.make_sendable[1,](words, sent, LENGTH=8)
    assert sent.tolist() == [0, *words.tolist()[1:]]
    zeros = torch.tensor([SENTINEL], dtype=torch.int32)
    assert zeros.view(torch.float32).item() == 0 and zeros.view(torch.bfloat16).tolist() == [0, 0]
