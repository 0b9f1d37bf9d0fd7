"""The benchmark harness on fake timers and a fake GEMM; the kernel that only a benchmark uses, in the simulator."""

import argparse
import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
import types

import pytest
import torch

import bench.__main__ as cli
from bench import (
    attention,
    attention_models,
    attention_random,
    block_order,
    blocks,
    cold_start,
    decode,
    examples,
    gemm,
    gemm_random,
    harness,
    hbm,
    machine,
    mixers,
    peers,
    persistence,
    plots,
    stages,
    template_host,
    timing,
    workers,
)
from bench.harness import Case, Suite, Trial
from tests.util import slow
from tritonkittens import sim
from tritonkittens.tune import timing as tune_timing

OPTIONS = argparse.Namespace(out=None, quick=True, slow=False, only="", knobs=[], count=2, seed=3)


@pytest.fixture
def fake_gemm(monkeypatch):
    """A GEMM in torch on the CPU under the name of ours; configurations are kept, and two stages are refused for wide
    tiles."""
    configs = []

    def multiply(a, b, *, out=None, config=None, **options):
        configs.append(config)
        if config is not None and config.get("stages") == 2 and config.get("tile_n", 256) > 128:
            raise ValueError("2 stages do not pipeline 256 columns")
        p = peers.Product(a, b, **options)
        product = peers.scaled(a, p.scale_a).float() @ peers.scaled(b, p.scale_b).float()
        y = peers.epilogue(product, p.bias, p.activation, p.gate, p.residual).to(p.out_dtype or a.dtype)
        return y if out is None else out.copy_(y)

    module = types.ModuleType("tritonkittens.kernels.gemm")
    module.gemm, module.Config, module.configs = multiply, dict, configs
    monkeypatch.setitem(sys.modules, "tritonkittens.kernels.gemm", module)
    of_linear = types.ModuleType("tritonkittens.nn")
    of_linear.Linear = types.SimpleNamespace(from_torch=lambda theirs: theirs)
    monkeypatch.setitem(sys.modules, "tritonkittens.nn", of_linear)
    monkeypatch.setattr(gemm, "DEVICE", "cpu")
    return module


def fake_kind(log=None):
    """A kind of timing in which the n-th contender that is prepared takes n, n + 1/8, … milliseconds."""
    prepared = itertools.count(1)

    def kind(run):
        number, rounds = next(prepared), itertools.count()

        def measure():
            if log is not None:
                log.append(number)
            return number + next(rounds) / 8

        return measure

    return kind


def constant(value):
    return lambda: lambda: torch.full((2, 2), value)


def trial(**contenders):
    return Trial(
        contenders,
        {"slow peer": constant(1.0), "best peer": constant(1.0)},
        harness.frobenius_error(torch.ones(2, 2).double()),
        1e-3,
    )


def row_of(prepared, kinds=None, rounds=4, unit="TFLOP/s", facts=()):
    case = Case("case", 2e9, dict(facts), lambda: prepared)
    return harness.measure(case, unit, rounds, kinds or {"device": fake_kind()})


def test_a_case_may_ask_for_more_rounds():
    prepared = trial(ours=constant(1.0))
    for times in (1, 3):
        row = harness.measure(
            Case("case", 2e9, {}, lambda: prepared, rounds=times), "TFLOP/s", 4, {"device": fake_kind()}
        )
        assert {len(cell["ms"]) for cell in row["contenders"].values()} == {4 * times}


def test_what_the_clock_does_between_rounds_is_in_no_ratio():
    clocks = [1.0, 3.0, 3.0, 1.0, 1.0]
    mine, peer = ([work * clock for clock in clocks] for work in (2.0, 2.5))
    mine[0] *= 3  # and something that hits one of them once
    assert harness.ratio(mine, peer) == pytest.approx(1.25) and statistics.median(peer) < statistics.median(mine)
    with pytest.raises(ValueError):
        harness.ratio(mine, peer[1:])


def test_nobody_always_follows_the_same():
    log = []
    measures = {name: lambda name=name: log.append(name) or 1.0 for name in "abcd"}
    assert {name: len(times) for name, times in harness.interleaved(measures, 10).items()} == dict.fromkeys("abcd", 10)
    before = {name: {log[i - 1] for i in range(1, 40) if log[i] == name} for name in "abcd"}
    assert all(len(others) >= 3 for others in before.values()), before
    again, log[:] = list(log), []
    harness.interleaved(measures, 10)
    assert log == again, "the same in every run"


def test_rounds_alternate_and_are_compared():
    log = []
    row = row_of(trial(mine=constant(1.0)), {"device": fake_kind(log)})
    rounds = [log[i : i + 3] for i in range(0, 12, 3)]
    assert (
        all(sorted(order) == [1, 2, 3] for order in rounds)
        and rounds[1] == rounds[0][::-1]
        and rounds[3] == rounds[2][::-1]
    )
    mine, peer = row["contenders"]["mine"], row["contenders"]["slow peer"]
    assert peer["ms"] == [1, 1.125, 1.25, 1.375]
    assert (
        peer["value"] == pytest.approx(2 / statistics.median(peer["ms"]))
        and peer["high"] == 2
        and peer["low"] == pytest.approx(2 / 1.375)
    )
    assert row["best_peer"] == "slow peer" and mine["ratio"] == pytest.approx(
        statistics.median(b / a for a, b in zip(mine["ms"], peer["ms"]))
    )
    assert "ratio" not in peer and mine["error"] == 0


def test_microseconds_need_no_work():
    cell = row_of(trial(mine=constant(1.0)), unit="µs")["contenders"]["mine"]
    assert (cell["low"], cell["high"]) == (3375, 3000) and "(3000 to 3375)" in harness.format_row(
        row_of(trial(mine=constant(1.0)), unit="µs"), "µs"
    )


def test_missing_peers_are_shown_and_only_ours_fail():
    def not_installed():
        raise ImportError("No module named 'quack'")

    prepared = Trial(
        {"mine": constant(1.0)}, {"quack": not_installed}, harness.frobenius_error(torch.ones(2, 2).double()), 1e-3
    )
    row = row_of(prepared)
    assert row["contenders"]["quack"] == {"ours": False, "missing": "ImportError: No module named 'quack'"}
    assert row["best_peer"] is None and "ratio" not in row["contenders"]["mine"]
    assert "missing: ImportError: No module named 'quack'" in harness.format_row(row, "TFLOP/s")
    assert harness.faults([row]) == []
    assert harness.faults([row_of(trial(mine=not_installed))]) == ["case: mine: ImportError: No module named 'quack'"]


