"""Tiny models of transformers with random weights, and a counter of what a forward keeps for its backward."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def config(family: str, **changes: Any) -> transformers.PretrainedConfig:
    """A configuration of 3 layers of width 32, without dropout."""
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
        ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2Config(**{**sizes, **ends, **still, **changes})
    by_loop = {"experts_implementation": "eager"}  # the grouped one takes no float64
    special: dict[str, Any] = {
        "llama": {},
        "mistral": {"sliding_window": 5},
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, **by_loop},
        "qwen2": {},
        "qwen3": {"head_dim": 8},
        "qwen3_moe": {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            **by_loop,
        },
        "olmo2": {},
        "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
    }
    return transformers.AutoConfig.for_model(family, **{**_SIZES, **special[family], **changes})


def causal_lm(family: str, device: torch.device | str = "cpu", **changes: Any) -> nn.Module:
    """A causal language model of that family on `device`, in evaluation mode, norms and biases not at their start."""
    model = transformers.AutoModelForCausalLM.from_config(config(family, **changes)).to(device).eval()
    disturb(model)
    return model


def disturb(module: nn.Module, scale: float = 0.3) -> None:
    """Move every vector, norms' and biases' and queries' alike, away from where it was initialised."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(scale * torch.randn_like(parameter))


def tokens(batch: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), device=device)
