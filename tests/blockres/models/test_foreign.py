"""Other people's Attention Residuals: their formulas, written out, against the functions that take their place."""

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from blockres import BlockAttnRes
from blockres.models import (
    Replaced,
    fused_attnres,
    kimi_k3_attn_res,
    liger_attn_res,
    replace_attn_res,
    restore_attn_res,
)
from tests.support.numerics import assert_rounded_once, correlated_sources, relative_error

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
WIDE = torch.float64


def formula(
    sources: list[Tensor], key: Tensor, eps: float, scale: float = 1.0, gain: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What all of them compute: scores by the normalised sources, a softmax over depth, the mean that it weighs."""
    values = torch.stack(sources, -2)
    normalised = values / (values.square().mean(-1, keepdim=True) + eps).sqrt()
    weights = ((normalised * key).sum(-1) * scale).softmax(-1)
    mixed = (weights[..., None] * values).sum(-2)
    if gain is not None:
        mixed = gain * mixed / (mixed.square().mean(-1, keepdim=True) + eps).sqrt()
    return mixed, weights


def query(width: int, device: str) -> Tensor:
    """Scores of order one: where the softmax is all but hard, float32 has nothing to compute a gradient from."""
    return (torch.randn(width) / width**0.5).to(device)


def key_weight(width: int, device: str) -> Tensor:
    return (1 + 0.3 * torch.randn(width)).to(device)


def agree(function: Callable, expected: Callable, tensors: dict[str, Tensor], bound: float = 2e-6) -> None:
    """Outputs and all gradients of `function` against `expected` on the same tensors in float64."""
    narrow = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    wide = {name: tensor.detach().to(WIDE).requires_grad_() for name, tensor in tensors.items()}
    out, exact = function(**narrow), expected(**wide)
    if out.dtype in (torch.bfloat16, torch.float16):
        assert_rounded_once(out.detach(), exact.detach())
    else:
        assert relative_error(out, exact) <= bound
    upstream = torch.randn(exact.shape, dtype=WIDE).to(out.device, out.dtype)
    found = torch.autograd.grad(out, list(narrow.values()), upstream)
    wanted = torch.autograd.grad(exact, list(wide.values()), upstream.to(WIDE))
    for name, actual, grad in zip(tensors, found, wanted, strict=True):
        is_source = tensors[name].ndim > 1 and tensors[name].dtype != torch.float32
        assert relative_error(actual, grad) <= (4e-3 if is_source else bound), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("slots", "lead", "width"), [(1, (7,), 96), (8, (5,), 100), (2, (2, 3), 33)])
def test_kimi_k3(slots, lead, width, dtype, device):
    """The bank `[..., NB, H]` is a part of a larger one, so that its slots have strides of their own."""
    sources = correlated_sources(slots + 3, (*lead, width), 3.0, dtype, device)
    bank = torch.stack(sources[:-1], -2)[..., 1 : slots + 1, :]
    tensors = {
        "prefix": sources[-1],
        "bank": bank,
        "projection": query(width, device)[None],
        "weight": key_weight(width, device),
    }

    def ours(prefix, bank, projection, weight):
        norm = SimpleNamespace(weight=weight, variance_epsilon=1e-5)
        return kimi_k3_attn_res(prefix, bank, SimpleNamespace(weight=projection), norm)

    def theirs(prefix, bank, projection, weight):
        return formula([*bank.unbind(-2), prefix], projection[0] * weight, 1e-5)[0]

    agree(ours, theirs, tensors)


def test_kimi_k3_before_the_first_block_is_complete():
    prefix, bank = torch.randn(5, 8), torch.empty(5, 0, 8)
    proj, norm = nn.Linear(8, 1, bias=False), nn.RMSNorm(8, eps=1e-6)
    out = kimi_k3_attn_res(prefix, bank, proj, norm)
    assert torch.equal(out, prefix)
    out.sum().backward()
    assert torch.equal(proj.weight.grad, torch.zeros_like(proj.weight))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("output_norm", [False, True])
@pytest.mark.parametrize(("count", "query_shape"), [(1, (96,)), (9, (96, 1)), (2, (1, 96))])
def test_flash_linear_attention(count, query_shape, output_norm, dtype, device):
    sources = correlated_sources(count, (2, 7, 96), 3.0, dtype, device)
    tensors = {f"source{j}": source for j, source in enumerate(sources)}
    tensors |= {"query": query(96, device).reshape(query_shape), "weight": key_weight(96, device)}
    if output_norm:
        tensors["gain"] = torch.randn(96, device=device)

    def ours(query, weight, gain=None, **sources):
        return fused_attnres(query, list(sources.values()), weight, gain, rms_eps=1e-5, scale=0.7)

    def theirs(query, weight, gain=None, **sources):
        return formula(list(sources.values()), query.flatten() * weight, 1e-5, 0.7, gain)[0]

    if count == 1:  # one source: the softmax is constant, and what rounding leaves of its gradients is set to zero
        assert relative_error(ours(**tensors), theirs(**{n: t.to(WIDE) for n, t in tensors.items()})) <= 4e-3
        return
    agree(ours, theirs, tensors, 4e-6 if output_norm else 2e-6)


def test_flash_linear_attentions_weights_and_checkpoint_levels():
    sources = torch.randn(3, 2, 7, 96)
    query, weight = torch.randn(96), torch.randn(96)
    mixed, weights = fused_attnres(query, sources, weight, return_weights=True, checkpoint_level=0)
    expected, shares = formula(list(sources.to(WIDE)), (query * weight).to(WIDE), 1e-6)
    assert relative_error(mixed, expected) <= 2e-6
    assert relative_error(weights, shares.movedim(-1, 0)) <= 2e-6
    with pytest.raises(ValueError, match="checkpoint_level must be 0 or 1, got 2"):
        fused_attnres(query, sources, weight, checkpoint_level=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 2, 3, 100), (2, 1, 7, 64), (3, 2, 0, 8)])
def test_liger(shape, dtype, device):
    stacked = torch.stack(correlated_sources(shape[0], shape[1:], 3.0, dtype, device))
    tensors = {"V": stacked, "w_query": query(shape[-1], device), "w_norm": key_weight(shape[-1], device)}

    def theirs(V, w_query, w_norm):
        return formula(list(V), w_query * w_norm, 1e-6)[0]

    if 0 in shape:
        assert liger_attn_res(**tensors).shape == shape[1:]
        return
    agree(liger_attn_res, theirs, tensors)
    as_list = liger_attn_res(list(stacked), tensors["w_query"], tensors["w_norm"])
    assert torch.equal(as_list, liger_attn_res(**tensors))


def test_the_names_and_orders_of_arguments_are_theirs():
    assert str(inspect.signature(fused_attnres)).count("=") == 5
    assert list(inspect.signature(fused_attnres).parameters) == [
        "query",
        "residuals",
        "rms_weight",
        "output_rms_weight",
        "rms_eps",
        "scale",
        "return_weights",
        "checkpoint_level",
    ]
    assert list(inspect.signature(liger_attn_res).parameters) == ["V", "w_query", "w_norm", "eps"]
    assert list(inspect.signature(kimi_k3_attn_res).parameters) == ["prefix_sum", "block_residual", "proj", "norm"]


# Models in the manner of each library, with the function that they aggregate by as a global of this module.


def _apply_attn_res(prefix_sum, block_residual, proj, norm):
    mixed, _ = formula(
        [*block_residual.unbind(1), prefix_sum], norm.weight * proj.weight.squeeze(0), norm.variance_epsilon
    )
    return mixed


class KeyNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(width) + 0.5), 1e-6


class KimiLayer(nn.Module):
    """Kimi K3's order of events: the sum of a finished block is read once as the prefix before it enters the bank."""

    def __init__(self, width: int, index: int, layers_per_block: int) -> None:
        super().__init__()
        self.opens_block = index % layers_per_block == 0
        self.self_attn, self.mlp = nn.Linear(width, width), nn.Linear(width, width)
        self.self_attention_res_proj, self.mlp_res_proj = (nn.Linear(width, 1, bias=False) for _ in range(2))
        self.self_attention_res_norm, self.mlp_res_norm = KeyNorm(width), KeyNorm(width)

    def _forward_attn_residual(self, prefix: Tensor | None, bank: Tensor) -> tuple[Tensor, Tensor]:
        h = prefix
        if bank.shape[1] > 0:
            h = _apply_attn_res(prefix, bank, self.self_attention_res_proj, self.self_attention_res_norm)
        if self.opens_block:
            bank, prefix = torch.cat([bank, prefix.unsqueeze(1)], dim=1), None
        update = self.self_attn(h).tanh()
        prefix = update if prefix is None else prefix + update
        h = _apply_attn_res(prefix, bank, self.mlp_res_proj, self.mlp_res_norm)
        return prefix + self.mlp(h).tanh(), bank

    def forward(self, prefix: Tensor, bank: Tensor) -> tuple[Tensor, Tensor]:
        return self._forward_attn_residual(prefix, bank)


class KimiModel(nn.Module):
    def __init__(self, width: int = 12, layers: int = 5, layers_per_block: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(KimiLayer(width, index, layers_per_block) for index in range(layers))
        self.output_attn_res_proj, self.output_attn_res_norm = nn.Linear(width, 1, bias=False), KeyNorm(width)

    def _apply_output_attn_res(self, prefix: Tensor, bank: Tensor) -> Tensor:
        return _apply_attn_res(prefix, bank, self.output_attn_res_proj, self.output_attn_res_norm)

    def forward(self, embedding: Tensor) -> Tensor:
        prefix, bank = embedding, embedding.new_zeros(embedding.shape[0], 0, embedding.shape[1])
        for layer in self.layers:
            prefix, bank = layer(prefix, bank)
        return self._apply_output_attn_res(prefix, bank)


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    parameters = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    return {"out": out.detach(), "in": x.grad, **parameters}


def assert_alike(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-12) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert relative_error(actual[name], expected[name]) <= bound, name


def test_a_model_like_kimi_k3_is_routed_here_and_back():
    model, x = KimiModel().double(), torch.randn(7, 12, dtype=WIDE)
    twin, names, kind = copy.deepcopy(model), list(model.state_dict()), type(model.layers[0])
    expected = gradients(model, x)
    replaced = replace_attn_res(model)
    assert Replaced("layers.3", "_forward_attn_residual", "Kimi K3") in replaced
    assert Replaced("", "_apply_output_attn_res", "Kimi K3") in replaced
    assert len(replaced) == 6
    assert list(model.state_dict()) == names
    with torch.profiler.profile() as profile:
        assert_alike(gradients(model, x), expected)
    assert any(event.key == "blockres::attn_res_forward" for event in profile.key_averages())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_alike(gradients(copied, x), expected)
    assert_alike(gradients(twin, x), expected, 0.0)
    with pytest.raises(ValueError, match="no layer"):
        replace_attn_res(model)
    restore_attn_res(model)
    assert type(model.layers[0]) is kind
    assert_alike(gradients(model, x), expected, 0.0)


def test_kimi_k3s_blocks_are_ours_of_twice_as_many_sublayers():
    """K3 counts layers and reads a block's sum before it enters the bank; the streams are the same all the same."""
    model, x = KimiModel(layers=5, layers_per_block=2), torch.randn(7, 12)
    residual = BlockAttnRes(12, num_sublayers=10, sublayers_per_block=4)
    branches = []
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            pairs = [
                (layer.self_attention_res_proj, layer.self_attention_res_norm),
                (layer.mlp_res_proj, layer.mlp_res_norm),
            ]
            for offset, (proj, norm) in enumerate(pairs):
                own = residual.aggregations[str(2 * index + offset)]
                own.query.copy_(proj.weight[0])
                own.key_weight.copy_(norm.weight)
            branches += [layer.self_attn, layer.mlp]
        last = residual.aggregations["10"]
        last.query.copy_(model.output_attn_res_proj.weight[0])
        last.key_weight.copy_(model.output_attn_res_norm.weight)
        ours = residual(x, [lambda h, f=f: f(h).tanh() for f in branches])
        assert relative_error(ours, model(x)) <= 2e-6


def test_routed_layers_compile():
    model, x = KimiModel(layers=3).double(), torch.randn(7, 12, dtype=WIDE)
    expected = gradients(model, x)
    replace_attn_res(model)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.code))
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):
        assert_alike(gradients(compiled, x), prefixed(expected))
    assert len(graphs) == 1
    assert "blockres" in graphs[0]