@pytest.mark.parametrize("value", [1.01, math.nan])
def test_a_wrong_result_is_not_timed_and_fails(value):
    row = row_of(trial(mine=constant(value)))
    assert "ms" not in row["contenders"]["mine"] and "wrong" in harness.format_row(row, "TFLOP/s")
    assert "relative error" in harness.faults([row])[0]
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("lost", [True, False])
def test_only_a_lost_gpu_ends_the_run(monkeypatch, lost):
    def broken():
        raise torch.AcceleratorError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken if lost else lambda: None)
    if lost:
        with pytest.raises(torch.AcceleratorError):
            row_of(trial(mine=broken))
    else:
        assert "capturing" in row_of(trial(mine=broken))["contenders"]["mine"]["missing"]


def test_errors_of_chosen_rows_and_of_wrong_shapes():
    expected, rows = torch.eye(4).double(), torch.tensor([2, 0])
    wrong_elsewhere = torch.eye(4)
    wrong_elsewhere[3] = 7
    assert harness.frobenius_error(expected[rows], rows)(wrong_elsewhere) == 0
    assert harness.frobenius_error(expected)(2 * torch.eye(4)) == 1
    with pytest.raises(ValueError, match=r"shape \(2, 4\); \(4, 4\)"):
        harness.frobenius_error(expected)(torch.eye(4)[:2])


def test_summary_is_a_geometric_mean():
    rows = [
        {"case": f"case {ratio}", "contenders": {"mine": {"ours": True, "ratio": ratio}, "peer": {"ours": False}}}
        for ratio in (0.5, 2.0, 8.0)
    ]
    found = harness.summary(rows)["mine"]
    assert found["geometric_mean"] == pytest.approx(2.0) and (found["rows"], found["lowest"], found["lowest_case"]) == (
        3,
        0.5,
        "case 0.5",
    )
    assert "2.000 over 3 rows, lowest 0.500 (case 0.5)" in harness.format_summary(rows)


def test_a_run_writes_what_it_printed_and_draws_it(tmp_path, capsys):
    def cases(options):
        return [
            Case(f"size {n}", 2e9, {"size": n, "part": part}, lambda: trial(mine=constant(1.0)))
            for n in (1, 16)
            for part in "ab"
        ]

    def extend(row):
        row["contenders"]["mine"]["extra"] = {"HBM GB": row["facts"]["size"] / 2}

    suite = Suite(
        "fake", "a title", cases, plot={"x": "size", "panel": "part", "y": ["value", "ratio", "HBM GB"]}, extend=extend
    )
    options = argparse.Namespace(**{**vars(OPTIONS), "out": str(tmp_path), "only": "size"})
    assert harness.run(suite, options, {"device": fake_kind()}) == 0
    report = json.loads((tmp_path / "fake.json").read_text())
    assert [row["case"] for row in report["rows"]] == ["size 1", "size 1", "size 16", "size 16"]
    assert all(
        row["rounds"] == harness.QUICK_ROUNDS and "ms" not in row["contenders"]["mine"] for row in report["rows"]
    )
    assert (
        report["summary"] == harness.summary(report["rows"])
        and report["clocks_after"]
        and report["info"]["torch"] == torch.__version__
    )
    printed = capsys.readouterr().out
    assert all(harness.format_row(row, "TFLOP/s") in printed for row in report["rows"]) and "HBM GB 8.0" in printed
    assert [(panel["y"], panel["title"]) for panel in plots.split(report)] == [
        (y, t) for y in ("TFLOP/s", "times the best peer", "HBM GB") for t in "ab"
    ]
    assert plots.split(report)[0]["series"]["mine"][1][0] == 16


def test_what_is_written_are_rounded_medians_of_all_rounds():
    row = row_of(trial(mine=constant(1.0)), rounds=6)
    written = harness.without_rounds(row)
    for name, cell in row["contenders"].items():
        kept = {key: x for key, x in cell.items() if key != "ms"}
        assert len(cell["ms"]) == 6 == written["rounds"] and kept == pytest.approx(
            written["contenders"][name], rel=1e-4
        )
        assert all(
            len(f"{x:.12g}".strip("-0.").replace(".", "")) <= harness.DIGITS
            for x in written["contenders"][name].values()
            if isinstance(x, float)
        )
    assert harness.format_row(written, "TFLOP/s") == harness.format_row(row, "TFLOP/s")


def test_written_reports_are_read_as_they_were_and_have_a_line_for_a_contender():
    cells = {
        'µs "mine"': {"ours": True, "value": 1.5, "extra": {"HBM GB": 2.0}},
        "peer": {"ours": False, "missing": "ImportError: no\nmodule"},
    }
    report = {
        "suite": "fake",
        "summary": {},
        "rows": [
            {"case": "64³", "facts": {"lengths": [3, 4]}, "contenders": cells},
            {"case": "none", "contenders": {}},
        ],
    }
    text = harness.as_json(report)
    assert json.loads(text) == report and json.loads(harness.as_json({"suite": "fake", "rows": []})) == {
        "suite": "fake",
        "rows": [],
    }
    assert sum('"ours"' in line for line in text.splitlines()) == 2


def lists_of_floats(found):
    if isinstance(found, dict):
        return [x for value in found.values() for x in lists_of_floats(value)]
    if isinstance(found, list):
        inner = [x for value in found for x in lists_of_floats(value)]
        return [found, *inner] if any(isinstance(x, float) for x in found) else inner
    return []


