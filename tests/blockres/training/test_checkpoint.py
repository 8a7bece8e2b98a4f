"""Checkpoints: what is in them, what is refused, and that one which is not complete is not there."""

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockres.models.gpt import GPT
from blockres.training import checkpoint, export, run
from blockres.training.checkpoint import MANIFEST, Checkpoint, FileRecord
from blockres.training.trainer import Trainer
from tests.support.command import EXACT, after, exit_code, losses, metrics, refusals, run_alone

SHARD = "shard-00001-model-00001-of-00001.safetensors"
FLAGS = [*EXACT, "--checkpoint-interval", "2"]


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The directory of a run of 4 steps with checkpoints after 2 and 4."""
    out = tmp_path_factory.mktemp("finished")
    run_alone(out, *FLAGS)
    return out


@pytest.fixture
def halfway(finished, tmp_path) -> Path:
    """A copy of the checkpoint after 2 steps, to be damaged."""
    return Path(shutil.copytree(finished / "step-000002", tmp_path / "step-000002"))


def edit_manifest(path: Path, change: Callable[[dict], object]) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


def shrink(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


# What is in one.


def test_everything_has_the_name_that_it_has_in_the_unsplit_model(tmp_path):
    run_alone(tmp_path, "--virtual-stages", "4", "--tie-weights", "--steps", "1")
    tensors = load_file(tmp_path / "step-000001" / SHARD)
    names = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    unsplit = export.load_model(exported(tmp_path))
    assert names == dict(unsplit.named_parameters()).keys()
    optimizer = {f"optimizer.{name}.{slot}" for name in names for slot in ("step", "exp_avg", "exp_avg_sq")}
    assert tensors.keys() == {f"model.{name}" for name in names} | optimizer | {"random.0.cpu"}
    assert {path.name for path in (tmp_path / "step-000001").iterdir()} == {SHARD, MANIFEST}


def test_a_run_that_goes_on_is_the_same_to_the_last_bit(finished, halfway, tmp_path):
    resumed = run_alone(tmp_path / "out", *FLAGS, "--resume", str(halfway))
    assert losses(resumed) == losses(after(2, metrics(finished)))
    whole, continued = (load_file(out / "step-000004" / SHARD) for out in (finished, tmp_path / "out"))
    assert whole.keys() == continued.keys()
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_the_newest_is_found_and_the_metrics_go_on_where_it_was_written(finished, tmp_path, capsys):
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    shutil.rmtree(out / "step-000004")
    (out / ".unfinished-step-000004").mkdir()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # where the run was killed
    assert losses(run_alone(out, *FLAGS, "--resume", "--num-microbatches", "2")) == pytest.approx(
        losses(metrics(finished)), rel=1e-10
    )
    said = capsys.readouterr().out
    assert (
        f"going on after step 2 from {out / 'step-000002'}, with other settings: --num-microbatches 2 (there 4)" in said
    )
    assert not (out / ".unfinished-step-000004").exists()
    assert not (out / "earlier").exists()


def test_the_directory_of_another_run_stands_for_its_newest(halfway, tmp_path, capsys):
    run_alone(tmp_path / "out", *FLAGS, "--resume", str(tmp_path))
    assert f"going on after step 2 from {halfway}" in capsys.readouterr().out


def test_going_back_sets_later_checkpoints_aside(finished, tmp_path):
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    run_alone(out, *FLAGS, "--resume", str(out / "step-000002"), "--learning-rate", "2e-3")
    assert [path.name for path in (out / "earlier" / "1").iterdir()] == ["step-000004"]
    assert [record["step"] for record in metrics(out)] == [0, 1, 2, 2, 3, 4, 4]


def test_resuming_where_nothing_is_begins_and_says_so(tmp_path, capsys):
    assert len(run_alone(tmp_path, "--steps", "1", "--resume")) == 3
    assert f"{tmp_path} has no checkpoint yet: beginning at step 0" in capsys.readouterr().out


def test_only_the_newest_stay(tmp_path):
    run_alone(tmp_path, "--checkpoint-interval", "1", "--keep-checkpoints", "2")
    assert [path.name for path in checkpoint.in_order(tmp_path)] == ["step-000003", "step-000004"]
    assert not list(tmp_path.glob(".unfinished*"))


def test_random_states_come_back(halfway, tmp_path):
    states = {}

    def note_and_disturb(trainer, step, *_):
        states.setdefault(step, []).append(torch.get_rng_state())
        torch.rand(step + 1)
        return real(trainer, step)

    real = Trainer.train_step
    with mock.patch.object(Trainer, "train_step", note_and_disturb):
        run_alone(tmp_path / "a", *FLAGS)
        run_alone(tmp_path / "b", *FLAGS, "--resume", str(tmp_path / "a" / "step-000002"))
    assert [len(states[step]) for step in range(4)] == [1, 1, 2, 2]
    assert torch.equal(*states[2])
    assert torch.equal(*states[3])
    assert not torch.equal(states[0][0], states[2][0])


def test_nothing_is_unpickled(halfway, tmp_path):
    refuse = AssertionError("a pickle")
    with (
        mock.patch.object(pickle, "load", side_effect=refuse),
        mock.patch.object(pickle, "loads", side_effect=refuse),
        mock.patch.object(pickle, "Unpickler", side_effect=refuse),
        mock.patch.object(torch, "load", side_effect=refuse),
    ):
        run_alone(tmp_path / "out", *FLAGS, "--resume", str(halfway))


# What is refused.


def tamper_with_a_name(path: Path) -> None:
    edit_manifest(path, lambda m: m["files"].update({f"../{SHARD}": m["files"].pop(SHARD)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: shrink(path / SHARD, 100), f"{SHARD} has .* bytes, it was written with "),
        (lambda path: flip_a_bit(path / SHARD), f"{SHARD} has other contents than were written"),
        (lambda path: (path / SHARD).unlink(), f"{SHARD} is missing"),
        (lambda path: (path / "shard-2.safetensors").touch(), "shard-2.safetensors does not belong here"),
        (lambda path: (path / MANIFEST).unlink(), f"step-000002 has no {MANIFEST}, so it is no checkpoint"),
        (lambda path: shrink(path / MANIFEST, 100), f"{MANIFEST} cannot be read as JSON: "),
        (lambda path: (path / MANIFEST).write_bytes(b"\x80\x04\x95"), f"{MANIFEST} cannot be read as JSON: "),
        (lambda path: (path / MANIFEST).write_text("[]"), f"{MANIFEST} is of another format: expected 'blockres "),
        (lambda path: edit_manifest(path, lambda m: m.pop("step")), f"{MANIFEST} is damaged: KeyError 'step'"),
        (lambda path: edit_manifest(path, lambda m: m.update(files=[1])), f"{MANIFEST} is damaged: "),
        (tamper_with_a_name, f"{MANIFEST} is damaged: .*a file name with a path"),
        (shutil.rmtree, "step-000002 is no directory, so no checkpoint"),
    ],
    ids=[
        "truncated", "bit", "missing", "surplus", "no-manifest", "half-a-manifest", "pickle", "foreign", "no-step",
        "no-files", "path", "absent",
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_one_is_refused_by_every_rank(halfway, tmp_path, capsys, damage, message):
    damage(halfway)
    same = ["--out", str(tmp_path / "out"), *FLAGS, "--resume", str(halfway)]
    refused = refusals(capsys, same, same)
    assert re.search(message, refused, re.S), refused


def test_another_model_is_refused_with_both_values(halfway, tmp_path, capsys):
    same = ["--out", str(tmp_path / "out"), *FLAGS, "--resume", str(halfway), "--num-layers", "6", "--no-tie-weights"]
    refused = refusals(capsys, same, same)
    assert f"{halfway} is of another model: --num-layers 6 (there 4), --tie-weights false (there true)" in refused


def test_another_kind_of_model_is_refused_like_another_size(halfway, tmp_path, capsys):
    edit_manifest(halfway, lambda m: m["settings"].update({"--model": "llama"}))
    same = ["--out", str(tmp_path / "out"), *FLAGS, "--resume", str(halfway)]
    assert f"{halfway} is of another model: --model gpt (there llama)" in refusals(capsys, same, same)
    edit_manifest(halfway, lambda m: m["settings"].pop("--model"))
    run_alone(tmp_path / "out", *FLAGS, "--resume", str(halfway))


def test_a_run_that_is_over_is_refused(finished, capsys):
    same = ["--out", str(finished), *FLAGS, "--resume"]
    refused = refusals(capsys, same, same)
    assert "step-000004 has all of --steps 4 behind it; to train on, give a higher number" in refused


def test_a_tensor_that_was_taken_out_is_missed(halfway, tmp_path, capsys):
    tensors = load_file(halfway / SHARD)
    del tensors["optimizer.norm.weight.exp_avg"]
    save_file(tensors, halfway / SHARD)
    record = FileRecord.of(halfway / SHARD)
    edit_manifest(halfway, lambda m: m["files"].update({SHARD: {"size": record.size, "sha256": record.sha256}}))
    assert exit_code(tmp_path / "out", *FLAGS, "--resume", str(halfway)) == 1
    assert f"blockres.train, rank 0: {halfway} cannot be loaded: Missing key" in capsys.readouterr().err


def test_what_is_there_stays_in_its_place_where_the_run_cannot_begin(finished, tmp_path):
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    before = {path.name for path in out.iterdir()}
    with mock.patch.object(run, "Trainer", side_effect=RuntimeError("no memory")), pytest.raises(AssertionError):
        exit_code(out, *FLAGS)
    torch.distributed.destroy_process_group()
    assert {path.name for path in out.iterdir()} == before


# Complete or absent.


@pytest.mark.parametrize(
    "place", ["os.fsync", "blockres.training.checkpoint.Checkpoint.write_manifest", "pathlib.Path.rename"]
)
def test_a_failure_at_any_point_leaves_the_earlier_one_and_a_message(halfway, tmp_path, capsys, place):
    no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch(place, side_effect=no_space):
        assert exit_code(tmp_path, *FLAGS, "--resume") == 1
    said = capsys.readouterr().err
    assert "step-000004 cannot be written. " in said
    assert "No space left on device" in said
    assert "step 4" not in said.split("cannot be written")[0]
    assert checkpoint.newest(tmp_path) == halfway
    assert not list(tmp_path.glob(".unfinished*"))
    assert [record["step"] for record in run_alone(tmp_path, *FLAGS, "--resume")] == [2, 3, 4, 4]


def test_parts_on_another_disk_are_missed(tmp_path):
    path = tmp_path / "step-000001"
    files = checkpoint.write_part(path, 0, {"a": torch.ones(2)}) | {"shard-00002-elsewhere": FileRecord(1, "")}
    with pytest.raises(OSError, match=r"rank 0 does not see what another rank wrote: .*shard-00002-elsewhere"):
        checkpoint.finish(Checkpoint(path, 1, {}, 2, files))
    assert not path.exists()


# The whole model in one file.


def exported(run: Path) -> Path:
    file = run / "model.safetensors"
    with mock.patch("sys.argv", ["export", str(run), str(file)]):
        export.main()
    return file


def test_an_export_is_the_unsplit_model(finished, tmp_path):
    file = exported(finished)
    model = export.load_model(file)
    assert isinstance(model, GPT)
    assert (model.start, model.stop, model.dtype) == (0, 8, torch.float64)
    tensors = load_file(finished / "step-000004" / SHARD)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[f"model.{name}"]), name
    assert load_file(file).keys() == dict(model.named_parameters()).keys()
    file.unlink()


def test_an_export_says_what_it_wrote_and_replaces_nothing(finished, tmp_path, capsys):
    file = tmp_path / "model.safetensors"
    with mock.patch("sys.argv", ["export", str(finished), str(file)]):
        export.main()
        said = capsys.readouterr().out
        with pytest.raises(SystemExit) as end:
            export.main()
    count = sum(tensor.numel() for tensor in load_file(file).values())
    assert said == f"{file}: {count:,} parameters of {finished / 'step-000004'}, after step 4\n"
    assert f"{file} exists already" in str(end.value.code)
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert not list(tmp_path.glob("*.unfinished"))


def test_what_cannot_be_exported_or_loaded_is_said(halfway, tmp_path, capsys):
    (halfway / SHARD).unlink()
    with mock.patch("sys.argv", ["export", str(halfway), str(tmp_path / "x")]), pytest.raises(SystemExit) as end:
        export.main()
    assert f"{SHARD} is missing" in str(end.value.code)
    assert not (tmp_path / "x").exists()
    (tmp_path / "text").write_text("Il n'est pas")
    save_file({"a": torch.ones(2)}, tmp_path / "other")
    for name in ("text", "other"):
        with pytest.raises(ValueError, match=f"{name} is no model that blockres has exported"):
            export.load_model(tmp_path / name)


def test_a_checkpoint_opens_to_what_was_written(finished):
    opened = Checkpoint.open(finished / "step-000002")
    assert (opened.step, opened.num_ranks, opened.settings["--dim"]) == (2, 1, 32)
    assert opened.files == {SHARD: FileRecord.of(finished / "step-000002" / SHARD)}
    opened.verify()