def prefixed(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name if name in ("in", "out") else f"_orig_mod.{name}": value for name, value in found.items()}


FLASH_LAYER = """
class FlashLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key_norm = nn.Linear(12, 1, bias=False), nn.RMSNorm(12)

    def forward(self, x):
        return fused_attnres(query=self.query.weight, residuals=[x, x.sin()], rms_weight=self.key_norm.weight)
"""
LIGER_LAYER = """
class LigerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_query, self.w_norm, self.eps = nn.Parameter(torch.randn(12)), nn.Parameter(torch.rand(12)), 1e-6

    def forward(self, x):
        return LigerAttnResFunction.apply(torch.stack([x, x.sin()]), self.w_query, self.w_norm, self.eps)
"""
DECORATED_KIMI_LAYER = """
class KimiLayer(nn.Module):
    @decorate
    def forward(self, prefix, bank):
        return _apply_attn_res(prefix, bank, self.proj, self.norm)
"""


def layer_from(source: str, **names: object) -> nn.Module:
    """A layer of a module of its own, where foreign functions have their library's names."""
    scope = {"__name__": __name__, "nn": nn, "torch": torch, "decorate": lambda method: method, **names}
    exec(source, scope)
    [kind] = [entry for name, entry in scope.items() if name.endswith("Layer")]
    return kind()


