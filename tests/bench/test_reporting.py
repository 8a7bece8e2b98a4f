"""Figures that are handed on: samples, tables, the report, the comparison with a stored run, the GPU script's exit."""

import json
from types import SimpleNamespace

import pytest
import torch

from bench import compare, cpu, device, environment, learned, report
from bench import timing as timing_module
from bench.tables import markdown, number
from bench.timing import Timing, Work, measure, spread


def test_a_time_is_taken_in_turn_with_a_copy():
    order = []
    work = Work(run=lambda state: order.append(("run", state)), prepare=lambda: order.append("prepare") or "ready")
    timing = measure(lambda seed: work, 4096, "cpu", 0.0)
    assert order == ["prepare", ("run", "ready")] * 6, "one to warm up, five that count"
    assert len(timing.seconds) == len(timing.copies) == 5
    assert timing.copy_bytes == 4096


class Clock:
    """A GPU that does what it is told at once and needs a millisecond for each run."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Clock.now

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


@pytest.mark.parametrize(("nbytes", "sets", "batch"), [(2**20, 32, 32), (2**27, 1, 4), (2**35, 1, 1)])
def test_on_a_gpu_small_work_takes_turns_among_sets_and_large_work_comes_alone(monkeypatch, nbytes, sets, batch):
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    for name in ("synchronize", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(L2_cache_size=2**25)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def work(seed):
        used.add(seed)
        return Work(lambda state: setattr(Clock, "now", Clock.now + 1e-3))

    used = set()
    monkeypatch.setattr(timing_module, "_large_copy", lambda: work("copy"))
    timing = measure(work, nbytes, "cuda", 0.0)
    assert timing.median == pytest.approx(1e-3)
    assert timing.copy_bandwidth == pytest.approx(2**30 / 1e-3)
    assert used == {*range(sets), "copy"}
    assert timing.extra == {"sets": sets, "batch": batch}


def test_figures_follow_from_the_samples():
    timing = Timing([2.0, 1.0, 4.0, 2.0, 2.0], [0.5, 0.5, 0.5], copy_bytes=100)
    assert timing.median == 2
    assert timing.copy_bandwidth == 200
    assert timing.bandwidth(300) == 150
    assert timing.times_copy(100) == pytest.approx(4)
    assert spread([1, 2, 3, 4, 5]) == pytest.approx(2 / 3)
    assert spread([1]) == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234.5, "1234"), (12.34, "12.3"), (1.0, "1.00"), (9.996, "10.0"), (0.01234, "0.0123"), (None, "-")],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_a_table_is_aligned():
    lines = markdown(("", "ms"), [("blockres", 1), ("eager", "12.5")]).splitlines()
    assert lines == ["|          |   ms |", "|----------|-----:|", "| blockres |    1 |", "| eager    | 12.5 |"]
    assert markdown(("", "who"), [(1, "eager")]).splitlines() == [
        "|     | who   |",
        "|----:|-------|",
        "|   1 | eager |",
    ]


def benchmark(name, implementation="blockres", fraction=0.5, spread=0.02, **sizes):
    info = {
        "suite": "operations", "implementation": implementation, "operation": "attn_res", "direction": "forward",
        "dtype": "float32", "sources": 8, "tokens": 64, "dim": 32, "bytes": 1000, "gb_per_s": 1.0, "copy_gb_per_s": 2.0,
        "fraction_of_copy": fraction, "spread": spread, "copy_spread": spread, "error": 1e-7,
        "median": 1e-3,
    } | sizes  # fmt: skip
    return {"name": name, "extra_info": info, "stats": {"median": 1e-3, "q1": 0.9e-3, "q3": 1.1e-3}}


def suite(*benchmarks, **more):
    return {"benchmarks": benchmarks, "machine_info": {"blockres_bench": environment.describe()}} | more


def test_only_what_moved_by_more_than_the_spread_is_reported():
    then = suite(benchmark("a"), benchmark("b"), benchmark("c", spread=0.5), benchmark("gone"))
    now = suite(
        benchmark("a", fraction=0.25), benchmark("b", fraction=0.49), benchmark("c", fraction=0.4), benchmark("new")
    )
    moved = [change.name for change in compare.changes(then, now) if change.moved]
    assert moved == ["a"]
    assert compare.changes(then, now)[0].ratio == pytest.approx(2)
    text = compare.report(then, now)
    assert "3 cases compared, 1 moved" in text
    assert "only then: gone" in text
    assert "only now: new" in text


def test_becoming_faster_is_reported_and_no_failure(tmp_path, capsys):
    paths = [tmp_path / "then.json", tmp_path / "now.json"]
    for path, fraction in zip(paths, (0.25, 0.5), strict=True):
        path.write_text(json.dumps(suite(benchmark("a", fraction=fraction))))
    assert compare.main([str(paths[0]), "--new", str(paths[1])]) == 0
    assert compare.main([str(paths[1]), "--new", str(paths[0])]) == 1
    assert "1 moved" in capsys.readouterr().out


def test_the_first_run_becomes_the_baseline(tmp_path):
    new, baseline = tmp_path / "now.json", tmp_path / "kept" / "baseline.json"
    new.write_text(json.dumps(suite(benchmark("a"))))
    assert compare.main([str(baseline), "--new", str(new)]) == 0
    assert baseline.read_text() == new.read_text()


def spread_over(rows, **values):
    return [row | {name: value} for row in rows for name, choices in values.items() for value in choices]


def saved_rows():
    """A few rows of every kind that a script saves, as it saves them."""
    by = {"implementation": "blockres"}
    milliseconds = {"ms forward": 1.0, "ms backward": 2.0, "ms": 3.0}
    cpu_row = by | milliseconds | {"dtype": "float32", "tokens": 8, "copies": 2.0, "spread": 0.1, "peak": 1.0}
    cpu_row |= {"first call s": 1.0, "error": 1e-7, "threads": 1}
    speed = {"part": "speed", "variant": "full", "threads": 1, "tokens_per_s": 10.0, "spread": 0.1}
    losses = {"part": "losses", "variant": "full", "parameters": 7, "steps": [0, 1], "validation": [2.0, 1.0]}
    measured = {"part": "measured", "pp_size": 2, "virtual": 1, "tokens/s": 9.0, "ms": 1.0, "spread": 0.1,
                "bubble": 0.2, "KiB per hop": 4.0, "peak MiB": 5.0, "variant": "block"}  # fmt: skip
    checked = {"part": "check", "P": 2, "V": 1, "ms real": 2.0, "spread": 0.1, "ms simulated": 1.9, "cache": True}
    simulated = {"part": "simulated", "model": "m", "V": 2, "ms": 3.0, "efficiency": 0.9, "ms per sublayer": 1.0,
                 "link GB/s": 1.0, "variant": "block"}  # fmt: skip
    model = {"loss": 1.0, "peak MiB": 2.0, "tokens/s": 3.0, "spread": 0.1, "case": "four layers"}
    return {
        "cpu": spread_over([cpu_row], allocator=["default", "keep"]),
        "stack": [by | {"stack": "8x4", "dim": 64, "forward": 6.0, "backward": 8.0, "total": 14.0, "kept": 2.0}],
        "traffic": [by | {"forward": 6.0, "floor forward": 6}],
        "resources": [by | {"registers": 255}],
        "device": [
            by | {"part": "check", "error": 1e-7},
            by | {"part": "operation", "problem": "wrong"},
            by | {"part": "operation", "ms": 1.25},
        ],
        "huggingface": spread_over([model], model=["standard", "blockres"]),
        "learning": [speed, *spread_over([losses], seed=[0, 1])],
        "pipeline": [
            *spread_over([measured], wire=["float32", "bfloat16"]),
            checked,
            *spread_over([simulated], P=[1, 2]),
        ],
    }


def test_the_report_holds_tables_and_plots_of_all_that_was_saved(tmp_path):
    sizes = [benchmark(f"a{n}", name, sources=n) for n in (2, 4, 8) for name in ("blockres", "eager")]
    stack = {"suite": "stacks", "operation": "stack", "sublayers": 8, "per_block": 4}
    times = suite(*sizes, benchmark("stack", **stack), not_timed={"fla-core": "missing: no module"})
    (tmp_path / "times.json").write_text(json.dumps(times))
    for kind, rows in saved_rows().items():
        environment.save(tmp_path / f"{kind}.json", kind, rows)
    report.main([*map(str, tmp_path.glob("*.json")), "--out", str(tmp_path / "out")])
    text = (tmp_path / "out" / "report.md").read_text()
    for name in ("hop_units", *(name for section in report.SECTIONS.values() for name in section.drawings)):
        assert f"({name}.png)" in text
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5000
    assert set(saved_rows()) | {"times"} == set(report.SECTIONS)
    assert all(section.title in text for section in report.SECTIONS.values())
    assert text.count(f"torch {torch.__version__}, triton") == len(report.SECTIONS)
    assert "not timed: fla-core: missing: no module" in text
    assert "| blockres       | wrong   |      |\n| blockres       |         | 1.25 |" in text


def test_files_of_a_kind_go_into_one_table(tmp_path):
    for name in ("blockres", "eager"):
        environment.save(tmp_path / f"{name}.json", "traffic", [{"implementation": name}])
    report.main([*map(str, tmp_path.glob("*.json")), "--out", str(tmp_path / "out")])
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.count("| implementation |") == 1
    assert "| blockres " in text
    assert "| eager " in text


def test_the_gain_in_learning_is_taken_seed_by_seed():
    rows = [
        {"part": "losses", "variant": variant, "seed": seed, "validation": [3.0, loss], "parameters": 1000}
        for variant, losses in (("standard", (2.0, 1.0)), ("full", (1.9, 0.7)))
        for seed, loss in enumerate(losses)
    ]
    rows.append({"part": "speed", "variant": "full", "tokens_per_s": 50.0, "spread": 0.25})
    standard, full = [[cell.strip() for cell in line.split("|")[1:-1]] for line in learned.table(rows).splitlines()[2:]]
    assert standard == ["standard", "2", "1.5000", "1.0000", "2.0000", "+0.0000", "-", "-", "1,000"]
    assert full == ["full", "2", "1.3000", "0.7000", "1.9000", "-0.2000", "50.0", "25%", "1,000"]


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="neither from pytest-benchmark nor"):
        report.main([str(tmp_path / "x.json")])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_device_script_says_so_and_fails(capsys):
    assert device.main([]) == 1
    assert "torch.cuda.is_available() is False" in capsys.readouterr().err


def test_the_short_table_of_a_gpu_run_sets_goals_and_packages_side_by_side():
    run = device.Run("cuda", budget=0, seconds=0)
    figures = {"ms": 2.0, "gb_per_s": 4000.0, "spread": 0.01, "peak_memory": 10**9}
    for name, fraction in (("blockres", 0.91), ("fla-core", 0.5)):
        facts = {"implementation": name, "direction": "forward", "shape": "9x8x16x4", "fraction_of_copy": fraction}
        run.rows.append(facts | figures | {"part": "operation", "operation": "attn_res"})
        for direction in ("forward", "backward"):
            stack = {"part": "stack", "variant": name, "direction": direction, "shape": "8x4x8x16"}
            run.rows.append(facts | figures | stack | {"ms": 1.0 if name == "blockres" else 2.5})
    decoding = {"part": "stack", "variant": "blockres on a bank", "direction": "decoding", "shape": "8x4x1x16"}
    run.rows += [facts | figures | decoding, facts | figures | decoding | {"shape": "8x4x32x16"}]
    run.attempt("too late", "blockres", dict)
    text = device.tables(run)
    assert "0.90 met" in text
    assert text.index("| attn_res forward | blockres ") < text.index("| attn_res forward | fla-core ")
    assert "| fla-core                  | 5.00 |          2.50 |" in text
    assert "| blockres on a bank" not in text[text.index("stack, forward + backward") :], "that is another stack"
    assert "not reached: too late" in text


def test_the_cpu_script_measures_all_in_turn():
    rows = cpu.measure(("blockres", "eager"), 16, "float32", rounds=2, allocator="default")
    assert [row["implementation"] for row in rows] == ["blockres", "eager"]
    assert all(row["ms"] > 0 and row["copies"] > 0 for row in rows)
    assert "eager / this" in cpu.table(rows)
