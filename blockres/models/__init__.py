"""Models on a Block AttnRes residual stream."""

from blockres.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
