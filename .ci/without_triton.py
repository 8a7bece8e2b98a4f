"""The installed package works on a CPU where Triton is missing, and says what is missing when a kernel is asked for."""

import importlib.util

import torch

import blockres
from blockres import ops


def complaint_about_kernels() -> str:
    try:
        ops.kernels()
    except RuntimeError as error:
        return str(error)
    return ""


assert importlib.util.find_spec("triton") is None
assert "site-packages" in blockres.__file__, blockres.__file__
query = torch.zeros(8, requires_grad=True)
sources = [torch.randn(3, 8) for _ in range(2)]
out = blockres.attn_res(sources, query)
out.sum().backward()
torch.testing.assert_close(out, (sources[0] + sources[1]) / 2)
assert "Install the version of triton" in complaint_about_kernels()
print(f"blockres {blockres.__version__} without Triton: fine")
