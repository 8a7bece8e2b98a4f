"""What a run tells while it runs."""

import io
import sys

from blockres.training.journal import Journal


def test_what_is_said_reaches_a_file_at_once(tmp_path, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    journal = Journal(tmp_path / "metrics.jsonl", steps=1, speaks=True)
    journal.say("evaluating")
    assert b"evaluating" in written.getvalue()
    journal.close()
