"""What a run tells: a line of JSON for every step and evaluation, a progress bar, the closing lines."""

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

SECONDS_OF_SILENCE = 20.0
"""After so many a step is told in a line, where no progress bar is shown."""


class Journal:
    """Writes `metrics.jsonl` and shows progress; made on every rank, and silent on all but the one that has the loss.

    Args:
        path: of the metrics.
        steps: of the whole run.
        speaks: whether this is the rank that has the loss.
        done: steps done already. What the file has of them is kept, but for an evaluation after the last of them, which
            comes again; a file that is there is replaced where none are done.
    """

    def __init__(self, path: Path, steps: int, speaks: bool, done: int = 0) -> None:
        self.path = path
        self.training: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self._bar = tqdm(total=steps, initial=done, unit="step", disable=None if speaks else True, dynamic_ncols=True)
        self._steps, self._last_said = steps, time.monotonic()
        self._file: TextIO | None = None
        if speaks:
            earlier = [record for record in _read(path) if _is_before(record, done)] if done else []
            self._file = path.open("w")
            for record in earlier:
                self._note(record)

    def step(self, step: int, loss: float, tokens: int, seconds: float, **more: float) -> None:
        """Note a step, numbered from 1, of so many tokens and seconds."""
        self._note({"step": step, "loss": loss, "tokens_per_second": tokens / seconds, **more, "time": time.time()})
        how = f"loss {loss:.3f}, {tokens / seconds:,.0f} tokens/s"
        self._bar.set_postfix_str(how, refresh=False)
        self._bar.update()
        if self._bar.disable and time.monotonic() - self._last_said >= SECONDS_OF_SILENCE:
            self.say(f"step {step} of {self._steps}: {how}")

    def evaluation(self, step: int, loss: float) -> None:
        """Note a validation loss after so many steps."""
        self._note({"step": step, "validation_loss": loss, "time": time.time()})
        self.say(f"step {step}: validation loss {loss:.4f}")

    def say(self, text: str) -> None:
        """Print on the rank that has the loss, above the progress bar."""
        if self._file is not None:
            self._last_said = time.monotonic()
            self._bar.write(text)
            sys.stdout.flush()  # into a file as well, where minutes may pass until the next line

    def close(self) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.close()

    def _note(self, record: dict[str, float]) -> None:
        if "loss" in record:
            self.training.append((int(record["step"]), record["loss"]))
        else:
            self.validation.append((int(record["step"]), record["validation_loss"]))
        if self._file is not None:
            # JSON has no NaN.
            finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()


def _read(path: Path) -> Iterator[dict[str, float]]:
    """The records of a metrics file, up to one that a sudden end has cut off."""
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            return
        yield {name: math.nan if value is None else value for name, value in record.items()}


def _is_before(record: dict[str, float], step: int) -> bool:
    """Whether a run that goes on after `step` steps will not write this record again."""
    return record["step"] < step or (record["step"] == step and "loss" in record)


def closing_lines(facts: dict[str, str]) -> str:
    """The facts as aligned lines."""
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())


def counted(count: int, one: str, more: str | None = None) -> str:
    """As in `1 stage`, `2 stages`; `more` is the plural, by default with an s."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
