"""AdamW's groups, the learning rate, and clipping by the norm of all gradients."""

from itertools import pairwise

import pytest
import torch

from blockres.models.gpt import GPT, GPTConfig
from blockres.training.config import OptimizerFlags
from blockres.training.optim import clip, learning_rate, make_optimizer, set_learning_rate, squared_norm

FLAGS = OptimizerFlags(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=4)


def test_warm_up_is_linear_and_the_cosine_ends_at_the_minimum():
    rates = [learning_rate(step, 21, FLAGS) for step in range(21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[12] == pytest.approx(0.55)
    assert rates[20] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in pairwise(rates[4:]))


@pytest.mark.parametrize("steps", [1, 3, 4, 5])
def test_runs_no_longer_than_the_warm_up_have_a_rate(steps):
    assert all(0 < learning_rate(step, steps, FLAGS) <= 1 for step in range(steps))


def test_no_warm_up_starts_at_the_top():
    assert learning_rate(0, 10, OptimizerFlags(learning_rate=1.0, warmup_steps=0)) == 1.0


def test_vectors_do_not_decay_and_matrices_do():
    model = GPT(GPTConfig(dim=16, num_layers=1, num_heads=2, num_kv_heads=1))
    optimizer = make_optimizer([model], FLAGS)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        vector = name.endswith(("norm.weight", ".query", ".key_weight")) and "query.weight" not in name
        assert decay[id(parameter)] == (0.0 if vector else FLAGS.weight_decay), name
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_clipping_equals_torchs_own():
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in [(3, 4), (5,), (1,)]]
    for parameter in parameters:
        parameter.grad = 10 * torch.randn_like(parameter)
    gradients = [p.grad.clone() for p in parameters]
    norm = float(squared_norm(gradients, torch.device("cpu")).sqrt())
    clip(gradients, norm, 2.0)
    expected = torch.nn.utils.clip_grad_norm_(parameters, 2.0)
    assert norm == pytest.approx(float(expected), rel=1e-6)
    for gradient, parameter in zip(gradients, parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)


def test_short_gradients_are_left_alone():
    gradients = [torch.ones(4)]
    clip(gradients, 2.0, 2.0)
    assert torch.equal(gradients[0], torch.ones(4))
    assert squared_norm([], torch.device("cpu")) == 0
