"""What the command trains: the built-in GPT, or a model of transformers of the same shape with random weights.

The shape is dim, layers, heads and the MLPs' inner width. Sizes differ: GPT-2's MLPs have two matrices instead of three
and it learns its positions, Mixtral has several MLPs in a layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from blockres.models import GPT, GPTConfig, PipelinePart, apply_attn_res, pipeline_part
from blockres.pipeline import BlockRouting
from blockres.training.config import TrainConfig

NUM_EXPERTS, EXPERTS_PER_TOKEN = 4, 2
ROUTER_LOSS = 0.02
"""The factor of the loss that balances experts, as in Mixtral 8x7B."""


def build_parts(config: TrainConfig, routing: BlockRouting, stages: Sequence[int], device: torch.device) -> list[Any]:
    """The modules of some stages; with the same flags on all ranks they are parts of one and the same model.

    The built-in model's initial values go by their names. A model of transformers is built whole, on the CPU and from
    the same seed on every rank, and what other ranks own of it is let go.
    """
    run = config.run
    if run.model == "gpt":
        return [_gpt_part(config, routing.sublayers(index), device) for index in stages]
    whole = random_model(
        run.model, config.model, sequence_length=config.data.sequence_length, dtype=config.dtype, seed=run.seed
    )
    parts = [pipeline_part(whole, routing, index, dtype=config.dtype).to(device) for index in stages]
    if run.activation_checkpointing:
        for part in parts:
            _checkpoint_activations(part)
    return parts


def random_model(
    family: str, shape: GPTConfig, *, sequence_length: int, dtype: torch.dtype, seed: int = 0
) -> nn.Module:
    """A whole Block AttnRes model of transformers, on the CPU, with random weights and no dropout.

    Args:
        family: gpt2, llama, qwen3 or mixtral.
        shape: as the built-in model's. GPT-2 has no key-value heads of their own and no rotary embeddings.
        sequence_length: the longest that GPT-2 has positions for.
        dtype: float64 for parameters of float64, else they are float32.
    """
    import transformers

    config = transformers.AutoConfig.for_model(family, **_settings(family, shape, sequence_length, dtype))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(torch.promote_types(dtype, torch.float32)).train()
    return apply_attn_res(model, shape.block, eps=shape.norm_eps)


def _settings(family: str, shape: GPTConfig, sequence_length: int, dtype: torch.dtype) -> dict[str, Any]:
    common = {"vocab_size": shape.vocab_size, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
    if family == "gpt2":
        sizes = {"n_embd": shape.dim, "n_layer": shape.num_layers, "n_head": shape.num_heads}
        inner = {"n_inner": shape.inner_dim, "n_positions": sequence_length, "layer_norm_epsilon": shape.norm_eps}
        return {**common, **sizes, **inner, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    experts = {
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "output_router_logits": True,
        "router_aux_loss_coef": ROUTER_LOSS,
        # The grouped matrix product takes no float64.
        **({"experts_implementation": "eager"} if dtype == torch.float64 else {}),
    }
    return {
        **common,
        "hidden_size": shape.dim,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.inner_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.norm_eps,
        **(experts if family == "mixtral" else {}),
    }


def _checkpoint_activations(part: PipelinePart) -> None:
    # Newer releases of transformers have it under this name, and warn of the other one.
    enable: Any = getattr(part, "activation_checkpointing_enable", part.gradient_checkpointing_enable)
    enable()


def _gpt_part(config: TrainConfig, sublayers: range, device: torch.device) -> GPT:
    part = GPT(
        config.model,
        sublayers.start,
        sublayers.stop,
        seed=config.run.seed,
        dtype=config.dtype,
        device=device,
        activation_checkpointing=config.run.activation_checkpointing,
    )
    if config.run.compile:
        for sublayer in part.sublayers.values():
            sublayer.compile()
    return part
