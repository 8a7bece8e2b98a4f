"""What a run tells while it runs."""

import io
import sys

import pytest

from blockres.training import journal as module
from blockres.training.journal import Journal, counted


def test_what_is_said_reaches_a_file_at_once(tmp_path, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    journal = Journal(tmp_path / "metrics.jsonl", steps=1, speaks=True)
    journal.say("evaluating")
    assert b"evaluating" in written.getvalue()
    journal.close()


@pytest.mark.parametrize(("silence", "lines"), [(0.0, 2), (1000.0, 0)])
def test_away_from_a_terminal_steps_are_told_after_a_silence(tmp_path, monkeypatch, capsys, silence, lines):
    monkeypatch.setattr(module, "SECONDS_OF_SILENCE", silence)
    journal = Journal(tmp_path / "metrics.jsonl", steps=2, speaks=True)
    for step in (1, 2):
        journal.step(step, 1.5, tokens=10, seconds=2.0)
    journal.close()
    assert capsys.readouterr().out.count("of 2: loss 1.500, 5 tokens/s\n") == lines


def test_a_rank_that_does_not_speak_tells_no_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "SECONDS_OF_SILENCE", 0.0)
    Journal(tmp_path / "metrics.jsonl", steps=2, speaks=False).step(1, 1.5, tokens=10, seconds=2.0)
    assert not capsys.readouterr().out


def test_one_is_singular():
    assert [counted(n, "unit") for n in (0, 1, 2000)] == ["0 units", "1 unit", "2,000 units"]
    assert counted(2, "process", "processes") == "2 processes"