def flash(
    query,
    residuals,
    rms_weight,
    output_rms_weight=None,
    rms_eps=1e-6,
    scale=1.0,
    return_weights=False,
    checkpoint_level=1,
):
    return formula(residuals, query.flatten() * rms_weight, rms_eps, scale, output_rms_weight)[0]


class Liger:
    @staticmethod
    def apply(V, w_query, w_norm, eps):
        return formula(list(V), w_query * w_norm, eps)[0]


def test_layers_like_flash_linear_attentions_and_ligers():
    """Under the names that those libraries give them; the real functions want a GPU."""
    model = nn.Sequential(
        layer_from(FLASH_LAYER, fused_attnres=flash), layer_from(LIGER_LAYER, LigerAttnResFunction=Liger)
    ).double()
    x = torch.randn(5, 12, dtype=WIDE)
    expected = gradients(model, x)
    assert [found.owner for found in replace_attn_res(model)] == ["flash-linear-attention", "Liger-Kernel"]
    assert_alike(gradients(model, x), expected)


INDIRECT_LAYER = """
class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key_norm = nn.Linear(12, 1, bias=False), nn.RMSNorm(12)

    def forward(self, x):
        return self.mix([x, x.sin()], self.query.weight, self.key_norm.weight)

def helper(sources, query, weight):
    return fused_attnres(query, sources, weight)

def without_wraps(method):
    return lambda *arguments: method(*arguments)

class IndirectLayer(Base):
"""
ROUTED = {
    "a static method": """
    @staticmethod
    def mix(sources, query, weight):
        return fused_attnres(query, sources, weight)
""",
    "a class method": """
    @classmethod
    def mix(cls, sources, query, weight):
        return fused_attnres(query, sources, weight)
""",
    "a property": """
    @property
    def mix(self):
        return lambda sources, query, weight: fused_attnres(query, sources, weight)
""",
    "a property's setter": """
    @property
    def last(self):
        return self.__dict__.pop("mixed")

    @last.setter
    def last(self, arguments):
        self.mixed = fused_attnres(*arguments)

    def mix(self, sources, query, weight):
        self.last = query, sources, weight
        return self.last
""",
    "a function of the module as a static method": """
    mix = staticmethod(helper)
""",
}
REFUSED = {
    "the class's name": """
    @staticmethod
    def blend(sources, query, weight):
        return fused_attnres(query, sources, weight)

    def mix(self, *arguments):
        return IndirectLayer.blend(*arguments)
""",
    "a function": """
    def mix(self, *arguments):
        return helper(*arguments)
""",
    "the function itself": """
    blend = staticmethod(fused_attnres)

    def mix(self, sources, query, weight):
        return self.blend(query, sources, weight)
""",
    "another name": """
    def mix(self, sources, query, weight):
        return alias(query, sources, weight)
""",
    "a cached property": """
    @functools.cached_property
    def mix(self):
        return lambda sources, query, weight: fused_attnres(query, sources, weight)
""",
    "a partial method": """
    def blend(self, sources, query, weight, *, scale):
        return fused_attnres(query, sources, weight, scale=scale)

    mix = functools.partialmethod(blend, scale=0.5)
    del blend
""",
    "a decorated static method": """
    @staticmethod
    @functools.cache
    def mix(sources, query, weight):
        return fused_attnres(query, sources, weight)
""",
    "a decorator that hides it": """
    @without_wraps
    def mix(self, sources, query, weight):
        return fused_attnres(query, sources, weight)
""",
    "super()": """
    def mix(self, *arguments):
        return super().mix(*arguments)

Base.mix = lambda self, sources, query, weight: fused_attnres(query, sources, weight)
""",
}