def test_committed_results_are_small_and_have_no_rounds():
    files = [path for path in harness.RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_500_000
    for path in files:
        if path.suffix == ".json":
            report = json.loads(path.read_text())
            assert "rows" in report or "results" in report, path.name
            assert not lists_of_floats(report) and '"ms":' not in path.read_text(), f"{path.name} has single rounds"
            if "suite" in report:
                assert path.read_text() == harness.as_json(report) and report["summary"] == harness.summary(
                    report["rows"]
                ), path.name


def test_a_failing_run_says_so(tmp_path, capsys):
    suite = Suite("fake", "a title", lambda options: [Case("case", 1.0, {}, lambda: trial(mine=constant(2.0)))])
    assert (
        harness.run(suite, argparse.Namespace(**{**vars(OPTIONS), "out": str(tmp_path)}), {"device": fake_kind()}) == 1
    )
    assert "FAILED case: mine: relative error" in capsys.readouterr().out


@pytest.mark.parametrize(
    "plot",
    [{"x": "size", "panel": "part"}, {"x": "size", "y": "ratio", "series": "part"}, {}],
    ids=["lines", "series", "bars"],
)
def test_plots(tmp_path, plot):
    pytest.importorskip("matplotlib")
    rows = [
        row_of(trial(mine=constant(1.0)), facts={"size": n, "part": part}) | {"case": f"{n} {part}"}
        for n in (1, 16)
        for part in "abcd"
    ]
    (tmp_path / "fake.json").write_text(
        json.dumps({"suite": "fake", "title": "a title", "unit": "TFLOP/s", "plot": plot, "rows": rows})
    )
    assert plots.draw(tmp_path / "fake.json") == str(tmp_path / "fake.svg")
    drawn = (tmp_path / "fake.svg").read_text()
    assert "<svg" in drawn and "<text" in drawn and "DejaVuSans-" not in drawn, "glyphs are text"


def test_coordinates_of_plots_are_short_and_labels_whole():
    svg = '<path d="M 12.3456 7\nL 0.052 3.14"/><text x="1.25" style="font-size: 7px">1.25 of 3.14159 "2.718"</text>'
    assert (
        plots._in_tenths(svg).replace("\n", " ")
        == '<path d="M 12.3 7 L 0.1 3.1"/><text x="1.2" style="font-size: 7px">1.25 of 3.14159 "2.718"</text>'
    )


def test_plots_of_the_standalone_benchmarks():
    launch = {"results": {"torch.add(out=)": {"median_us": 2.0, "min_us": 1.0, "max_us": 3.0}}}
    assert plots.split(launch)[0]["series"] == {"µs": [("torch.add(out=)", 2.0, 1.0, 3.0)]}
    assert plots.split({"rows": [{"case": "GEMM 256", "seconds": 1.5}]})[0]["series"] == {
        "s": [("GEMM 256", 1.5, 1.5, 1.5)]
    }


def test_first_results_are_those_of_a_fresh_process(tmp_path):
    found = cold_start.fresh("import", str(tmp_path))
    assert (
        found["compiled"] == found["from_cache"] == 0 and found["cpu_seconds"] > found["seconds"]["import triton"] / 9
    )
    row = {**found, "case": "process of import, empty cache", "seconds": 1.5}
    assert "1.50 s   ours; 0 kernels compiled" in cold_start.format_row(row)
    with pytest.raises(RuntimeError, match="nothing: .*invalid choice: 'nothing'"):
        cold_start.fresh("nothing", str(tmp_path))


def test_a_template_constructed_again_is_measured_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["template_host", "--rounds", "3", "--calls", "50", "--out", str(tmp_path)])
    template_host.main()
    results = json.loads((tmp_path / "template_host.json").read_text())["results"]
    assert set(results) == {"first construction", "kept", "no knobs", "three numbers", "schedule and order"}
    assert results["no knobs"]["min_us"] < results["first construction"]["min_us"] / 5
    assert (
        plots.split({"results": results})[0]["series"]["µs"][0][0] == "first construction"
        and "against a kept one" in capsys.readouterr().out
    )


def test_a_plot_without_matplotlib_is_skipped_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = plots.draw(tmp_path / "fake.json")
    assert "plot skipped" in line and "python -m bench plot" in line and "\n" not in line


def test_clocks():
    read = machine.read_clocks("1980, 3201, 700.00, [N/A], 45, 580.159.03\n")
    assert read == {
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "power_limit_w": 700,
        "power_draw_w": "[N/A]",
        "temperature_c": 45,
        "driver": "580.159.03",
    }


