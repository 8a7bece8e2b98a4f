"""Running kernels, and other packages' custom ops, on CPU tensors."""

import contextlib
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from bench.interpreted import KernelMode, _loop_range, _make_interpretable, configurations, peer


@torch.library.custom_op("blockres_bench_test::twice", mutates_args=(), device_types="cuda")
def twice(x: Tensor) -> Tensor:
    return 2 * x


def test_a_custom_op_for_another_device_runs_where_its_tensors_are():
    x = torch.ones(3)
    with pytest.raises(NotImplementedError):
        twice(x)
    with KernelMode():
        torch.testing.assert_close(twice(x), 2 * x)


def test_operations_inside_a_custom_op_are_seen():
    seen = []

    class Watching(KernelMode):
        def leaf(self, func, args, kwargs):
            seen.append(func._schema.name)
            return func(*args, **kwargs)

    with Watching():
        twice(torch.ones(3))
    assert seen[-1] == "aten::mul"


def test_loop_indices_are_numbers_that_take_a_dtype():
    (first, second) = _loop_range(1, 5, 2)
    assert [first, second] == [1, 3]
    assert (second * 4).to("int64") + 1 == 13
    assert ["a", "b"][first] == "b"


def test_implementations_without_kernels_are_left_alone():
    with peer("eager"):
        assert not torch.ones(1).is_cuda


@pytest.mark.parametrize(("configuration", "chosen"), [(0, "first"), (1, "second"), (5, "second")])
def test_a_kernel_that_would_choose_has_one_configuration_meanwhile(configuration, chosen):
    module = ModuleType("kernels")
    module.kernel = SimpleNamespace(configs=["first", "second"], fn=None)
    with contextlib.ExitStack() as stack:
        _make_interpretable(module, stack, configuration)
        assert module.kernel.configs == [chosen]
    assert module.kernel.configs == ["first", "second"]
    assert configurations("eager") == 1