def indirect_layer(body: str) -> tuple[nn.Module, list]:
    """A layer whose `mix` is `body`, and a list that grows with every call of the foreign function."""
    calls = []

    @functools.wraps(flash)
    def fused_attnres(*arguments, **named):
        calls.append(arguments)
        return flash(*arguments, **named)

    fused_attnres.__qualname__ = "fused_attnres"
    del fused_attnres.__wrapped__
    fused_attnres.__signature__ = inspect.signature(flash)
    names = {"functools": functools, "fused_attnres": fused_attnres, "alias": fused_attnres}
    return layer_from(INDIRECT_LAYER + body, **names).double(), calls


@pytest.mark.parametrize("body", ROUTED.values(), ids=ROUTED)
def test_calls_that_are_not_in_plain_methods_are_routed(body):
    layer, calls = indirect_layer(body)
    model = nn.Sequential(layer_from(FLASH_LAYER, fused_attnres=flash), layer).double()
    x = torch.randn(5, 12, dtype=WIDE)
    expected = gradients(model, x)
    assert len(calls) == 1
    assert [found.module for found in replace_attn_res(model)] == ["0", "1"]
    for routed in (model, copy.deepcopy(model)):
        assert_alike(gradients(routed, x), expected)
    assert len(calls) == 1
    assert_alike(gradients(restore_attn_res(model), x), expected, 0.0)
    assert len(calls) == 2


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_calls_that_cannot_be_routed_are_errors(body):
    """Not layers that go on calling the foreign function while another is reported as routed."""
    model = nn.Sequential(layer_from(FLASH_LAYER, fused_attnres=flash), indirect_layer(body)[0])
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"IndirectLayer.* fused_attnres .*cannot be replaced for one instance"):
        replace_attn_res(model)
    assert [type(module) for module in model.modules()] == kinds