def test_clocks_without_nvidia_smi(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "nvidia-smi" in machine.clocks()["missing"]


# Timing kinds on a GPU of which only two clocks exist.


class FakeCuda:
    """Every piece of work is queued at the host's clock and done in order on the GPU's."""

    def __init__(self, monkeypatch, host, gpu):
        self.host = self.gpu = 0.0
        self.cost, self.log = {"flush": (0.001, 0.040), "run": (host, gpu)}, []
        cuda = self

        class Event:
            def __init__(self, enable_timing):
                pass

            def record(self):
                cuda.log.append("event")
                self.at = cuda.gpu = max(cuda.gpu, cuda.host)

            def elapsed_time(self, other):
                return other.at - self.at

            def synchronize(self):
                cuda.synchronize()

        class Graph:
            replay = staticmethod(lambda: setattr(cuda, "gpu", max(cuda.gpu, cuda.host) + timing.GRAPH_CALLS * gpu))

        def sleep(cycles):
            cuda.log.append("sleep")
            cuda.gpu = max(cuda.gpu, cuda.host) + cycles / 2e6

        stream = types.SimpleNamespace(wait_stream=lambda other: None)
        fakes = {
            "Event": Event,
            "synchronize": self.synchronize,
            "_sleep": sleep,
            "current_device": lambda: 0,
            "CUDAGraph": Graph,
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda s: self,
            "graph": lambda g: self,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(
            timing, "_flush_buffer", lambda device: types.SimpleNamespace(zero_=lambda: self.work("flush"))
        )
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.host / 1e3)
        timing._cycles_per_ms.cache_clear()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def synchronize(self):
        self.host = max(self.host, self.gpu)

    def work(self, what):
        self.log.append(what)
        host, gpu = self.cost[what]
        self.host += host
        self.gpu = max(self.gpu, self.host) + gpu

    def run(self):
        self.work("run")


def test_device_time_flushes_before_every_call(monkeypatch):
    cuda = FakeCuda(monkeypatch, host=0.005, gpu=0.160)
    measure = timing.device(cuda.run)
    cuda.log.clear()
    assert measure() == pytest.approx(0.160)
    half = ["flush", "event", "run", "event"] * (timing.burst_length(0.2) // 2)
    assert cuda.log == [*half, "sleep", *half]


def test_reading_leaves_nothing_to_be_written_back(monkeypatch):
    cuda = FakeCuda(monkeypatch, host=0.005, gpu=0.160)
    buffer = torch.zeros(64, dtype=torch.int8)
    monkeypatch.setattr(timing, "_flush_buffer", lambda device: buffer)
    monkeypatch.setattr(
        timing.torch,
        "amax",
        lambda x, dim, out: cuda.work("flush") if x.data_ptr() == buffer.data_ptr() and x.numel() == 16 else None,
    )
    measure = timing.reading(cuda.run)
    cuda.log.clear()
    assert measure() == pytest.approx(0.160) and cuda.log[:4] == ["flush", "event", "run", "event"]


def test_a_baseline_may_be_timed_in_its_own_way():
    kinds = {"long": lambda call: lambda: 2.0, "short": lambda call: lambda: 1.0}
    result = torch.zeros(1)
    trial = harness.Trial(
        {"ours": lambda: lambda: result},
        {"peer": lambda: lambda: result},
        lambda found: 0.0,
        1.0,
        baselines={"other": harness.Contender(lambda: lambda: result, lambda found: 0.0, "short")},
    )
    row = harness.measure(harness.Case("case", 1e9, {}, lambda: trial, "long"), "TFLOP/s", 2, kinds)
    assert {name: (cell["value"], cell.get("kind")) for name, cell in row["contenders"].items()} == {
        "peer": (0.5, None), "ours": (0.5, None), "other": (1.0, "short")}  # fmt: skip


@pytest.mark.parametrize("launches", [1, 2])
def test_every_burst_has_as_many_slow_launches(monkeypatch, launches):
    """Every other launch takes 0.5 µs longer, counted from the process's first."""
    cuda = FakeCuda(monkeypatch, host=0.001, gpu=0.160)
    work, number = cuda.work, iter(range(1 << 20))

    def turn(what):
        cuda.cost["run"] = (0.001, 0.160 + 0.0005 * (next(number) % 2))
        work(what)

    cuda.work, sleep = turn, torch.cuda._sleep
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: (next(number), sleep(cycles)))
    measure = timing.device(lambda: [cuda.run() for _ in range(launches)])
    for _ in range(4):
        assert measure() == pytest.approx(launches * 0.16025, abs=1e-9)


def test_device_time_does_not_count_a_slow_host(monkeypatch):
    cuda = FakeCuda(monkeypatch, host=0.500, gpu=0.010)
    measure = timing.device(cuda.run)
    cuda.log.clear()
    assert measure() == pytest.approx(0.010) and cuda.log[0] == "sleep"


def test_the_other_kinds(monkeypatch):
    cuda = FakeCuda(monkeypatch, host=0.030, gpu=0.010)
    assert timing.graph(cuda.run)() == pytest.approx(0.010)
    assert timing.host(cuda.run)() == pytest.approx(0.030)
    assert timing.eager(cuda.run)() == pytest.approx(0.030, rel=0.01)
    cuda = FakeCuda(monkeypatch, host=0.010, gpu=0.030)
    assert timing.host(cuda.run)() == pytest.approx(0.010)
    assert timing.eager(cuda.run)() == pytest.approx(0.030, rel=0.01)


@pytest.mark.parametrize(("gpu", "settling", "timed"), [(0.1, 500, 1000), (50.0, 3, 3)])
def test_sustained_calls_follow_one_another(gpu, settling, timed, monkeypatch):
    """As many as settle the clock, then those that are timed, however many there are, but never fewer than a burst
    has."""
    cuda = FakeCuda(monkeypatch, host=0.0, gpu=gpu)
    measure = timing.sustained(cuda.run)
    cuda.log.clear()
    assert measure() == pytest.approx(gpu)
    assert cuda.log == ["event", *["run"] * settling, "event", "event", *["run"] * timed, "event"]


@pytest.mark.parametrize(("gpu", "settling", "timed"), [(0.05, 0, 40), (0.2, 200, 15), (50.0, 1, 3)])
def test_the_tuner_times_long_calls_at_their_own_clock(gpu, settling, timed, monkeypatch):
    cuda = FakeCuda(monkeypatch, host=0.001, gpu=gpu)
    monkeypatch.setattr(tune_timing, "flush_buffer", timing._flush_buffer)
    monkeypatch.setattr(torch.cuda, "device", lambda device: cuda)
    assert tune_timing.seconds(cuda.run, torch.device("cuda", 0)) == pytest.approx(gpu * 1e-3)
    assert cuda.log.count("run") == 1 + tune_timing.FEWEST + settling + timed


@pytest.mark.parametrize("calls, turns", [((0.01, 0.05), 1), ((0.05, 0.2), 20), ((12.0, 13.0), 20), ((), 0)])
def test_long_calls_take_turns_until_their_clock_is_steady(calls, turns, monkeypatch):
    """Each burst takes 50 ms of the clock's time here, whatever it says of a call."""
    now, log = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def a_round(ms):
        now[0] += 0.05
        log.append(ms)
        return ms

    assert timing.settle([functools.partial(a_round, ms) for ms in calls]) == max(calls, default=0.0)
    assert log == list(calls) * turns


def test_a_row_of_bursts_settles_first(monkeypatch):
    log, kind = [], fake_kind()
    monkeypatch.setattr(harness, "SHARING_A_CLOCK", (kind,))
    monkeypatch.setattr(harness, "settle", lambda rounds: log.append(len(rounds)) or 12.0)
    many = row_of(trial(mine=constant(1.0)), {"device": kind})
    few = row_of(trial(mine=constant(1.0)), {"device": fake_kind()})
    assert log == [3] and len(many["contenders"]["mine"]["ms"]) == 10 * len(few["contenders"]["mine"]["ms"])


def test_knobs_are_literals_or_words():
    found = harness.with_knobs("mine", ["stages=2;epilogue_n=None;schedule=split_tail"], lambda knobs: knobs)
    assert found == {
        "mine, stages=2;epilogue_n=None;schedule=split_tail": {
            "stages": 2,
            "epilogue_n": None,
            "schedule": "split_tail",
        }
    }


def test_bursts_are_neither_short_nor_endless():
    assert [timing.burst_length(ms) for ms in (0.0, 0.1, 12.0)] == [timing.MOST, 100, timing.FEWEST]


def test_long_calls_have_as_many_rounds_as_make_up_for_short_bursts(monkeypatch):
    assert [timing.rounds_of(20, ms) for ms in (0.0, 0.1, 1.0, 1.2, 3.0, 6.4, 12.0, 90.0)] == [
        20,
        20,
        20,
        40,
        80,
        100,
        200,
        200,
    ]
    cuda = FakeCuda(monkeypatch, host=0.005, gpu=12.0)
    measure = timing.device(cuda.run)
    cuda.log.clear()
    assert measure() == pytest.approx(12.0) and cuda.log == ["sleep", "flush", "event", "run", "event"]


# Suites


def test_every_case_has_a_name_of_its_own_and_its_work():
    for suite in cli.suites().values():
        cases = suite.cases(OPTIONS)
        assert len({case.name for case in cases}) == len(cases) and all(
            case.work > 0 and case.kind in timing.KINDS for case in cases
        )
        wanted = [suite.plot[key] for key in ("x", "panel", "series") if key in suite.plot]
        assert all(key in case.facts for case in cases for key in wanted)


@pytest.mark.parametrize(
    "suite, only",
    [
        ("gemm", ""),
        ("gemm_models", " 64x"),
        ("gemm_random", ""),
        ("gemm_fp8_random", ""),
        ("gemm_fp8", ""),
        ("gemm_epilogues", ""),
        ("gemm_sustained", ""),
        ("gemm_host", ""),
        ("gemm_training", ""),
        ("gemm_head", ""),
        ("stages", ""),
        ("persistence", ""),
        ("block_order", ""),
        ("workers", ""),
    ],
)
def test_suites_on_a_fake_gemm(suite, only, fake_gemm, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gemm, "SQUARES", ((64, 64, 64),))
    monkeypatch.setattr(gemm, "SHORT_K", ((64, 96, 128),))
    monkeypatch.setattr(gemm, "SUSTAINED", (128,))
    monkeypatch.setattr(gemm, "WEIGHTS", {"some model": {"some weight": (48, 32)}})
    for layers in ("TRAINED", "HEADS"):
        monkeypatch.setattr(gemm, layers, {"some model": {"some weight": (48, 32)}})
    monkeypatch.setattr(gemm, "TRAINED_TOKENS", (64,))
    monkeypatch.setattr(gemm, "RAGGED", ((64, 33, 17),))
    for extent in ("M", "N", "K"):
        monkeypatch.setattr(gemm_random, extent, (16, 300))
    monkeypatch.setattr(peers, "CHECKED_WHOLE", 64**3)
    monkeypatch.setattr(peers, "CHECKED_ROWS", 16)
    for module in (gemm, stages, persistence, workers):
        monkeypatch.setattr(module, "SIDE", 64)
    monkeypatch.setattr(persistence, "DEPTHS", (64,))
    monkeypatch.setattr(workers, "DEPTHS", (128,))
    monkeypatch.setattr(workers, "synchronous", gemm.ours)
    monkeypatch.setattr(stages, "one_stage", gemm.ours)
    monkeypatch.setattr(block_order, "SIZES", (64,))
    monkeypatch.setattr(hbm, "hbm_bytes", lambda module, suite, case, names: [1000 * i for i in range(len(names))])
    monkeypatch.setitem(peers._PEERS["gemm with epilogue"], "torch.compile", (peers.eager_epilogue, False))
    knobs = ["tile_n=128;group=4"] if suite in ("gemm", "gemm_models", "gemm_fp8", "gemm_sustained") else []
    options = argparse.Namespace(**{**vars(OPTIONS), "out": str(tmp_path), "only": only, "knobs": knobs})
    kind = fake_kind()
    assert harness.run(cli.suites()[suite], options, dict.fromkeys(timing.KINDS, kind)) == 0, capsys.readouterr().out
    report = json.loads((tmp_path / f"{suite}.json").read_text())
    assert report["rows"]
    assert (dict(tile_n=128, group=4) in fake_gemm.configs) == bool(knobs)
    for row in report["rows"]:
        assert any(cell["ours"] for cell in row["contenders"].values())
        assert {f"{gemm.OURS}, {text}" for text in knobs} <= set(row["contenders"])
        assert row["best_peer"] is not None or "e4m3" in row["case"], row  # a CPU's scaled product may lack a recipe
    if suite == "stages":
        assert (
            "measured with Config(stages=2, tile_n=128)" in report["rows"][1]["note"]
            and "do not pipeline" in report["rows"][1]["note"]
        )
    if suite == "gemm_epilogues":
        assert all(
            "% over bare" in row["contenders"][gemm.OURS]["extra"]
            for row in report["rows"]
            if row["facts"]["epilogue"] != "bare"
        )
    if suite == "block_order":
        assert report["rows"][0]["contenders"]["supergroup_4"]["extra"] == {"HBM GB": round(3000 / 1e9, 4)}
        assert {"order": "supergroup", "group": 16} in fake_gemm.configs
    if suite == "persistence":
        assert {"schedule": "one_per_block"} in fake_gemm.configs


def test_reference_scales_and_epilogue():
    a, b = torch.randn(256, 256), torch.randn(256, 128)
    scale_a, scale_b = torch.rand(256, 2), torch.rand(2, 1)
    p = peers.Product(
        a,
        b,
        torch.randn(128),
        "gelu_tanh",
        gate=torch.randn(128),
        residual=torch.randn(256, 128),
        scale_a=scale_a,
        scale_b=scale_b,
    )
    y = (a.double() * scale_a.double().repeat_interleave(128, 1)) @ (
        b.double() * scale_b.double().repeat_interleave(128, 0)
    )
    expected = p.residual + p.gate * torch.nn.functional.gelu(y + p.bias, approximate="tanh")
    assert p.error()(expected) < 1e-12
    assert p.error()(expected * 1.01) == pytest.approx(0.01)


def test_block_scales_have_the_memory_that_cublas_wants(monkeypatch):
    monkeypatch.setattr(gemm, "DEVICE", "cpu")
    p = gemm.fp8(256, 384, 256, "block")
    assert (p.scale_a.shape, p.scale_a.stride()) == ((256, 2), (1, 256)) and (p.scale_b.shape, p.scale_b.stride()) == (
        (2, 3),
        (1, 4),
    )
    assert peers._whole_rows(p.scale_b).shape == (4, 3)


def test_epilogue_expressions_compile_as_one_graph_and_agree():
    a, b, bias, gate, residual = (torch.randn(32, 32) for _ in range(5))
    for activation in peers.ACTIVATIONS:
        p = peers.Product(a, b, bias[0], activation, gate[0], residual)
        torch.compiler.reset()
        compiled = torch.compile(peers._expression(activation), backend="eager", fullgraph=True)
        assert p.error()(compiled(a, b, p.bias, p.gate, p.residual)) < 1e-5
        assert p.error()(peers.eager_epilogue(p)()) < 1e-5
    with pytest.raises(ValueError, match="only these"):
        peers.cublaslt_epilogue(p)
    # a CPU takes erf
    assert (
        peers.Product(a, b, bias[0], "gelu_tanh").error()(
            peers.cublaslt_epilogue(peers.Product(a, b, bias[0], "gelu_tanh"))()
        )
        < 1e-3
    )


def test_peers_are_registered_beside_each_other():
    p = peers.Product(torch.randn(8, 8), torch.randn(8, 8))
    assert list(peers.peers("gemm", p)) == ["cublas"]
    assert list(peers.peers("gemm", p, slow=True)) == ["cublas", "torch.compile max-autotune"]
    assert p.error()(peers.peers("gemm", p)["cublas"]()()) < 1e-6


def test_attention_reference(monkeypatch):
    q, k, v = (torch.randn(2, 3, 40, 16) for _ in range(3))
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert peers.Attention(q, k, v).error(heads=6, rows=40)(right) < 1e-6
    assert peers.Attention(q, k, v).error()(right * 1.1) == pytest.approx(0.1, rel=1e-3)
    few = [x[:, :1] for x in (k, v)]
    shared = torch.nn.functional.scaled_dot_product_attention(q, *(x.expand_as(q) for x in few))
    assert peers.Attention(q, *few).error(heads=6, rows=40)(shared) < 1e-6
    causal = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert peers.Attention(q, k, v, True).error(heads=6, rows=40)(causal) < 1e-6


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_attention_gradients_reference(kv_heads):
    q, k, v = (torch.randn(2, heads, 40, 16, requires_grad=True) for heads in (3, kv_heads, kv_heads))
    p = peers.Attention(q, k, v, True, torch.randn(2, 3, 40, 16))
    run = p.timed(
        functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=kv_heads < 3)
    )
    assert p.gradient_error(heads=6)(run()) < 1e-5
    assert p.gradient_error()([g * (1.1 if i == 1 else 1) for i, g in enumerate(run())]) == pytest.approx(0.1, rel=1e-3)


