"""Parts of a row that programs share."""

import pytest
import torch

from tests.kernels import peer_code
from tests.kernels.triton_interpreter import TRITON_DEVICES


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_parts_have_every_second_or_fourth_chunk(device: str, num_parts: int) -> None:
    places = torch.empty(num_parts, 512 // num_parts, dtype=torch.int32, device=device)
    peer_code.place_parts[num_parts,](places, LENGTH=512 // num_parts, CHUNK=64, PARTS=num_parts)
    whole = torch.arange(512, dtype=torch.int32, device=device)
    assert torch.equal(places, whole.view(-1, num_parts, 64).transpose(0, 1).reshape(num_parts, -1))