def test_a_function_of_ours_under_another_name_is_no_foreign_one():
    body = """
    def mix(self, sources, query, weight):
        return ours(query, sources, weight)
"""
    layer = layer_from(INDIRECT_LAYER + body, fused_attnres=fused_attnres, ours=fused_attnres)
    with pytest.raises(ValueError, match="no layer of IndirectLayer calls"):
        replace_attn_res(layer)


def test_wrapped_layers_keep_their_wrapper():
    """As FSDP2 wraps: by a subclass of the class that a layer has."""
    layer = layer_from(FLASH_LAYER, fused_attnres=flash)
    replace_attn_res(layer)
    routed = type(layer)
    layer.__class__ = type("Wrapped", (routed,), {})
    with pytest.raises(ValueError, match="wrapped since"):
        restore_attn_res(layer)
    layer.__class__ = routed
    restore_attn_res(layer)
    assert type(layer) is routed.__mro__[3]


def test_no_such_layer():
    with pytest.raises(ValueError, match=r"no layer of Linear calls .*_apply_attn_res.*apply_attn_res"):
        replace_attn_res(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="no layer of Linear has been routed"):
        restore_attn_res(nn.Linear(3, 3))


def test_a_function_of_that_name_with_another_formula():
    def _apply_attn_res(prefix_sum, block_residual, proj, norm):
        return formula([*block_residual.unbind(1), prefix_sum], norm.weight * proj.weight[0], 1e-5, scale=0.5)[0]

    with pytest.raises(ValueError, match="another formula than Kimi K3's: off by"):
        replace_attn_res(layer_from(DECORATED_KIMI_LAYER, _apply_attn_res=_apply_attn_res))


def test_a_function_of_that_name_with_other_arguments():
    def _apply_attn_res(prefix_sum, block_residual, proj, norm, return_probs=False):
        raise AssertionError("never called")

    with pytest.raises(ValueError, match="return_probs"):
        replace_attn_res(layer_from(DECORATED_KIMI_LAYER, _apply_attn_res=_apply_attn_res))


def test_a_call_that_cannot_be_reached():
    def decorate(method):
        def wrapped(*args):
            return method(*args)

        wrapped.__wrapped__ = method
        return wrapped

    with pytest.raises(ValueError, match="inside a decorator"):
        replace_attn_res(layer_from(DECORATED_KIMI_LAYER, _apply_attn_res=_apply_attn_res, decorate=decorate))
    with pytest.raises(ValueError, match="no global name"):
        replace_attn_res(layer_from(DECORATED_KIMI_LAYER, _apply_attn_res=None))
