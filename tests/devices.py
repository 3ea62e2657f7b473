"""Where kernel tests run: always on the CPU, and on a GPU where there is one."""

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
