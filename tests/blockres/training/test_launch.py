"""The agreement between ranks, played by threads that share one store."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from blockres.training import launch
from blockres.training.launch import Launch, choose_device, tell_launcher


def ranks(count: int) -> list[Launch]:
    store = dist.HashStore()
    return [Launch(rank, count, rank, count, store) for rank in range(count)]


def verdicts(facts: list[dict], problems: list[str | None]) -> list[str | None]:
    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(Launch.agree, ranks(len(facts)), facts, problems))


def test_equal_facts_are_agreed():
    assert verdicts([{"steps": 3, "cache": True, "mlp_dim": None}] * 3, [None] * 3) == [None] * 3


def test_every_rank_hears_which_facts_differ_and_where():
    facts = [{"steps": 3, "cache": True}, {"steps": 4, "cache": True}, {"steps": 3, "cache": True}]
    heard = verdicts(facts, [None] * 3)
    assert heard == ["the ranks were started differently:\n  steps: 3 on ranks 0, 2, 4 on rank 1"] * 3


def test_a_problem_of_one_rank_reaches_all_and_names_it():
    assert verdicts([{}] * 2, [None, "no file"]) == ["no file (on rank 1)"] * 2
    assert verdicts([{"a": 1}, {"a": 2}], ["no file", "no file"]) == ["no file"] * 2


def test_a_rank_that_never_reports_is_named():
    first, second, _ = ranks(3)
    with mock.patch.multiple(launch, START_UP_SECONDS=0.2, FAREWELL_SECONDS=0.1), ThreadPoolExecutor(2) as pool:
        heard = list(pool.map(lambda rank: rank.agree({}), (first, second)))
    assert heard == ["rank 2 has not reported within 0 s: it has ended, or hangs"] * 2
    with mock.patch.multiple(launch, START_UP_SECONDS=0.1, FAREWELL_SECONDS=0.1):
        assert "rank 0 has not compared" in ranks(2)[1].agree({})
        ranks(2)[0].farewell()


def test_the_launcher_finds_the_cause_where_it_looks(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    tell_launcher("no data")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert re.search(r"traceback : no data$", str(ChildFailedError("train", {0: failure})), re.M)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "absent" / "error.json"))
    tell_launcher("no data")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    tell_launcher("no data")


def test_without_torchrun_the_process_is_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    alone = Launch.find()
    assert (alone.rank, alone.world_size, alone.local_world_size) == (0, 1, 1)
    assert alone.agree({"steps": 1}) is None


def test_what_was_said_before_a_restart_is_not_heard(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 1)]))
    assert Launch.find().agree({"steps": 1}) is None
    assert Launch.find().store.check(["verdict"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not Launch.find().store.check(["verdict"])


def test_all_hear_what_each_has_to_say(monkeypatch):
    monkeypatch.setattr(dist, "barrier", threading.Barrier(3).wait)
    with ThreadPoolExecutor(3) as pool:
        heard = list(pool.map(lambda rank: rank.exchange("topic", {"rank": rank.rank}), ranks(3)))
    assert heard == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


@pytest.mark.parametrize(("name", "gpus", "expected"), [("cpu", 2, "cpu"), (None, 0, "cpu"), (None, 2, "cuda:1")])
def test_the_device_of_a_rank(name, gpus, expected):
    with mock.patch.multiple(torch.cuda, is_available=lambda: gpus > 0, device_count=lambda: gpus):
        assert choose_device(name, ranks(2)[1]) == torch.device(expected)


@pytest.mark.parametrize(
    ("name", "gpus", "message"),
    [
        (None, 1, r"2 processes on a machine with 1 GPU: .*--nproc-per-node 1.*--device cpu"),
        ("cuda", 0, "sees no GPU"),
    ],
)
def test_impossible_devices_get_the_way_out(name, gpus, message):
    cuda = mock.patch.multiple(torch.cuda, is_available=lambda: gpus > 0, device_count=lambda: gpus)
    with cuda, pytest.raises(ValueError, match=message):
        choose_device(name, ranks(2)[0])


COLLECTIVE_AT_THE_END = """
import sys, time
import torch, torch.distributed as dist
from blockres.training.launch import {name}

class Late:
    def __del__(self, all_reduce=dist.all_reduce, ones=torch.ones, now=time.monotonic):
        all_reduce(ones(1), async_op=True)
        end = now() + 0.5
        while now() < end:  # gloo's thread wants to free the tensor meanwhile
            pass

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
late = Late()
print("the end")
{name}(3)
"""


@pytest.mark.parametrize("name", ["end_process", "leave"])
def test_a_thread_of_gloo_does_not_abort_the_process_at_its_end(name):
    code = COLLECTIVE_AT_THE_END.format(name=name)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "the end\n"), ended.stderr


@pytest.mark.parametrize(("exit_code", "expected"), [(0, 120), (3, 3)])
def test_output_that_cannot_be_written_fails_a_run_and_hides_no_other_failure(exit_code, expected):
    code = f"""
import atexit, sys
from blockres.training.launch import end_process
atexit.register(print, "handlers run", file=sys.stderr)
print("lost")
end_process({exit_code})
"""
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=buffered)
    assert (ended.returncode, ended.stderr) == (expected, "handlers run\n")