def test_windowed_attention_reference():
    """A query sees its own key and as many before it as the window has."""
    q, k, v, grad = (torch.randn(1, 2, 40, 16) for _ in range(4))
    mask = torch.ones(40, 40, dtype=torch.bool).tril() & torch.ones(40, 40, dtype=torch.bool).triu(-7)
    windowed = functools.partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=mask)
    right, causal = (peers.Attention(q, k, v, True, window=window) for window in (7, None))
    assert right.error(heads=2, rows=40)(windowed(q, k, v)) < 1e-6 < causal.error()(windowed(q, k, v))
    p = peers.Attention(*(x.requires_grad_() for x in (q, k, v)), True, grad, 7)
    assert p.gradient_error()(p.timed(windowed)()) < 1e-5
    with pytest.raises(ValueError, match="scaled_dot_product_attention has windows only as masks"):
        peers.peers("attention", right)["cudnn"]()


def test_random_shapes_are_those_of_their_seed():
    for module in (gemm_random, attention_random):
        first = module.shapes(5, 40)
        assert first == module.shapes(5, 40) != module.shapes(6, 40) and len(first) == 40
    drawn = gemm_random.shapes(0, 400)
    assert all(8 <= s.m <= 16384 + 32 and 120 <= s.n <= 32768 and 120 <= s.k <= 24576 for s in drawn)
    whole = [s for s in drawn if s.n % 64 == s.k % 64 == 0]
    assert 0.7 < len(whole) / len(drawn) < 0.9 and all(gemm_random.has_aligned_rows(s) for s in whole)
    assert not all(gemm_random.has_aligned_rows(s) for s in drawn)
    shapes = attention_random.shapes(0, 400)
    assert all(s.dim % 16 == 0 and s.heads % s.kv_heads == 0 and (s.causal or s.window is None) for s in shapes)
    assert {s.causal for s in shapes} == {False, True} and any(s.window for s in shapes)


