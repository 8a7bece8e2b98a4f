"""The two implementations of every operation, as a parameter of its tests."""

import pytest
import torch

from blockres import ops


@pytest.fixture(params=["cpu", "kernels"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Runs a test over `blockres.cpu` and over the kernels: on the GPU where there is one, else interpreted.

    Returns the device for the test's tensors. To be interpreted, the kernels take the place of `blockres.cpu` in `ops`.
    """
    if request.param == "kernels":
        if torch.cuda.is_available():
            return torch.device("cuda")
        monkeypatch.setattr(ops, "cpu", ops.kernels())
    return torch.device("cpu")
