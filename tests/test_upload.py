"""Host arrays on the device: shapes, dtypes, places."""

import numpy as np
import pytest
import torch

from dist_infer.upload import HostArray, num_words, upload
from tests.devices import DEVICES

ARRAYS: dict[str, HostArray] = {
    "odd": np.arange(3, dtype=np.int32),
    "wide": np.array([[1, -2], [3, 2**40]], np.int64),
    "empty": np.zeros((2, 0), np.int32),
    "exact": np.array([0.1, -1e300]),
    "strided": np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
}


def test_words() -> None:
    assert [num_words(array) for array in ARRAYS.values()] == [2, 4, 0, 2, 3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_place", [False, True])
def test_arrays_arrive_as_they_are(device: str, in_place: bool) -> None:
    into = torch.full((20,), 7, dtype=torch.int64, device=device) if in_place else None
    sent = upload(ARRAYS, torch.device(device), into=into)
    for name, array in ARRAYS.items():
        assert sent[name].device.type == device
        np.testing.assert_array_equal(sent[name].cpu().numpy(), array)
        assert sent[name].cpu().numpy().dtype == array.dtype
    if into is not None:
        assert into[11:].tolist() == [7] * 9
        assert sent["wide"].data_ptr() == into[2:].data_ptr()


def test_the_host_may_change_its_arrays_afterwards() -> None:
    array = np.arange(4, dtype=np.int64)
    sent = upload({"x": array}, torch.device("cpu"))["x"]
    array[:] = 0
    assert sent.tolist() == [0, 1, 2, 3]