def test_work_of_attention_with_a_window():
    """The scores that a head computes, counted one by one."""
    shape = attention_random.Shape(1, 1, 1, 50, 64, True, 9)
    seen = sum(1 for q in range(50) for k in range(50) if q - 9 <= k <= q)
    assert attention_random.scores(shape) == seen
    assert attention_random.scores(shape._replace(window=None)) == 1250
    assert attention_random.scores(shape._replace(window=None, causal=False)) == 2500


@pytest.mark.parametrize("causal", [False, True])
def test_packed_attention_reference(causal):
    """Padded in torch it is right, packed with another mask wrong."""
    lengths = (5, 30, 12)
    p = peers.Packed(*(torch.randn(sum(lengths), 2, 16) for _ in range(3)), lengths, causal)
    mask = torch.arange(30)[None, None, None] < torch.tensor(lengths)[:, None, None, None]
    mask = mask & torch.ones(30, 30, dtype=torch.bool).tril() if causal else mask
    right = torch.nn.functional.scaled_dot_product_attention(*map(p.padded, (p.q, p.k, p.v)), attn_mask=mask)
    packed = torch.cat([right[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])
    assert p.error()(right) < 1e-6 and p.error()(packed) < 1e-6 and p.error()(packed.flip(0)) > 0.1
    assert p.starts().tolist() == [0, 5, 35, 47]


@pytest.mark.parametrize(
    "suite", (*attention.SUITES, *attention_random.SUITES, *decode.SUITES), ids=lambda suite: suite.name
)
def test_attention_suites(suite, monkeypatch):
    monkeypatch.setattr(gemm, "DEVICE", "cpu")
    small = {
        attention: dict(
            DIMS=(64,),
            LENGTHS=(32,),
            TOKENS=64,
            WIDTH=64,
            MIXES={"two": (1, 3)},
            OUTLIER_LENGTHS=(32,),
            SUSTAINED=(32,),
            MEMORY=((1, 4, 2, 40, 64, True),),
            HOST_HEADS=4,
            HOST_LENGTH=40,
            HOST_DIM=16,
        ),
        attention_random: dict(LENGTHS=(20, 60), TOKENS=64, DIMS=(16, 48), LEAST_WINDOW=4),
        decode: dict(
            DECODE={64: ((2, 300),)},
            HEADS=4,
            KV_HEADS=2,
            PAGE_SIZES=(16,),
            DRAWN=dict(
                heads=((2, 2), (1, 3)), dims=(64, 32), queries=(1, 3), batches=(1, 3), keys=(20, 90), bytes=(1, 1 << 20)
            ),
        ),
    }
    for module, values in small.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    knobs = {"attention": ["tile_n=64;consumers=1", "stages=2"], "attention_backward": ["stages=2"]}.get(suite.name, [])
    for case in suite.cases(argparse.Namespace(**{**vars(OPTIONS), "knobs": knobs})):
        with sim.device():
            row = harness.measure(case, suite.unit, 2, dict.fromkeys(timing.KINDS, fake_kind()))
        assert all(cell["value"] for cell in row["contenders"].values() if cell["ours"])
        assert (
            row["best_peer"] == "torch" if suite.name == "attention_host" else "missing" in row["contenders"]["cudnn"]
        )
        assert {f"{gemm.OURS}, {text}" for text in knobs} <= set(row["contenders"])
        assert (f"{gemm.OURS}, pages of 16" in row["contenders"]) == (suite.name == "attention_decode")


def test_the_suite_of_the_examples(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gemm, "DEVICE", "cpu")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    small = dict(
        SIDES=(64,),
        HEADS=(1, 2, 70, 64),
        MATRIX=(40, 64),
        ROTARY=(2, 70, 64),
        LINEAR=((2, 70, 64),),
        GROUPED={"3 experts": ((20, 0, 70), 64, 64)},
    )
    for name, value in small.items():
        monkeypatch.setattr(examples, name, value)
    options = argparse.Namespace(**{**vars(OPTIONS), "out": str(tmp_path)})
    with sim.device():
        assert harness.run(examples.SUITES[0], options, dict.fromkeys(timing.KINDS, fake_kind())) == 0, (
            capsys.readouterr().out
        )
    rows = json.loads((tmp_path / "examples.json").read_text())["rows"]
    assert len(rows) == len(examples.cases(options)) == 14
    for row in rows:
        cell = row["contenders"][examples.EXAMPLE]
        assert cell["ours"] and cell["extra"] == {
            row["facts"]["rate"]: pytest.approx(row["facts"]["work"] / cell["value"] / 1e6, abs=5e-3)
        }
        assert (gemm.OURS in row["contenders"]) == row["case"].startswith(("gemm", "pipelined_gemm", "attention"))
        assert all(
            cell["ours"] or name in ("cudnn", "quack", "fla") or "value" in cell
            for name, cell in row["contenders"].items()
        ), row


def test_drawn_shapes():
    """Of a seed always the same, within what they are drawn from, every shape once in a run."""
    shapes = list(itertools.islice(decode.drawn_shapes(5), 200))
    assert (
        shapes
        == list(itertools.islice(decode.drawn_shapes(5), 200))
        != list(itertools.islice(decode.drawn_shapes(6), 200))
    )
    least, most = decode.DRAWN["bytes"]
    for shape in shapes:
        assert (
            (shape.kv_heads, shape.group) in decode.DRAWN["heads"]
            and shape.dim in decode.DRAWN["dims"]
            and shape.queries in decode.DRAWN["queries"]
        )
        assert 1 <= shape.batch <= 128 and 128 <= shape.keys <= 1 << 15
        assert least <= shape.bytes == 2 * shape.batch * shape.kv_heads * shape.keys * shape.dim * 2 <= most
    cases = decode.random_cases(argparse.Namespace(**{**vars(OPTIONS), "count": 200, "seed": 5}))
    assert [case.name for case in cases] == [f"bf16 decode {decode.label(shape)}" for shape in dict.fromkeys(shapes)]


def test_ratio_of_errors():
    def cell(error, ours=False):
        return {"ours": ours, "error": error}

    row = {
        "contenders": {
            "cudnn": cell(2e-3),
            "flash-attention 3": cell(1e-3),
            "flash-attention 4": cell(5e-4),
            gemm.OURS: cell(1.5e-3, True),
        }
    }
    attention.add_error_ratio(row)
    assert [list(found.get("extra", {}).values()) for found in row["contenders"].values()] == [[], [], [], [1.5]]
    alone = {"contenders": {"cudnn": {"ours": False, "missing": "no cuDNN"}, gemm.OURS: cell(1e-3, True)}}
    attention.add_error_ratio(alone)
    assert "extra" not in alone["contenders"][gemm.OURS]


def test_memory_of_a_call(monkeypatch):
    """A call that allocates 3 MiB at most while 5 are in use; what only its first allocates does not count."""
    mib, used, most = 2**20, [5], [5]

    def call():
        for change in (7 * (used[0] == 5 and len(calls) == 0), 3, -3):
            used[0] += change
            most[0] = max(most[0], used[0])
        calls.append(None)

    calls = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: used[0] * mib)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: most[0] * mib)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: most.__setitem__(0, used[0]))
    once = timing.KINDS["memory"](call)
    assert once() == once() == 3


