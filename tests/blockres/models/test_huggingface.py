"""Block AttnRes in Hugging Face models: against the formula in float64, and with all that such a model is used for."""

import copy
import inspect
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from bench.live import LiveStorages
from blockres import reference
from blockres.models import FAMILIES, Family, Sublayer, apply_attn_res, from_pretrained, remove_attn_res
from tests.support.distributed import run_all_well
from tests.support.huggingface import causal_lm, config, disturb, tokens
from tests.support.numerics import relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_:FutureWarning")

MAIN = ["gpt2", "llama", "qwen3", "mixtral"]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
OWN = {
    "olmo2": Family(
        layers="layers",
        final_norm="norm",
        sublayers=(
            Sublayer("self_attn", norm=None, post_norm="post_attention_layernorm", takes_arguments=True),
            Sublayer("mlp", norm=None, post_norm="post_feedforward_layernorm"),
        ),
        norm_eps="variance_epsilon",
    ),
    "gemma2": Family(
        layers="layers",
        final_norm="norm",
        sublayers=(
            Sublayer("self_attn", "input_layernorm", "post_attention_layernorm", takes_arguments=True),
            Sublayer("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ),
    ),
}


def changed(name: str, sublayers_per_block: int | None = 4, device: str = "cpu", **changes) -> nn.Module:
    """A tiny Block AttnRes model whose aggregations are away from their initial values."""
    model = causal_lm(name, device, **changes)
    apply_attn_res(model, sublayers_per_block, family=OWN.get(name))
    disturb(model.base_model.attn_res)
    return model


def gradients(model: nn.Module, ids: Tensor, **arguments) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False, **arguments)
    out.loss.backward()
    return out.logits.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert actual.keys() == expected.keys()
    assert_small({name: relative_error(actual[name], expected[name]) for name in expected}, bound)


def assert_small(errors: dict[str, float], bound: float) -> None:
    """NaN is not small; it is neither the largest nor anything else that `max` would find."""
    large = {name: error for name, error in errors.items() if not error <= bound}
    assert not large, f"off by more than {bound:.2g}: {large}"


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1.1])
def test_wrong_gradients_are_noticed(value, position):
    expected = {name: torch.ones(4) for name in "abc"}
    actual = {name: grad.clone() for name, grad in expected.items()}
    assert_same_gradients(actual, expected, 2e-6)
    actual["abc"[position]][1] = value
    with pytest.raises(AssertionError, match="off by"):
        assert_same_gradients(actual, expected, 2e-6)


