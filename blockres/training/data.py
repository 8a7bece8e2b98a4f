"""Text as tokens: where it comes from, its split, and batches that depend on nothing but seed and step."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Corpus:
    """Tokens and where they came from.

    Args:
        name: for messages.
        unit: what one token is, `byte` or `token`.
        tokens: one-dimensional array of unsigned integers, possibly mapped from a file.
    """

    name: str
    unit: str
    tokens: np.ndarray

    def digest(self) -> str:
        """A fingerprint of the length, the beginning and the end, quick for any size."""
        edges = self.tokens[: 1 << 20].tobytes() + self.tokens[-(1 << 20) :].tobytes()
        return hashlib.sha256(f"{len(self.tokens)}:".encode() + edges).hexdigest()


def load_corpus(path: Path | None, vocab_size: int) -> Corpus:
    """Read a text file as bytes, map a `.bin` file of little-endian uint16 tokens, or take Python's own help topics.

    Raises:
        ValueError: where there is no such file, it is empty or malformed, or it has tokens that the model lacks.
    """
    corpus = _builtin_topics() if path is None else _read(path)
    largest = int(corpus.tokens.max())
    if largest >= vocab_size:
        raise ValueError(
            f"{corpus.name} has token {largest}, the model knows 0 … {vocab_size - 1}: pass --vocab-size {largest + 1} "
            f"or more"
        )
    return corpus


def _builtin_topics() -> Corpus:
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return Corpus("pydoc_data.topics", "byte", np.frombuffer(text.encode(), dtype=np.uint8))


def _read(path: Path) -> Corpus:
    if not path.is_file():
        kind = "is a directory" if path.is_dir() else "does not exist"
        raise ValueError(f"--data {path} {kind}: give a text file, or a .bin file of uint16 tokens")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"--data {path} is empty")
    if path.suffix != ".bin":
        return Corpus(path.name, "byte", np.memmap(path, dtype=np.uint8, mode="r"))
    if size % 2:
        raise ValueError(f"--data {path} has {size} bytes, an odd number: a .bin file holds uint16 tokens")
    return Corpus(path.name, "token", np.memmap(path, dtype="<u2", mode="r"))


@dataclass(frozen=True)
class Split:
    """A corpus' training tokens, and its last ones held out for validation.

    Letters: B sequences of a batch, T tokens of a sequence.
    """

    train: np.ndarray
    validation: np.ndarray
    sequence_length: int
    batch_size: int

    @classmethod
    def of(cls, corpus: Corpus, fraction: float, sequence_length: int, batch_size: int) -> "Split":
        """Hold out the last `fraction`.

        Raises:
            ValueError: where the training part is shorter than a sequence, or the validation part than a batch.
        """
        held_out = int(len(corpus.tokens) * fraction)
        split = cls(
            corpus.tokens[: len(corpus.tokens) - held_out],
            corpus.tokens[len(corpus.tokens) - held_out :],
            sequence_length,
            batch_size,
        )
        if len(split.train) <= sequence_length or split.num_validation_batches < 1:
            raise ValueError(
                f"{corpus.name} has {len(corpus.tokens):,} {corpus.unit}s: {len(split.train):,} to train on and "
                f"{held_out:,} for validation. One sequence needs {sequence_length + 1:,} and one validation batch "
                f"{batch_size * sequence_length + 1:,}: use more data, a lower --batch-size or --sequence-length, "
                f"or a higher --validation-fraction"
            )
        return split

    def training_batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets `[B, T]` (int64) of a step: random windows that depend on `seed` and `step` alone."""
        generator = np.random.default_rng((seed, step))
        starts = generator.integers(len(self.train) - self.sequence_length, size=self.batch_size)
        return self._windows(self.train, starts)

    @property
    def num_validation_batches(self) -> int:
        return max(0, len(self.validation) - 1) // (self.sequence_length * self.batch_size)

    def validation_batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets `[B, T]` of the `index`-th run of consecutive, disjoint windows."""
        rows = np.arange(index * self.batch_size, (index + 1) * self.batch_size)
        return self._windows(self.validation, rows * self.sequence_length)

    def unigram_entropy(self) -> float:
        """Cross-entropy in nats per token of the validation part under the training part's token frequencies.

        What a model reaches that knows how often each token occurs and nothing else. Each token counts as seen once
        more than it was.
        """
        size = 1 + max(int(self.train.max()), int(self.validation.max()))
        counts = _frequencies(self.train, size) + 1
        present = _frequencies(self.validation, size) / len(self.validation)
        return float(-(present * np.log(counts / counts.sum())).sum())

    def _windows(self, tokens: np.ndarray, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = np.stack([tokens[start : start + self.sequence_length + 1] for start in starts])
        windows = torch.from_numpy(rows.astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _frequencies(tokens: np.ndarray, size: int) -> np.ndarray:
    chunk = 1 << 24  # bincount widens what it is given to int64
    counts = np.zeros(size, dtype=np.int64)
    for start in range(0, len(tokens), chunk):
        counts += np.bincount(tokens[start : start + chunk], minlength=size)
    return counts