def test_orders_of_attention(monkeypatch):
    monkeypatch.setattr(gemm, "DEVICE", "cpu")
    for module, name, value in (
        (block_order, "LENGTHS", (300,)),
        (block_order, "HEAD_DIM", 64),
        (attention, "TOKENS", 300),
        (attention, "WIDTH", 128),
    ):
        monkeypatch.setattr(module, name, value)
    launched = []
    for case in block_order.attention_cases(OPTIONS):
        with sim.device():
            row = harness.measure(case, "TFLOP/s", 2, {"device": fake_kind()})
        launched.append([name for name, cell in row["contenders"].items() if cell["ours"] and cell.get("value")])
    assert launched == [
        ["head by head", "tile by tile"],
        ["head by head", "tile by tile", "longest first", "drawn by the blocks"],
    ]


def test_launches_for_a_profiler(monkeypatch):
    """What ncu counts is one call of each contender, and nothing else."""
    monkeypatch.setattr(gemm, "DEVICE", "cpu")
    monkeypatch.setattr(block_order, "SIZES", (64,))
    seen = []
    monkeypatch.setattr(
        block_order,
        "trial",
        lambda p, contenders: harness.Trial({n: lambda n=n: lambda: seen.append(n) for n in contenders}, {}, None, 1.0),
    )
    for name in ("synchronize", "profiler.start", "profiler.stop"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda name=name: seen.append(name))
    hbm.launch_once("bench.block_order", "block_order", "bf16 64³", ["supergroup_4", "row_major"])
    once = ["synchronize", "profiler.start", "{}", "synchronize", "profiler.stop"]
    assert seen == [step.format(name) for name in ("supergroup_4", "row_major") for step in once]


@pytest.mark.parametrize("only", ["Llama training", "Qwen3 prefill"])
def test_suite_of_models(only, monkeypatch):
    """Small models, ours in the simulator; what is not installed is missing."""
    pytest.importorskip("transformers", minversion="5.17")
    monkeypatch.setattr(gemm, "DEVICE", "cpu")
    sizes = dict(SEQUENCES=((2, 72),), LAYERS=1, HIDDEN=128, HEADS=2, KV_HEADS=1, HEAD_DIM=64, VOCABULARY=64,
                 MODELS={"Llama": ("LlamaConfig", 96), "Qwen3": ("Qwen3Config", 96)})  # fmt: skip
    for name, value in sizes.items():
        monkeypatch.setattr(attention_models, name, value)
    (suite,) = attention_models.SUITES
    (case,) = [case for case in suite.cases(OPTIONS) if only in case.name]
    with sim.device():
        row = harness.measure(case, suite.unit, 2, {"sustained": fake_kind()})
    assert row["contenders"][gemm.OURS]["value"] and row["best_peer"] == "sdpa"
    for name in (gemm.OURS, attention_models.LAYERS_TOO, "sdpa"):
        assert 0 < row["contenders"][name]["error"] < row["bound"]


@pytest.mark.parametrize(
    "only", ["Llama prefill", slow("Llama training"), slow("Qwen3-MoE prefill"), slow("Qwen3-MoE training")]
)
def test_the_suite_of_blocks(only, monkeypatch):
    """Small blocks, ours in the simulator, compiled ones traced: all are right, and a wrong result is found out."""
    pytest.importorskip("transformers", minversion="5.17")
    monkeypatch.setattr(gemm, "DEVICE", "cpu")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(blocks, "SEQUENCES", (2, 20))
    sizes = dict(num_attention_heads=2, head_dim=64)
    monkeypatch.setattr(blocks, "COMMON", blocks.COMMON | sizes)
    small = {
        "Llama": dict(hidden_size=128, intermediate_size=96, num_key_value_heads=1),
        "Qwen3-MoE": dict(
            hidden_size=128, moe_intermediate_size=64, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2
        ),
    }
    monkeypatch.setattr(blocks, "MODELS", {name: (blocks.MODELS[name][0], small[name]) for name in small})
    (suite,) = blocks.SUITES
    (case,) = [case for case in suite.cases(OPTIONS) if only in case.name]
    with sim.device():
        row = harness.measure(case, suite.unit, 2, {case.kind: fake_kind()})
        trial = case.prepare()
    suite.extend(row)
    assert list(row["contenders"]) == ["eager", "torch.compile", gemm.OURS, f"{gemm.OURS}, torch.compile"]
    for cell in row["contenders"].values():
        assert cell["value"] and 0 < cell["error"] < row["bound"]
        assert list(cell.get("extra", ())) == (["of eager", "of torch.compile"] if cell["ours"] else [])
    found = trial.peers["eager"]()()
    found[-1] *= 1.1
    assert trial.error(found) > row["bound"]


