"""Generation under inference mode: equal tokens, one step a sublayer, memory that follows the chunk of a prefill."""

import inspect
import weakref
from collections import Counter

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockres.models import apply_attn_res
from tests.support.huggingface import causal_lm, disturb, tokens

WIDTH = 32
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def changed(family, sublayers_per_block=4):
    model = apply_attn_res(causal_lm(family), sublayers_per_block).double()
    disturb(model.base_model.attn_res)
    return model


def run(model, ids, cache):
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(ids, use_cache=True, **{keyword: cache}).logits


class Operations(TorchDispatchMode):
    """How often each of blockres' operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "blockres":
            self.ran[func._opname] += 1
        return func(*args, **(kwargs or {}))


class RowBytes(TorchDispatchMode):
    """The most bytes that tensors `[…, …, WIDTH]`, and the bank, of which these are slots, had alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[weakref.ref, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dim() >= 3 and tensor.shape[-1] == WIDTH:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = weakref.ref(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if entry[0]() is not None}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


@pytest.mark.parametrize("size", [1, 4, None])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "mixtral"])
def test_tokens_are_those_of_generation_outside_of_inference_mode(family, size):
    model, ids = changed(family, size), tokens(2, 11)
    expected = model.generate(ids, **GREEDY)
    with torch.inference_mode():
        assert torch.equal(model.generate(ids, **GREEDY), expected)
        assert torch.equal(model.generate(ids, prefill_chunk_size=4, **GREEDY), expected)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_decoding_takes_one_step_for_each_sublayer(family):
    model, ids = changed(family), tokens(2, 5)
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode(), Operations() as operations:
        run(model, ids, cache)
        prefilled = Counter(operations.ran)
        run(model, ids[:, :1], cache)
    assert prefilled == {"attn_res_step": 2 * 3 + 1}
    assert operations.ran == {"attn_res_step": 2 * (2 * 3 + 1)}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_recorded_hidden_states(size):
    """They are read when the stream has gone on already."""
    model, ids = changed("llama", size), tokens(2, 7)
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
    with torch.inference_mode():
        recorded = model(ids, output_hidden_states=True)
    assert len(recorded.hidden_states) == len(expected)
    torch.testing.assert_close(recorded.hidden_states, expected, rtol=1e-10, atol=1e-12)


def test_a_compiled_model_under_inference_mode():
    model, ids = changed("llama"), tokens(2, 7)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_chunks_by_hand(family):
    model, ids = changed(family), tokens(2, 23)
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        logits = [run(model, chunk, cache) for chunk in ids.split(5, dim=1)]
        torch.testing.assert_close(torch.cat(logits, 1), model(ids).logits, rtol=1e-9, atol=1e-10)


def peak_of_prefill(model, length, chunk):
    with torch.inference_mode(), RowBytes() as rows:
        model.generate(tokens(1, length), prefill_chunk_size=chunk, max_new_tokens=1, do_sample=False)
    return rows.peak


def test_a_chunk_bounds_the_memory_of_a_prefill():
    model = changed("llama", 2)
    row = WIDTH * 8  # bytes of a float64 row
    short, long = (peak_of_prefill(model, length, 6) for length in (18, 54))
    assert short == long
    assert long <= 6 * row * (4 + 8)  # a bank of four slots, and what a layer has in hand
    assert peak_of_prefill(model, 54, None) >= 8 * long