class Textbook:
    """The formula over a model's own sublayers: every aggregation anew over stacked sources, every norm written out.

    It knows the model by what its standard forward hands to the sublayers, not by a description of its family.
    """

    def __init__(self, standard: nn.Module, model: nn.Module) -> None:
        self.standard, self.residual = standard, model.base_model.attn_res
        decoder = standard.base_model
        self.layers = decoder.h if hasattr(decoder, "h") else decoder.layers
        self.final_norm = decoder.ln_f if hasattr(decoder, "ln_f") else decoder.norm

    def run(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits, and what every aggregation gives before a norm."""
        embedding, handed = self._record(ids)
        done, partial, mixed = [embedding], None, []
        for index, (norm, branch) in enumerate(self._branches(handed)):
            mixed.append(self._aggregate(index, done, partial))
            update = branch(self._normalised(norm, mixed[-1]))
            partial = update if partial is None else partial + update
            if (index + 1) % self.residual.sublayers_per_block == 0:
                done, partial = [*done, partial], None
        mixed.append(self._aggregate(index + 1, done, partial))
        return self.standard.lm_head(self._normalised(self.final_norm, mixed[-1])), mixed

    def _aggregate(self, index: int, done: list[Tensor], partial: Tensor | None) -> Tensor:
        own = self.residual.aggregations[str(index)]
        sources = done if partial is None else [*done, partial]
        return reference.attn_res(sources, own.query, own.key_weight, eps=own.eps)

    def _record(self, ids: Tensor) -> tuple[Tensor, list[dict]]:
        first, handed = [], []
        hooks = [self.layers[0].register_forward_pre_hook(lambda _, args: first.append(args[0]))]
        for layer in self.layers:
            attention = layer.attn if hasattr(layer, "attn") else layer.self_attn
            hooks.append(
                attention.register_forward_pre_hook(lambda _, args, given: handed.append(given), with_kwargs=True)
            )
        self.standard(ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        return first[0], [{name: given[name] for name in given if name != "hidden_states"} for given in handed]

    def _branches(self, handed: list[dict]) -> Iterator[tuple[nn.Module, object]]:
        for layer, given in zip(self.layers, handed, strict=True):
            if hasattr(layer, "attn"):
                yield layer.ln_1, lambda x, layer=layer, given=given: layer.attn(x, **given)[0]
                yield layer.ln_2, layer.mlp
            else:
                yield layer.input_layernorm, lambda x, layer=layer, given=given: layer.self_attn(x, **given)[0]
                yield layer.post_attention_layernorm, layer.mlp

    @staticmethod
    def _normalised(norm: nn.Module, x: Tensor) -> Tensor:
        if isinstance(norm, nn.LayerNorm):
            return norm(x)
        return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "sublayers_per_block"), [("gpt2", 4), ("llama", 1), ("llama", 3), ("qwen3", 4), ("mixtral", 2)]
)
def test_logits_and_gradients_are_the_formulas(family, sublayers_per_block, device):
    """In float64; what families compute in float32 (rotations, routers, Qwen's norms of heads) leaves 1e-7."""
    standard = causal_lm(family, device).double()
    model = apply_attn_res(copy.deepcopy(standard), sublayers_per_block)
    disturb(model.base_model.attn_res)
    ids = tokens(2, 9, device)
    logits, actual = gradients(model, ids)
    textbook = Textbook(standard, model)
    model.base_model.attn_res.zero_grad()
    expected, _ = textbook.run(ids)
    assert relative_error(logits, expected) <= 1e-6
    standard.loss_function(expected, ids, vocab_size=standard.config.vocab_size).backward()
    parameters = {**dict(standard.named_parameters())}
    prefix = f"{standard.base_model_prefix}.attn_res"
    parameters |= {f"{prefix}.{name}": p for name, p in textbook.residual.named_parameters()}
    assert_same_gradients(actual, {name: p.grad for name, p in parameters.items()}, 2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", [*FAMILIES, *OWN])
def test_the_standard_residual_is_the_model_itself(family, device):
    """With sublayers_per_block=None the same machinery runs the plain sum: nothing of the wiring is lost or doubled."""
    model = causal_lm(family, device)
    ids, mask = tokens(2, 9, device), torch.ones(2, 9, dtype=torch.long, device=device)
    mask[0, :4] = 0
    with torch.no_grad():
        before = model(ids, attention_mask=mask, labels=ids)
        apply_attn_res(model, None, family=OWN.get(family))
        after = model(ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(after.logits, before.logits, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(after.loss, before.loss)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_removing_gives_the_model_back_and_touches_nothing_else(family):
    shared = config(family)
    model, other = (transformers.AutoModelForCausalLM.from_config(shared).eval() for _ in range(2))
    kinds = [type(module) for module in model.modules()]
    forwards = {kind: kind.forward for kind in kinds}
    names = list(model.state_dict())
    ids = tokens(2, 7)
    with torch.no_grad():
        before, elsewhere = model(ids).logits, other(ids).logits
        apply_attn_res(model, 2)
        assert not torch.equal(model(ids).logits, before)
        assert torch.equal(other(ids).logits, elsewhere)
        remove_attn_res(model)
        assert torch.equal(model(ids).logits, before)
    assert [type(module) for module in model.modules()] == kinds
    assert {kind: kind.forward for kind in kinds} == forwards
    assert list(model.state_dict()) == names
    assert not hasattr(shared, "attn_res")
    assert not hasattr(model.config, "attn_res")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", [*MAIN, "mistral", "olmo2"])
def test_generation_with_the_cache_equals_recomputing(family, device):
    model = changed(family, device=device).double()  # in float32 two tokens may come close enough to change places
    ids, mask = tokens(2, 9, device), torch.ones(2, 9, dtype=torch.long, device=device)
    mask[0, :4] = 0
    settings = {
        "attention_mask": mask,
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    cached = model.generate(ids, **settings)
    again = model.generate(ids, use_cache=False, **settings)
    assert torch.equal(cached.sequences, again.sequences)
    for step, (one, other) in enumerate(zip(cached.logits, again.logits, strict=True)):
        assert relative_error(one, other) <= 1e-6, f"at step {step}"


@pytest.mark.parametrize("family", MAIN)
def test_decoding_given_tokens_step_by_step(family):
    """A prompt in two pieces, then token by token, against all tokens at once."""
    model = changed(family).double()
    ids = tokens(2, 12)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache, logits = transformers.DynamicCache(config=model.config), []
    with torch.no_grad():
        for piece in ids.split([5, 3, 1, 1, 1, 1], dim=1):
            logits.append(model(piece, use_cache=True, **{keyword: cache}).logits)
        assert relative_error(torch.cat(logits, 1), model(ids).logits) <= 1e-6


def test_generation_with_a_static_cache():
    model = changed("llama").double()
    ids = tokens(2, 9)
    settings = {"max_new_tokens": 6, "do_sample": False}
    static = model.generate(ids, cache_implementation="static", disable_compile=True, **settings)
    assert torch.equal(static, model.generate(ids, **settings))


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_activation_checkpointing_saves_memory_and_keeps_gradients(family):
    """Storages as large as a sublayer's input, counted while the loss is alive: hooks would shadow each other."""
    model = changed(family).train()
    ids = tokens(2, 9)
    kept, found = {}, {}
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        for model.base_model.attn_res.recompute in (False, True):
            case = checkpointing, model.base_model.attn_res.recompute
            kept[case] = storages_for_backward(model, ids)
            _, found[case] = gradients(model, ids)
            assert_same_gradients(found[case], found[False, False], 2e-6)
    assert kept[True, True] <= kept[True, False] < kept[False, False] / 2


def storages_for_backward(model: nn.Module, ids: Tensor) -> int:
    of_a_sublayer = ids.numel() * model.get_input_embeddings().weight[0].nbytes
    with LiveStorages(lambda tensor: tensor.untyped_storage().nbytes() >= of_a_sublayer) as live:
        loss = model(ids, labels=ids, use_cache=False).loss
        count = live.count()
    assert loss.requires_grad
    return count


def test_reentrant_checkpointing_is_refused():
    model = changed("llama").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant"):
        model(tokens(2, 5))


@pytest.mark.parametrize(
    ("family", "checkpointing", "changes"),
    [
        ("gpt2", False, {"n_layer": 2}),
        ("llama", True, {"num_hidden_layers": 2}),
        ("qwen3", False, {"num_hidden_layers": 1}),
        ("mixtral", False, {"num_hidden_layers": 1, "experts_implementation": "batched_mm"}),
    ],
)
def test_compiled_whole(family, checkpointing, changes):
    """The body without the head's loss, where transformers logs and so breaks the graph of some models by itself."""
    model = changed(family, 3, **changes).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = tokens(2, 9)
    expected = run_body(model, model.base_model, ids)
    torch._dynamo.reset()
    actual = run_body(model, torch.compile(model.base_model, fullgraph=True, backend="aot_eager"), ids)
    assert_same_gradients(actual, expected, 2e-6)


def run_body(model: nn.Module, body: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out = body(ids, use_cache=False).last_hidden_state
    out.square().mean().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.base_model.named_parameters()}
    return {"output": out.detach(), **found}


@pytest.mark.parametrize("family", MAIN)
def test_bfloat16(family):
    model = changed(family)
    ids = tokens(2, 9)
    expected, _ = gradients(model, ids)
    narrow = copy.deepcopy(model).bfloat16()
    logits, found = gradients(narrow, ids)
    assert logits.dtype == torch.bfloat16
    assert all(grad.dtype == torch.bfloat16 and grad.isfinite().all() for grad in found.values())
    assert relative_error(logits, expected) <= 4e-2


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_autocast(family):
    """Parameters and residual in float32, attentions and MLPs in bfloat16."""
    model = changed(family)
    ids = tokens(2, 9)
    expected, _ = gradients(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits, found = gradients(model, ids)
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in found.values())
    assert relative_error(logits, expected) <= 4e-2


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_router_losses_stay(family):
    model = changed(family, output_router_logits=True, router_aux_loss_coef=0.5)
    ids = tokens(2, 9)
    out = model(ids, labels=ids)
    assert len(out.router_logits) == 3
    plain = model(ids, labels=ids, output_router_logits=False)
    torch.testing.assert_close(out.loss, plain.loss + 0.5 * out.aux_loss)
    out.aux_loss.backward()
    assert all(layer.mlp.gate.weight.grad.norm() > 0 for layer in model.model.layers)


def test_recorded_hidden_states_and_attentions():
    standard = causal_lm("llama", attn_implementation="eager")
    model = apply_attn_res(copy.deepcopy(standard), 4)
    disturb(model.base_model.attn_res)
    ids = tokens(2, 9)
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, output_attentions=True)
        as_tuple = model(ids, output_hidden_states=True, return_dict=False)
        _, mixed = Textbook(standard, model).run(ids)
        body = model.model(ids).last_hidden_state
    assert [attention.shape for attention in out.attentions] == [(2, 4, 9, 9)] * 3
    for recorded in (out.hidden_states, as_tuple[-1]):
        for layer, hidden in enumerate(recorded[:-1]):
            assert relative_error(hidden, mixed[2 * layer]) <= 2e-6, f"before layer {layer}"
        assert torch.equal(recorded[-1], body)


@pytest.mark.parametrize("family", MAIN)
def test_saved_and_loaded(family, tmp_path):
    model = changed(family, 3)
    ids = tokens(2, 9)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config.attn_res == model.config.attn_res
    assert loaded.base_model.attn_res.sublayers_per_block == 3
    with torch.no_grad():
        assert relative_error(loaded(ids).logits, model(ids).logits) <= 1e-6  # experts may run another way
        bare = from_pretrained(tmp_path, type(remove_attn_res(copy.deepcopy(model)).base_model))
        assert relative_error(bare(ids).last_hidden_state, model.base_model(ids).last_hidden_state) <= 1e-6
        narrow = from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert narrow(ids).logits.dtype == narrow.base_model.attn_res.aggregations["0"].query.dtype == torch.bfloat16
        restored = remove_attn_res(loaded)
        assert relative_error(restored(ids).logits, remove_attn_res(copy.deepcopy(model))(ids).logits) <= 1e-6


def test_what_transformers_itself_makes_of_a_saved_model(tmp_path):
    model = changed("llama")
    model.save_pretrained(tmp_path)
    plain, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert all(".attn_res." in key for key in info["unexpected_keys"])
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, remove_attn_res(model)(ids).logits)
    with pytest.raises(ValueError, match="from_pretrained"):
        apply_attn_res(plain, 4)


def test_a_described_family_is_saved_with_its_description(tmp_path):
    model = changed("gemma2")
    model.save_pretrained(tmp_path)
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_loading_what_is_no_block_attn_res_model(tmp_path):
    causal_lm("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="apply_attn_res"):
        from_pretrained(tmp_path)


def test_copies_and_pickles():
    model = changed("mixtral")
    ids = tokens(2, 9)
    with torch.no_grad():
        expected = model(ids).logits
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(ids).logits, expected)
            twin.base_model.attn_res.aggregations["3"].query.add_(1.0)
            assert not torch.equal(twin(ids).logits, expected)
            remove_attn_res(twin)
        assert torch.equal(model(ids).logits, expected)


def test_zero_queries_average():
    """At the start every source weighs the same: the output state is the mean of embedding and blocks."""
    standard = causal_lm("llama")
    model = apply_attn_res(copy.deepcopy(standard), 3)
    ids = tokens(2, 9)
    with torch.no_grad():
        logits = model(ids).logits
        _, mixed = Textbook(standard, model).run(ids)
        assert relative_error(mixed[0], standard.model.embed_tokens(ids)) <= 1e-6
        expected = standard.lm_head(standard.model.norm(mixed[-1]))
    assert relative_error(logits, expected) <= 2e-6


def sharded_against_whole(rank: int) -> Iterator[dict[str, float]]:
    torch.manual_seed(0)
    model = changed("llama").train()
    model.gradient_checkpointing_enable()
    ids = tokens(4, 9)
    _, expected = gradients(model, ids)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    mine = ids.chunk(dist.get_world_size())[rank]
    _, found = gradients(model, mine)
    whole = {name: grad.full_tensor() for name, grad in found.items()}
    yield {name: relative_error(whole[name], expected[name]) for name in expected}


@pytest.mark.filterwarnings("ignore:.*view tensor.*:UserWarning")
def test_sharded_layer_by_layer():
    for [errors] in run_all_well(2, sharded_against_whole):
        assert_small(errors, 5e-6)


def test_an_unknown_family():
    with pytest.raises(ValueError, match=r"olmo2.*gpt2, llama, mistral"):
        apply_attn_res(causal_lm("olmo2"), 4)


@pytest.mark.parametrize(
    ("name", "family", "message"),
    [
        ("llama", Family("blocks", "norm", FAMILIES["llama"].sublayers), "blocks"),
        ("llama", Family("layers", "norm", (Sublayer("self_attn", "ln_1"),)), "ln_1"),
        ("llama", Family("layers", "norm", FAMILIES["llama"].sublayers[:1]), "mlp, post_attention_layernorm"),
        ("llama", Family("layers", "norm", FAMILIES["llama"].sublayers, norm_eps="eps"), "norm_eps"),
        ("gpt2", Family("h", "ln_f", FAMILIES["gpt2"].sublayers, norm_eps="eps"), "not the RMSNorm"),
    ],
)
def test_descriptions_that_do_not_fit(name, family, message):
    model = causal_lm(name)
    with pytest.raises(ValueError, match=message):
        apply_attn_res(model, 4, family=family)
    assert not hasattr(model.base_model, "attn_res")


def test_cross_attention_is_refused():
    with pytest.raises(ValueError, match="crossattention"):
        apply_attn_res(causal_lm("gpt2", add_cross_attention=True), 4)
    model = changed("gpt2")
    with pytest.raises(ValueError, match="encoder_hidden_states"):
        model(tokens(1, 5), encoder_hidden_states=torch.randn(1, 3, 32))


def test_misuse():
    with pytest.raises(ValueError, match="PreTrainedModel"):
        apply_attn_res(nn.Linear(3, 3), 4)
    with pytest.raises(ValueError, match="no Block AttnRes model"):
        remove_attn_res(causal_lm("llama"))
    with pytest.raises(ValueError, match="already"):
        apply_attn_res(changed("llama"), 2)
    with pytest.raises(ValueError, match="sublayers_per_block must be at least 1"):
        apply_attn_res(causal_lm("llama"), 0)


def test_hooks_on_a_norm_are_run():
    model, ids = changed("llama"), tokens(1, 5)
    before, seen = model(ids).logits, []
    norm = model.model.layers[1].post_attention_layernorm
    handle = norm.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    torch.testing.assert_close(model(ids).logits, before)
    ((read, normed),) = seen
    handle.remove()
    assert torch.equal(norm(read), normed)
    norm.register_full_backward_hook(lambda _, inputs, outputs: seen.append(outputs[0].shape))
    model(ids).logits.sum().backward()
    assert seen[1:] == [normed.shape]


def test_layers_that_were_taken_away_since_are_missed():
    model = changed("llama", 2)
    model.model.layers = model.model.layers[:-1]
    with pytest.raises(ValueError, match=r"has \d+ sublayers now, and aggregations for \d+: call remove_attn_res"):
        model(tokens(1, 5))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sublayers_per_block": 2.5}, TypeError, "sublayers_per_block must be an integer, got 2.5"),
        ({"sublayers_per_block": True}, TypeError, "sublayers_per_block must be an integer, got True"),
        ({"sublayers_per_block": 0}, ValueError, "at least 1"),
        (
            {"sublayers_per_block": 2, "family": "llama"},
            TypeError,
            r"blockres.models.Family, got 'llama'.*\(gpt2, llama.*\) needs none",
        ),
    ],
)
def test_what_is_refused_changes_nothing(arguments, error, message):
    model = causal_lm("llama")
    config, kinds = model.config, [type(module) for module in model.modules()]
    names = list(vars(config))
    with pytest.raises(error, match=message):
        apply_attn_res(model, **arguments)
    assert model.config is model.model.config is config
    assert list(vars(config)) == names
    assert [type(module) for module in model.modules()] == kinds
