"""Corpora, the held-out split, and batches that depend on seed and step alone."""

import math

import numpy as np
import pytest
import torch

from blockres.training.data import Corpus, Split, load_corpus


def numbers(count: int) -> Corpus:
    return Corpus("numbers", "token", np.arange(count, dtype=np.uint16))


def test_the_default_text_is_prose_in_bytes():
    corpus = load_corpus(None, 256)
    assert corpus.unit == "byte"
    assert 400_000 < len(corpus.tokens) < 600_000
    assert b'The "assert" statement' in corpus.tokens.tobytes()
    assert corpus.digest() == load_corpus(None, 256).digest() != numbers(len(corpus.tokens)).digest()


def test_a_text_file_is_read_as_bytes(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("naïve")
    assert load_corpus(path, 256).tokens.tolist() == list("naïve".encode())


def test_a_bin_file_is_little_endian_uint16(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(bytes([1, 0, 0, 1, 255, 255]))
    corpus = load_corpus(path, 65536)
    assert (corpus.tokens.tolist(), corpus.unit) == ([1, 256, 65535], "token")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.txt", None, "does not exist: give a text file"),
        ("empty.txt", b"", "is empty"),
        ("odd.bin", b"abc", "has 3 bytes, an odd number"),
        ("large.bin", bytes([44, 1]), "token 300, the model knows 0 … 255: pass --vocab-size 301"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(path, 256)


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a directory"):
        load_corpus(tmp_path, 256)


def test_the_split_holds_out_the_end_and_batches_stay_on_their_side():
    split = Split.of(numbers(1000), 0.2, sequence_length=10, batch_size=4)
    assert (split.train[-1], split.validation[0], len(split.validation)) == (799, 800, 200)
    for step in range(50):
        inputs, targets = split.training_batch(seed=0, step=step)
        assert inputs.shape == targets.shape == (4, 10)
        assert inputs.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)
        assert targets.max() <= 799


def test_a_training_batch_depends_on_seed_and_step_alone():
    split = Split.of(numbers(5000), 0.2, sequence_length=10, batch_size=4)
    first = split.training_batch(seed=1, step=7)[0]
    split.training_batch(seed=1, step=8)
    assert torch.equal(first, split.training_batch(seed=1, step=7)[0])
    assert not torch.equal(first, split.training_batch(seed=1, step=8)[0])
    assert not torch.equal(first, split.training_batch(seed=2, step=7)[0])


def test_every_window_can_be_drawn_up_to_the_last():
    split = Split.of(numbers(40), 0.6, sequence_length=14, batch_size=1)
    starts = {int(split.training_batch(0, step)[0][0, 0]) for step in range(50)}
    assert starts == {0, 1}


def test_validation_batches_are_disjoint_and_in_order():
    split = Split.of(numbers(1000), 0.205, sequence_length=10, batch_size=4)
    assert split.num_validation_batches == 5
    inputs = torch.cat([split.validation_batch(index)[0] for index in range(5)])
    assert torch.equal(inputs.flatten(), torch.arange(795, 995))


def test_too_little_data_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"100 tokens: 80 to train on and 20 for validation.* batch 41"):
        Split.of(numbers(100), 0.2, sequence_length=10, batch_size=4)
    with pytest.raises(ValueError, match="One sequence needs 11"):
        Split.of(numbers(100), 0.9, sequence_length=10, batch_size=1)


def test_unigram_entropy_of_a_uniform_and_of_a_constant_text():
    uniform = Split.of(Corpus("u", "token", np.tile(np.arange(8, dtype=np.uint8), 4000)), 0.5, 4, 1)
    assert uniform.unigram_entropy() == pytest.approx(math.log(8), abs=1e-9)
    constant = Split.of(Corpus("c", "token", np.zeros(4000, dtype=np.uint8)), 0.5, 4, 1)
    assert constant.unigram_entropy() == pytest.approx(0, abs=1e-12)