@pytest.mark.parametrize(
    "only", [slow(f"{name} {step}") for name in mixers.SIZES for step in ("prompt B 1", "step B 1")]
)
def test_the_suite_of_mixers(only, monkeypatch):
    pytest.importorskip("transformers", minversion="5.17")
    for module in (gemm, mixers):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    small = dict(
        Mamba2=dict(hidden_size=32, num_heads=2, head_dim=32, state_size=16, n_groups=1, chunk_size=8),
        GatedDeltaNet=dict(
            hidden_size=32,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention"],
        ),
        LinearAttention=dict(hidden_size=32, num_attention_heads=2, head_dim=16),
    )
    for name, sizes in small.items():
        layer_count = dict(num_hidden_layers=mixers.SIZES[name]["num_hidden_layers"])
        monkeypatch.setitem(mixers.SIZES, name, sizes | layer_count)
    monkeypatch.setattr(mixers, "PROMPTS", ((1, 5),))
    monkeypatch.setattr(mixers, "BATCHES", (1,))
    mixers.layers.cache_clear()
    (suite,) = mixers.SUITES
    (case,) = [case for case in suite.cases(OPTIONS) if only in case.name]
    with sim.device():
        row = harness.measure(case, suite.unit, 2, dict.fromkeys(timing.KINDS, fake_kind()))
    mixers.layers.cache_clear()
    assert 0 < row["contenders"][gemm.OURS]["error"] < row["bound"]
    assert all(cell["value"] for cell in row["contenders"].values())
    assert (mixers.PATCHED in row["contenders"]) == ("LinearAttention" not in only)


@pytest.mark.parametrize("baseline", [workers.synchronous, stages.one_stage])
def test_kernels_that_do_not_overlap_multiply(baseline, monkeypatch):
    monkeypatch.setattr(gemm, "DEVICE", "cpu")
    p = gemm.bf16(256, 264, 192)
    with sim.device("sm_90a"):
        assert p.error()(baseline(p)()) < gemm.BF16_BOUND


NCU = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","byte","byte"
"0","1","kernel","1,000","24"
"1","1","kernel","2000","48"
"""


def test_bytes_from_ncu():
    assert hbm.read_bytes(NCU, "") == [1024, 2048]
    assert "ERR_NVGPUCTRPERM" in hbm.read_bytes(
        "==PROF== x\n==ERROR== ERR_NVGPUCTRPERM - no permission\n==PROF== y\n", ""
    )
    assert "ValueError: refused" in hbm.read_bytes(
        "==ERROR== error code 1\n", "Traceback\nValueError: refused\nnanobind: leaked\n"
    )
    assert "nothing" in hbm.read_bytes("", "")
    assert "did not count" in hbm.read_bytes(NCU.replace("2000", "n/a"), "")


def test_bytes_of_products_with_several_launches(monkeypatch):
    def counted(module, suite, case, names):
        assert (module, suite, case) == ("bench.block_order", "block_order", "some case")
        return [10**9] * (2 if "cublas" in names else 0) + [3 * 10**9] * ("row_major" in names)

    monkeypatch.setattr(hbm, "hbm_bytes", counted)
    row = {"case": "some case", "contenders": {name: {"ms": [1.0]} for name in ("cublas", "row_major")}}
    block_order.SUITES[0].extend(row)
    assert {name: cell["extra"] for name, cell in row["contenders"].items()} == {
        "cublas": {"HBM GB": 2.0},
        "row_major": {"HBM GB": 3.0},
    }


def test_bytes_without_ncu(monkeypatch):
    monkeypatch.setenv("PATH", "")
    row = {"case": "some case", "contenders": {"cublas": {"ms": [1.0]}, "row_major": {"missing": "reason"}}}
    block_order.SUITES[0].extend(row)
    assert row["contenders"] == {
        "cublas": {"ms": [1.0], "extra": {"HBM GB": "unknown: ncu is not installed"}},
        "row_major": {"missing": "reason"},
    }


# Command line


def test_list_and_unknown_suites(capsys):
    assert cli.main(["persistence", "simulator", "--list"]) == 0
    assert "bf16 4096x4096x64 [device]" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["gemn"])
    assert "suite 'gemn': must be plot or one of stages, persistence" in capsys.readouterr().err


def test_several_suites_run_in_processes_of_their_own(monkeypatch):
    commands = []
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command: commands.append(command) or types.SimpleNamespace(returncode=len(commands) - 1),
    )
    assert cli.main(["stages", "gemm", "--quick", "--out", "folder"]) == 1
    assert [command[3:] for command in commands] == [
        [name, "--out", "folder", "--quick", "--workers", "1"] for name in ("stages", "gemm")
    ]


def test_kernels_are_compiled_in_processes_before_they_are_measured(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command: done.append(command[3:]) or types.SimpleNamespace(wait=lambda: done.append("waited")),
    )
    monkeypatch.setattr(cli, "run", lambda suite, options: done.append(suite.name) or 0)
    assert cli.main(["gemm", "--only", "4096", "--workers", "2", "--count", "7", "--seed", "0"]) == 0
    parts = [
        ["gemm", "--only", "4096", "--count", "7", "--seed", "0", "--compile", str(part), "2"] for part in range(2)
    ]
    assert done == [*parts, "waited", "waited", "gemm"]
    compiled = []
    monkeypatch.setattr(
        cli, "compile_part", lambda suite, options, *part: compiled.append((suite.name, options.only, part))
    )
    assert cli.main(parts[1]) == 0 and compiled == [("gemm", "4096", (1, 2))] and done[-1] == "gemm" and len(done) == 5


def test_a_part_is_compiled_by_calling_what_is_ours():
    called = []

    def contender(name):
        return lambda: lambda: called.append(name) or 1 / (name != "ours 2")

    def case(number):
        baselines = {"bare": harness.Contender(contender(f"bare {number}"), pytest.fail)}
        ours = {"ours": contender(f"ours {number}")}
        return Case(
            f"case {number}", 1.0, {}, lambda: Trial(ours, {"peer": pytest.fail}, pytest.fail, 1.0, baselines=baselines)
        )

    suite = Suite("some", "title", lambda options: [case(number) for number in range(4)])
    harness.compile_part(suite, argparse.Namespace(only="case"), 0, 2)
    assert called == ["ours 0", "bare 0", "ours 2", "bare 2"]
    harness.compile_part(suite, argparse.Namespace(only="case 3"), 0, 2)
    assert called[4:] == ["ours 3", "bare 3"]


def test_a_reference_is_computed_when_a_result_is_compared():
    computed = []

    @harness.deferred
    def error(expected):
        computed.append(expected)
        return lambda found: found - expected

    compare = error(3)
    assert not computed and compare(5) == 2 and compare(3) == 0 and computed == [3]


def test_plot_command_draws_a_folder(tmp_path, capsys):
    (tmp_path / "empty.json").write_text(json.dumps({"rows": []}))
    assert cli.main(["plot", str(tmp_path)]) == 0
    assert "plot skipped" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    assert cli.main(["stages"]) == 1
    assert "needs a CUDA device" in capsys.readouterr().out
