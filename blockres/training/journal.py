"""What a run tells: a line of JSON for every step and evaluation, a progress bar, the closing lines."""

import json
import math
import time
from pathlib import Path
from typing import TextIO

from tqdm import tqdm


class Journal:
    """Writes `metrics.jsonl` and shows progress; made on every rank, and silent on all but the one that has the loss.

    Args:
        path: of the metrics; a file that is already there is replaced.
        steps: of the whole run.
        speaks: whether this is the rank that has the loss.
    """

    def __init__(self, path: Path, steps: int, speaks: bool) -> None:
        self.path = path
        self._file: TextIO | None = path.open("w") if speaks else None
        self._bar = tqdm(total=steps, unit="step", disable=None if speaks else True, dynamic_ncols=True)
        self.training: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []

    def step(self, step: int, loss: float, tokens: int, seconds: float, **more: float) -> None:
        """Note a step, numbered from 1, of so many tokens and seconds."""
        self.training.append((step, loss))
        self._write(step=step, loss=loss, tokens_per_second=tokens / seconds, **more)
        self._bar.set_postfix_str(f"loss {loss:.3f}, {tokens / seconds:,.0f} tokens/s", refresh=False)
        self._bar.update()

    def evaluation(self, step: int, loss: float) -> None:
        """Note a validation loss after so many steps."""
        self.validation.append((step, loss))
        self._write(step=step, validation_loss=loss)
        self.say(f"step {step}: validation loss {loss:.4f}")

    def say(self, text: str) -> None:
        """Print on the rank that has the loss, above the progress bar."""
        if self._file is not None:
            self._bar.write(text)

    def close(self) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.close()

    def _write(self, **record: float) -> None:
        if self._file is not None:
            # JSON has no NaN.
            finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
            self._file.write(json.dumps({**finite, "time": time.time()}) + "\n")
            self._file.flush()


def closing_lines(facts: dict[str, str]) -> str:
    """The facts as aligned lines."""
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
