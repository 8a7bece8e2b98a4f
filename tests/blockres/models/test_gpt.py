"""The model: split equals unsplit, names and initial values do not depend on the split, gradients are the formula's."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from blockres.models.gpt import GPT, GPTConfig, _rotary_table, _rotate, next_token_loss, probe_depth

SMALL = {"vocab_size": 17, "dim": 24, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "sublayers_per_block": 4}
SPLITS = ([6], [3, 3], [1, 2, 3], [1, 1, 1, 1, 1, 1])  # blocks of 4: cuts inside a block, last block incomplete


def batch(config: GPTConfig, length: int = 9) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(config.vocab_size, (2, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def stages(config: GPTConfig, split: list[int], **kwargs) -> list[GPT]:
    return [GPT(config, start, stop, **kwargs) for start, stop in pairwise(accumulate(split, initial=0))]


def chain(parts: list[GPT], tokens: Tensor) -> Tensor:
    state = (tokens,)
    for part in parts:
        state = part(*state)
        state = state if isinstance(state, tuple) else (state,)
    return state[0]


def merged_gradients(parts: list[GPT]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            total[name] = total[name] + parameter.grad if name in total else parameter.grad
    return total


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("residual", ["block", "full", "standard"])
def test_every_split_has_the_unsplit_models_loss_and_gradients(residual, tied):
    config = GPTConfig(**SMALL, residual=residual, tie_weights=tied)
    tokens, targets = batch(config)
    whole = GPT(config, dtype=torch.float64)
    expected = next_token_loss(whole(tokens), targets)
    expected.backward()
    reference = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for split in SPLITS:
        parts = stages(config, split, dtype=torch.float64)
        loss = next_token_loss(chain(parts, tokens), targets)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        gradients = merged_gradients(parts)
        assert gradients.keys() == reference.keys()
        for name, gradient in gradients.items():
            error = (gradient - reference[name]).norm() / reference[name].norm().clamp_min(1e-30)
            assert error <= 1e-12, f"{name}, split {split}: {error:.1e}"


@pytest.mark.parametrize("residual", ["block", "full", "standard"])
def test_every_split_computes_the_same_under_inference_mode(residual):
    config = GPTConfig(**SMALL, residual=residual)
    tokens, _ = batch(config)
    expected = GPT(config, dtype=torch.float64)(tokens).detach()
    with torch.inference_mode():
        for split in SPLITS:
            logits = chain(stages(config, split, dtype=torch.float64), tokens)
            torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_state_dicts_of_the_stages_are_parts_of_the_unsplit_models(split, tied):
    config = GPTConfig(**SMALL, tie_weights=tied)
    whole = GPT(config, seed=3).state_dict()
    torch.manual_seed(1)  # initial values come from the names and the seed, not from the global generator
    united = {name: value for part in stages(config, split, seed=3) for name, value in part.state_dict().items()}
    assert united.keys() == whole.keys()
    for name, value in united.items():
        assert torch.equal(value, whole[name]), name


def test_the_seed_changes_matrices_and_no_vector():
    first, second = (GPT(GPTConfig(**SMALL), seed=seed) for seed in (0, 1))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)) == (parameter.ndim < 2), name


def test_queries_start_at_zero_and_all_sources_weigh_the_same():
    config = GPTConfig(**SMALL)
    seen: dict[int, Tensor] = {}
    whole = GPT(config)
    with probe_depth([whole], lambda index, weights: seen.update({index: weights})):
        whole(batch(config)[0])
    whole(batch(config)[0])
    assert [len(seen[index]) for index in range(7)] == [1, 2, 2, 2, 2, 3, 3]
    for weights in seen.values():
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / len(weights)))
    assert whole.depth_probe is None


def test_a_later_token_changes_no_earlier_logits():
    config = GPTConfig(**SMALL)
    whole = GPT(config)
    tokens, _ = batch(config)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % config.vocab_size
    torch.testing.assert_close(whole(tokens)[:, :-1], whole(changed)[:, :-1])
    assert not torch.allclose(whole(tokens)[:, -1], whole(changed)[:, -1])


def test_rotated_products_depend_on_the_distance_alone_and_lengths_are_kept():
    config = GPTConfig(**SMALL)
    table = _rotary_table(12, config, torch.float64, torch.device("cpu"))
    query, key = torch.randn(2, 1, 1, 1, config.head_dim, dtype=torch.float64).expand(-1, -1, -1, 12, -1)
    products = (_rotate(query, table) @ _rotate(key, table).mT)[0, 0]  # [T, T]
    for distance in range(-11, 12):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(products[0], products[0, :1].expand(12))
    torch.testing.assert_close(_rotate(query, table).norm(dim=-1), query.norm(dim=-1))


@pytest.mark.parametrize("residual", ["block", "full", "standard"])
def test_bfloat16_keeps_the_stream_in_bfloat16_and_parameters_in_float32(residual):
    config = GPTConfig(**SMALL, residual=residual)
    tokens, targets = batch(config)
    first, last = stages(config, [3, 3], dtype=torch.bfloat16)
    sources, partial = first(tokens)
    assert all(x.dtype == torch.bfloat16 for x in (*sources, partial) if x is not None)
    loss = next_token_loss(last(sources, partial), targets)
    loss.backward()
    exact = next_token_loss(chain(stages(config, [3, 3]), tokens), targets)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)
    for part in (first, last):
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in part.parameters())


def test_the_model_learns_to_repeat():
    config = GPTConfig(**SMALL)
    whole = GPT(config)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    tokens = torch.arange(20).remainder(5).expand(4, -1)
    for _ in range(40):
        loss = next_token_loss(whole(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    assert any(p.count_nonzero() for name, p in whole.named_parameters() if name.endswith(".query"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 20}, "even number"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"mlp_dim": 0}, "mlp_dim must be at least 1"),
        ({"residual": "none"}, "block, full, standard"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{**SMALL, **change})


def test_parts_without_sublayers_are_refused():
    with pytest.raises(ValueError, match="start < stop <= 6, got start=3, stop=3"):
        GPT(GPTConfig(**SMALL), 3, 3)


def test_activation_checkpointing_runs_sublayers_twice_and_changes_nothing():
    config = GPTConfig(**SMALL)
    tokens, targets = batch(config)
    runs = []

    def gradients(activation_checkpointing: bool) -> list[Tensor]:
        model = GPT(config, activation_checkpointing=activation_checkpointing)
        for index, sublayer in model.sublayers.items():
            sublayer.register_forward_pre_hook(lambda *_, index=index: runs.append(index))
        with torch.no_grad():
            model(tokens)
        loss = next_token_loss(model(tokens), targets)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = gradients(False)
    once = list(map(str, range(config.num_sublayers)))
    assert runs == once * 2
    runs.clear()
    for gradient, wanted in zip(gradients(True), expected, strict=True):
        assert torch.equal(gradient, wanted)
    assert runs == once * 2 + once[::-1]
