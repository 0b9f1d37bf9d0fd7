"""The tuner, on a family whose kernels are arithmetic and whose clock is a dictionary."""

import argparse
import io
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import threading
import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import tritonkittens.sim as sim
from tritonkittens import tune
from tritonkittens.__main__ import main
from tritonkittens.launch import Device as Facts
from tritonkittens.sim import costs
from tritonkittens.tune import cli, shipped, store, tuner
from tritonkittens.tune.race import FINAL_ROUNDS, ROUNDS, measurements_of, race

ROOT = pathlib.Path(__file__).parents[1]
H200 = tune.Device.named("H200")
H200_KEY = store.DeviceKey("NVIDIA H200", 132, (9, 0))


class Problem(NamedTuple):
    m: int
    n: int
    dtype: str = "bf16"


@dataclass(frozen=True)
class Config:
    tile: int
    stages: int = 2
    cluster: tuple[int, int] = (1, 1)


TILES = range(1, 33)
MEASURED = 12 + 6 + 3 * ROUNDS + 2 * FINAL_ROUNDS  # calls of a race of twelve


def candidates(problem, device):
    return [Config(tile) for tile in TILES]


def cost(problem, config, device):
    """The model likes small tiles; a tile of more than 30 does not fit."""
    return (
        tune.Cost(hbm=problem.m * 1e-9, tensor=config.tile * 1e-6, setup=1e-7)
        if config.tile <= 30
        else tune.Cost(shared=math.inf)
    )


class Clock:
    """Seconds by tile, but for those named; what was measured, in order."""

    def __init__(self, fast=7, broken=()):
        self.fast, self.broken, self.calls = fast, broken, []

    def __call__(self, config):
        self.calls.append(config)
        if config.tile in self.broken:
            raise RuntimeError(f"tile {config.tile} spills")
        return 1e-6 if config.tile == self.fast else (10 + config.tile) * 1e-6


def family(**arguments):
    return tune.Family("fake", Config, candidates, cost, problem_type=Problem, match=("dtype",), **arguments)


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """Results and tables of this test only, and no wish of the user's."""
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TK_TUNE", raising=False)
    monkeypatch.delenv("TK_TUNE_TRIES", raising=False)
    monkeypatch.setattr(shipped, "TABLES", tmp_path / "tables")
    shipped.tables.cache_clear()
    yield
    shipped.tables.cache_clear()


def results() -> store.Store:
    return store.store_for(H200_KEY)


# ---- the model


def test_cost_is_the_slowest_unit_and_what_nothing_hides():
    found = tune.Cost(hbm=3.0, l2=1.0, tensor=4.0, setup=0.5, synchronisation=0.25)
    assert (found.total, found.bound) == (4.75, "tensor")
    assert tune.Cost(hbm=3.0, tensor=4.0, setup=0.5, overlap=2.0).total == pytest.approx(5.5)
    assert tune.Cost(hbm=3.0, tensor=4.0, overlap=1.0).total == 7.0
    assert "overlap" not in found.components()


def test_rates_of_a_known_device():
    assert H200.tensor_flops(16) * 1.83 / 1.7 == pytest.approx(989.4e12, rel=0.01)  # the data sheet's, at its clock
    assert H200.tensor_flops(8) == 2 * H200.tensor_flops(16) == 4 * H200.tensor_flops(32)
    assert H200.l2_bytes_per_second == H200.chip.l2_bytes * 132 * H200.clock_hz
    assert H200.seconds(1.7e9) == 1
    assert tune.Device.named("b200").tensor_flops(4) == 4 * tune.Device.named("B200").tensor_flops(16)
    # the simulator's figures and these are of the same units
    assert H200.tensor_flops(16) == pytest.approx(2 * costs.WGMMA_RATE * 132 * H200.clock_hz)
    assert tune.Device.named("B200").tensor_flops(16) == pytest.approx(2 * costs.TCGEN05_RATE * 148 * H200.clock_hz)
    assert H200.hbm_bytes_per_second == pytest.approx(costs.HBM_BYTES * 132 * 1.7e9, rel=0.01)


def test_device_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"Device.named\('H300'\): known are H100, H200, B200"):
        tune.Device.named("H300")
    with pytest.raises(ValueError, match=r"bits=4\): the tensor cores of NVIDIA H200 take 8, 16, 32 bits"):
        H200.tensor_flops(4)
    with pytest.raises(ValueError, match="compute capability 8.0"):
        tune.Device.from_facts(Facts(-1, "A100", (8, 0), 108, 1, 1, 1, 1, 1))


@pytest.mark.parametrize("told", [True, False])
def test_device_from_what_the_driver_tells(monkeypatch, told):
    """With and without clocks in cudaDeviceProp. The clock is the highest, or what the power limit leaves of it."""

    class Properties:
        clock_rate, memory_clock_rate, memory_bus_width = (1_500_000, 3_201_000, 6144) if told else (0, 0, 0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties if told else object())
    tune.cost._told.cache_clear()
    try:
        found = tune.Device.from_facts(
            Facts(0, "NVIDIA H100 80GB HBM3", (9, 0), 114, 232448, 233472, 65536, 50 << 20, 80 << 30)
        )
    finally:
        tune.cost._told.cache_clear()
    assert found.clock_hz == (1.5e9 if told else 1.7e9)
    assert found.hbm_bytes_per_second == pytest.approx(4.917e12 if told else 3.35e12, rel=1e-3)
    assert found.shared_bytes_per_second == 128 * 114 * found.clock_hz


# ---- the order of sources


def test_without_measurements_the_model_chooses():
    assert family().choose(Problem(64, 64), device=H200) == Config(1)
    assert family().choose(Problem(64, 64), Clock(), device=H200) == Config(1)  # TK_TUNE is not set


@pytest.mark.parametrize("value, measured", [("0", False), ("1", True)])
def test_tk_tune(monkeypatch, value, measured):
    monkeypatch.setenv("TK_TUNE", value)
    clock = Clock()
    assert family().choose(Problem(64, 64), clock, device=H200) == Config(7 if measured else 1)
    assert bool(clock.calls) == measured


def test_tk_tune_refuses_other_values(monkeypatch):
    monkeypatch.setenv("TK_TUNE", "yes")
    with pytest.raises(ValueError, match="TK_TUNE='yes': 1 measures"):
        family().choose(Problem(64, 64), Clock(), device=H200)
    monkeypatch.setenv("TK_TUNE", "1")
    monkeypatch.setenv("TK_TUNE_TRIES", "0")
    with pytest.raises(ValueError, match="TK_TUNE_TRIES='0'"):
        family().choose(Problem(64, 64), Clock(), device=H200)


def test_a_known_problem_is_neither_measured_nor_read_again(monkeypatch):
    monkeypatch.setenv("TK_TUNE", "1")
    clock, found = Clock(), family()
    found.choose(Problem(64, 64), clock, device=H200)
    measured = len(clock.calls)
    monkeypatch.setattr(tuner, "store_for", lambda device: pytest.fail("the store was asked"))
    assert found.choose(Problem(64, 64), clock, device=H200) == Config(7)
    assert len(clock.calls) == measured


def test_a_guess_is_measured_once_that_is_asked_for(monkeypatch):
    """TK_TUNE is read when a measurement could be made first: a look-up in the environment costs more than the
    choice."""
    found, other = family(), family()
    assert (
        found.choose(Problem(64, 64), device=H200) == other.choose(Problem(64, 64), Clock(), device=H200) == Config(1)
    )
    monkeypatch.setenv("TK_TUNE", "1")
    assert found.choose(Problem(64, 64), Clock(), device=H200) == Config(7)
    assert found.choose(Problem(64, 64), device=H200) == Config(7)
    assert other.choose(Problem(64, 64), Clock(), device=H200) == Config(1)
    other.forget()
    assert other.choose(Problem(64, 64), device=H200) == Config(7)  # from disk


def test_disk_before_table_before_measuring(monkeypatch, tmp_path):
    shipped.write(
        tmp_path / "tables" / "h200.json",
        H200_KEY,
        [store.Entry("fake", {"m": m, "n": 64, "dtype": "bf16"}, {"tile": 9}, 1e-6) for m in (64, 65)],
    )
    family().tune(Problem(64, 64), Clock(), device=H200)
    monkeypatch.setenv("TK_TUNE", "1")
    clock, found = Clock(), family()
    assert found.choose(Problem(64, 64), clock, device=H200) == Config(7)
    assert found.choose(Problem(65, 64), clock, device=H200) == Config(9)
    assert not clock.calls
    assert [found.explain(Problem(m, 64), device=H200).source for m in (64, 65)] == ["disk", "table"]


def test_a_stored_winner_that_is_no_candidate_any_more_is_not_used(tmp_path):
    problems = [Problem(m, 4096)._asdict() for m in (1, 100, 10000)]
    configs = [{"tile": 99}, {"tile": 9, "warps": 4}, {"tile": 9, "cluster": [1, 1]}]
    shipped.write(
        tmp_path / "tables" / "h200.json",
        H200_KEY,
        [store.Entry("fake", p, c, 1e-6) for p, c in zip(problems, configs)],
    )
    assert [family().choose(Problem(**p), device=H200).tile for p in problems] == [1, 1, 9]


def test_a_table_serves_a_device_of_the_same_make_only(tmp_path):
    shipped.write(
        tmp_path / "tables" / "h200.json", H200_KEY, [store.Entry("fake", Problem(64, 64)._asdict(), {"tile": 9}, 1e-6)]
    )
    assert family().choose(Problem(64, 64), device=tune.Device.named("H100")) == Config(9)
    assert family().choose(Problem(64, 64), device=tune.Device.named("B200")) == Config(1)


def test_a_device_has_its_own_table_before_that_of_another(tmp_path):
    """Problems that its own does not know are in the fullest of the others."""
    h100 = tune.Device.named("H100")
    key = store.DeviceKey(h100.name, h100.multiprocessors, h100.capability)
    for name, device, tile, sizes in (
        ("a", store.DeviceKey("NVIDIA GH200", 132, (9, 0)), 2, (65, 66)),
        ("b", key, 1, (64,)),
        ("c", H200_KEY, 9, (64, 65, 66)),
    ):
        shipped.write(
            tmp_path / "tables" / f"{name}.json",
            device,
            [store.Entry("fake", Problem(m, 64)._asdict(), {"tile": tile}, 1e-6) for m in sizes],
        )
    assert [family().choose(Problem(m, 64), device=h100).tile for m in (64, 65)] == [1, 9]
    assert [family().choose(Problem(m, 64), device=H200).tile for m in (64, 65)] == [9, 9]
    assert "shipped in b.json of NVIDIA H100" in family().explain(Problem(64, 64), device=h100).reason


def test_devices_are_told_apart():
    found = family()
    found.tune(Problem(64, 64), Clock(), device=H200)
    assert found.choose(Problem(64, 64), device=tune.Device.named("B200")) == Config(1)


def test_nothing_is_measured_during_the_capture_of_a_graph(monkeypatch):
    monkeypatch.setenv("TK_TUNE", "1")
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    clock, found = Clock(), family()
    assert found.choose(Problem(64, 64), clock, device=H200) == Config(1)
    with pytest.raises(RuntimeError, match="capture of a CUDA graph"):
        found.tune(Problem(64, 64), clock, device=H200)
    assert not clock.calls
    capturing = False
    assert found.choose(Problem(64, 64), clock, device=H200) == Config(7)


def test_a_simulated_device_is_not_measured(monkeypatch):
    monkeypatch.setenv("TK_TUNE", "1")
    clock = Clock()
    with sim.device("sm_90a"):
        assert (
            family().choose(Problem(64, 64), clock)
            == family().choose(Problem(64, 64), clock, device=torch.device("cpu"))
            == Config(1)
        )
    assert not clock.calls


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_device_must_be_named():
    with pytest.raises(RuntimeError, match=r"fake: there is no CUDA device .*pass device=Device.named\('H200'\)"):
        family().choose(Problem(64, 64))


# ---- measuring


def test_few_are_measured_and_the_slower_half_drops_out():
    clock = Clock()
    family().tune(Problem(64, 64), clock, device=H200)
    counts = {config.tile: clock.calls.count(config) for config in clock.calls}
    assert set(counts) == set(range(1, 13))  # the twelve that the model ranks best
    assert len(clock.calls) == MEASURED
    assert counts[7] == counts[1] == 2 + ROUNDS + FINAL_ROUNDS and counts[12] == 1


def test_how_many_are_tried(monkeypatch):
    monkeypatch.setenv("TK_TUNE_TRIES", "3")
    clock = Clock(fast=3)
    assert family().tune(Problem(64, 64), clock, device=H200) == Config(3)
    assert {config.tile for config in clock.calls} == {1, 2, 3}
    clock = Clock(fast=3)
    assert family().tune(Problem(64, 64), clock, device=H200, tries=1000) == Config(3)
    assert {config.tile for config in clock.calls} == set(range(1, 31))  # those that do not fit are left out


def test_rounds_are_interleaved_and_turned():
    calls = []
    race([1, 2], lambda config: calls.append(config) or config)
    assert calls == [1, 2, 2, 1] * (FINAL_ROUNDS // 2)
    calls.clear()
    race([3, 1, 2, 4], lambda config: calls.append(config) or config)
    assert calls == [3, 1, 2, 4, 4, 2, 1, 3, 3, 1, 2, 4] + [1, 3, 3, 1] * (FINAL_ROUNDS // 2)


def test_medians_forgive_one_bad_round():
    """The faster of two has one outlier."""
    seconds = {"fast": iter([9.0] + [1.0] * FINAL_ROUNDS), "slow": iter([2.0] * FINAL_ROUNDS)}
    result = race(list(seconds), lambda config: next(seconds[config]))
    assert result.winner == "fast" and result.seconds("fast") == 1.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_time_is_positive_and_finite(seconds):
    result = race(["good", "bad"], lambda config: 1.0 if config == "good" else seconds)
    assert (
        result.winner == "good"
        and "a time is positive and finite" in result.errors["bad"]
        and result.seconds("bad") is None
    )


def test_a_candidate_that_raises_loses_and_its_error_is_kept():
    assert family().tune(Problem(64, 64), Clock(fast=7, broken=(1, 2, 3, 7)), device=H200) == Config(4)
    (entry,) = results().entries().values()
    errors = {trial.config["tile"]: trial.error for trial in entry.tried if trial.error}
    assert errors == {tile: f"RuntimeError: tile {tile} spills" for tile in (1, 2, 3, 7)}
    assert entry.seconds == 14e-6 and entry.config["tile"] == 4


def test_where_every_candidate_raises_one_that_did_not_is_chosen_and_nothing_kept(monkeypatch):
    monkeypatch.setenv("TK_TUNE", "1")
    clock, found = Clock(broken=range(40)), family()
    with pytest.warns(RuntimeWarning, match="fake: none of the 12 configurations .*tile 1 spills"):
        assert found.choose(Problem(64, 64), clock, device=H200) == Config(13)
    found.choose(Problem(64, 64), clock, device=H200)
    assert len(clock.calls) == 12 and not results().entries()


def test_an_interrupted_measurement_leaves_nothing():
    def interrupted(config):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        family().tune(Problem(64, 64), interrupted, device=H200)
    assert not results().entries() and family().tune(Problem(64, 64), Clock(), device=H200) == Config(7)


def test_an_interrupted_measurement_keeps_what_was_measured():
    clock = Clock(fast=5)

    def interrupted(config):
        if len(clock.calls) == 8:
            raise KeyboardInterrupt
        return clock(config)

    with pytest.raises(KeyboardInterrupt):
        family().tune(Problem(64, 64), interrupted, device=H200)
    (entry,) = results().entries().values()
    assert entry.config["tile"] == 5 and [trial.config["tile"] for trial in entry.tried] == list(range(1, 9))
    assert family().choose(Problem(64, 64), device=H200) == Config(5)


@pytest.mark.parametrize("gain, tile", [(0.004, 1), (0.02, 6)])
def test_the_models_choice_stays_unless_another_is_faster_beyond_the_noise(gain, tile):
    def measure(config):
        return 1e-5 * {1: 1.0, 6: 1.0 - gain}.get(config.tile, 2.0)

    assert family().tune(Problem(64, 64), measure, device=H200) == Config(tile)


def test_a_contender_that_is_faster_in_few_rounds_only_does_not_win():
    """The faster median is of a few lucky rounds."""
    turns = {1: itertools.cycle([1.0]), 2: itertools.cycle([0.9, 0.9, 1.3])}
    assert race([1, 2], lambda config: next(turns[config])).winner == 1


def test_the_models_choice_is_measured_to_the_end():
    result = race([9, *range(1, 9)], lambda config: config)
    assert result.winner == 1 and len(result.times[9]) == len(result.times[1]) == 1 + ROUNDS * 2 + FINAL_ROUNDS


@pytest.mark.parametrize("count", [0, 1, 2, 5, 12, 30])
def test_how_many_measurements_a_race_takes(count):
    counts = []
    race(list(range(1, count + 1)), float, lambda number, config: counts.append(number))
    assert counts == list(range(1, measurements_of(count) + 1))


def test_candidates_are_compiled_before_the_first_is_measured():
    futures, order = [Future() for _ in range(12)], []

    def compile_all(configs):
        assert [config.tile for config in configs] == list(range(1, 13))
        for future in futures:
            future.add_done_callback(lambda _: order.append("compiled"))
        threading.Timer(0.05, lambda: [future.set_result(None) for future in futures]).start()
        return futures

    def measure(config):
        order.append("measured")
        return config.tile

    family().tune(Problem(64, 64), measure, device=H200, compile_all=compile_all)
    assert order[:13] == ["compiled"] * 12 + ["measured"]


def test_progress_is_drawn_on_a_terminal_only(monkeypatch):
    for is_terminal in (False, True):
        stream = io.StringIO()
        stream.isatty = lambda is_terminal=is_terminal: is_terminal
        monkeypatch.setattr(sys, "stderr", stream)
        family().tune(Problem(64, 64), Clock(), device=H200)
        drawn = stream.getvalue()
        assert ("tune fake [" in drawn and f"{MEASURED}/{MEASURED}" in drawn and "best 1.0 µs" in drawn) == is_terminal
        assert drawn.endswith("\r") == is_terminal


def test_threads_measure_a_problem_once(monkeypatch):
    monkeypatch.setenv("TK_TUNE", "1")
    clock, found, chosen = Clock(), family(), []
    start = threading.Barrier(8)

    def ask():
        start.wait()
        chosen.append(found.choose(Problem(64, 64), clock, device=H200))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chosen == [Config(7)] * 8 and len(clock.calls) == MEASURED


def test_a_measured_kernel_may_ask_for_a_configuration_of_its_own():
    found, clock = family(), Clock()

    def measure(config):
        found.choose(Problem(1, 1), device=H200)
        return clock(config)

    assert found.tune(Problem(64, 64), measure, device=H200) == Config(7)


# ---- near problems


def test_distance():
    a = {"m": 64, "n": 64, "dtype": "bf16"}
    assert tune.distance(a, a) == 0
    assert tune.distance(a, {**a, "m": 128}) == pytest.approx(math.log(2) / 2)
    assert tune.distance(a, {**a, "dtype": "fp16"}) is None
    assert tune.distance(a, {**a, "m": 128}, match=("m",)) is None
    assert tune.distance({"flag": True}, {"flag": False}) is None
    assert tune.distance({"m": 0}, {"m": 0}) == 0 and tune.distance({"m": 0}, {"m": 1}) is None


@pytest.mark.parametrize(
    "problem, tile", [(Problem(80, 64), 13), (Problem(256, 256), 12), (Problem(80, 64, "fp16"), 12)]
)
def test_a_near_problems_winner_is_preferred(monkeypatch, problem, tile):
    """The model says 12 before 13, by less than the bonus; 13 was measured best for 64 x 64."""
    monkeypatch.setattr(sys.modules[__name__], "TILES", range(12, 20))
    monkeypatch.setattr(tuner, "NEAREST_FACTOR", 0.8)
    family().tune(Problem(64, 64), Clock(fast=13), device=H200)
    found = family()
    assert found.choose(problem, device=H200) == Config(tile)
    report = found.explain(problem, device=H200)
    assert report.source == ("nearest" if tile == 13 else "model")
    if tile == 13:
        factor = 0.8 + 0.2 * math.log(80 / 64) / 2 / math.log(2)
        assert report.rows[0].predicted == pytest.approx(factor * report.rows[0].cost.total)
        assert f"Times {factor:.2f} because it won when m=64 n=64 dtype=bf16 was measured." in report.reason


def twin(problem):
    yield problem._replace(dtype="tf32")
    yield problem._replace(dtype="fp16" if problem.dtype == "bf16" else "bf16")


def test_the_winner_of_a_problem_that_is_alike_is_taken(monkeypatch):
    """Whatever the model says; the first that is known. Its own measurements come first, and it is among what they
    compare."""
    family(alike=twin).tune(Problem(64, 64), Clock(fast=29), device=H200, tries=30)
    found = family(alike=twin)
    assert found.choose(Problem(64, 64, "fp16"), device=H200) == Config(29)
    report = found.explain(Problem(64, 64, "fp16"), device=H200)
    assert (report.source, report.config["tile"], report.rows[0].seconds) == ("alike", 29, None)
    assert report.reason == "Won when m=64 n=64 dtype=bf16 was measured, which is computed alike."
    assert found.explain(Problem(64, 128, "fp16"), device=H200).source == "model" and family().choose(
        Problem(64, 64, "fp16"), device=H200
    ) == Config(1)
    monkeypatch.setenv("TK_TUNE", "1")
    monkeypatch.setenv("TK_TUNE_TRIES", "2")
    clock = Clock(fast=2)
    assert found.choose(Problem(64, 64, "fp16"), clock, device=H200) == Config(2) and set(clock.calls) == {
        Config(1),
        Config(2),
        Config(29),
    }
    assert family(alike=twin).explain(Problem(64, 64, "fp16"), device=H200).source == "disk"


def test_a_winner_that_cannot_solve_a_problem_that_is_alike_is_not_taken(monkeypatch):
    family().tune(Problem(64, 64), Clock(fast=29), device=H200, tries=30)
    monkeypatch.setattr(sys.modules[__name__], "TILES", range(1, 12))
    assert family(alike=twin).explain(Problem(64, 64, "fp16"), device=H200).source == "model"


def test_a_winner_that_does_not_fit_is_not_taken_for_a_problem_that_is_alike():
    def fits_bf16(problem, config, device):
        return (
            tune.Cost(shared=math.inf)
            if problem.dtype == "fp16" and config.tile == 29
            else cost(problem, config, device)
        )

    found = tune.Family("fake", Config, candidates, fits_bf16, problem_type=Problem, match=("dtype",), alike=twin)
    found.tune(Problem(64, 64), Clock(fast=29), device=H200, tries=30)
    assert (
        found.choose(Problem(64, 64, "fp16"), device=H200) == Config(1)
        and found.explain(Problem(64, 64, "fp16"), device=H200).source == "model"
    )


# ---- what is on disk


def line(entry: store.Entry) -> bytes:
    return json.dumps({**entry.as_dict(), "device": H200_KEY.as_dict()}).encode() + b"\n"


ENTRY = store.Entry(
    "fake", Problem(64, 64)._asdict(), {"tile": 9, "stages": 2, "cluster": [1, 1]}, 1e-6, (), "2026-01-01"
)


def test_round_trip_and_later_lines_win():
    family().tune(Problem(64, 64), Clock(), device=H200)
    family().tune(Problem(64, 64), Clock(fast=5), device=H200)
    assert results().path.read_bytes().count(b"\n") == 2
    fresh = store.Store(H200_KEY, store.folder())
    (entry,) = fresh.entries().values()
    assert entry.config == {"tile": 5, "stages": 2, "cluster": [1, 1]} and entry.problem == Problem(64, 64)._asdict()
    assert len(entry.tried) == 12 and entry.tried[4].seconds == 1e-6 and entry.tried[0].predicted["tensor"] == 1e-6
    assert family().choose(Problem(64, 64), device=H200) == Config(5)


def test_results_of_other_processes_are_seen(monkeypatch):
    found = family()
    assert found.choose(Problem(64, 64), device=H200) == Config(1)
    results().path.parent.mkdir(parents=True)
    results().path.write_bytes(line(ENTRY))
    monkeypatch.setenv("TK_TUNE", "1")
    assert found.choose(Problem(64, 64), lambda config: pytest.fail("measured"), device=H200) == Config(9)


def test_a_torn_last_line_is_passed_over_with_one_warning_and_cut_off():
    results().path.parent.mkdir(parents=True)
    results().path.write_bytes(line(ENTRY) + line(ENTRY)[:-20])
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(2):
            assert family().choose(Problem(64, 64), device=H200) == Config(9)
        assert results().torn == 1
        family().tune(Problem(65, 64), Clock(), device=H200)
    assert [str(w.message) for w in caught] == [
        f"{results().path} ends in a line whose writing was interrupted: it is ignored, and cut off with the next "
        "result"
    ]
    assert len(results().entries()) == 2 and results().torn == 0


@pytest.mark.parametrize(
    "content",
    [
        b"\0" * 100,
        b"junk",
        b"junk\n" + line(ENTRY),
        line(ENTRY) + b"\n",
        b'{"family": "fake"}\n',
        b"\xff\xfe\n",
        b"[1]\n",
    ],
    ids=["zeros", "text", "first line", "empty line", "keys missing", "no UTF-8", "list"],
)
def test_a_corrupted_file_is_set_aside_with_one_warning_and_rebuilt(content):
    path = results().path
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.warns(RuntimeWarning) as caught:
        assert family().choose(Problem(640, 64), device=H200) == Config(1)
        family().tune(Problem(64, 64), Clock(), device=H200)
        assert family().choose(Problem(64, 64), device=H200) == Config(7)
    assert len(caught) == 1 and f"{path} is corrupted" in str(caught[0].message)
    assert path.with_suffix(".corrupted").read_bytes() == content
    assert len(store.Store(H200_KEY, store.folder()).entries()) == 1


def test_an_unwritable_folder_means_memory_and_one_warning(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning) as caught:
        family().tune(Problem(64, 64), Clock(), device=H200)
        family().tune(Problem(65, 64), Clock(), device=H200)
        assert family().choose(Problem(64, 64), device=H200) == Config(7)
    assert len(caught) == 1 and "set TK_CACHE_DIR" in str(caught[0].message)


def test_a_full_disk_leaves_no_part_of_a_line(monkeypatch):
    results().add(ENTRY)
    before, write = results().path.read_bytes(), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
    with pytest.warns(RuntimeWarning, match="the disk is full"):
        family().tune(Problem(65, 64), Clock(), device=H200)
    assert results().path.read_bytes() == before
    assert len(results().entries()) == 2


PROCESS = """
import pathlib, sys, time
sys.path.insert(0, {tests!r})
import test_tune
number, here = int(sys.argv[1]), pathlib.Path(sys.argv[2])
family = test_tune.family()
(here / f"ready{{number}}").touch()
while not (here / "go").exists():
    time.sleep(0.001)
for i in range(60):
    family.tune(test_tune.Problem(i, number), test_tune.Clock(), device=test_tune.H200)
"""


def test_two_processes_tuning_at_once_lose_nothing(tmp_path):
    code = PROCESS.format(tests=str(ROOT / "tests"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(n), str(tmp_path)], env=environment, cwd=tmp_path)
        for n in (1, 2)
    ]
    while not all((tmp_path / f"ready{n}").exists() for n in (1, 2)):
        assert all(process.poll() is None for process in processes)
    (tmp_path / "go").touch()
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = results().entries()
    assert {(e.problem["m"], e.problem["n"]) for e in found.values()} == {(i, n) for i in range(60) for n in (1, 2)}
    assert results().path.read_bytes().count(b"\n") == 120 and results().torn == 0


# ---- explanations


def test_explanation_of_a_measured_problem():
    found = family()
    found.tune(Problem(64, 64), Clock(broken=(2,)), device=H200)
    report = found.explain(Problem(64, 64), device=H200)
    assert (report.source, report.in_memory, report.config["tile"]) == ("measured", True, 7)
    assert len(report.rows) == 32 and report.rows[0].seconds == 1e-6 and report.rows[0].config == report.config
    assert [row.seconds for row in report.rows[1:11]] == sorted(row.seconds for row in report.rows[1:11])
    assert report.reason.startswith(
        "Measured fastest (1.00 µs, 1000.0 % before the next) of 12 measured, among 32 candidates, on 20"
    )
    text = str(report)
    assert (
        "fake m=64 n=64 dtype=bf16 on NVIDIA H200\nchosen (measured, in memory): tile=7 stages=2 cluster=[1, 1]\n"
        in text
    )
    assert (
        "all: stages=2 cluster=[1, 1]\n" in text
        and "failed: tile=2 stages=2 cluster=[1, 1]: RuntimeError: tile 2 spills" in text
    )
    winner = next(row.split() for row in text.splitlines() if row.split()[:2] == ["7", "1.00"])
    assert winner == ["7", "1.00", "7.10", "tensor", "0.06", "0.00", "0.00", "7.00", "0.00", "0.00", "0.10", "0.00"]
    assert "does not fit" in report.table()


def test_explanation_of_a_prediction():
    report = family().explain(Problem(64, 64), device=H200)
    assert (report.source, report.in_memory) == ("model", False)
    assert report.reason == "Lowest prediction of 32 candidates: 1.10 µs, bound by tensor; the next is at 2.10 µs."


def test_mistakes_in_a_family_are_named():
    with pytest.raises(ValueError, match=r"match=…'k'….*Problem has the fields m, n, dtype"):
        tune.Family("fake", Config, candidates, cost, problem_type=Problem, match=("k",))
    none = tune.Family("fake", Config, lambda problem, device: [], cost, problem_type=Problem)
    with pytest.raises(ValueError, match="no configuration can solve Problem"):
        none.choose(Problem(64, 64), device=H200)
    misfit = tune.Family("fake", Config, lambda problem, device: [Config(31)], cost, problem_type=Problem)
    with pytest.raises(ValueError, match="NVIDIA H200 can run none of the 1 configurations"):
        misfit.choose(Problem(64, 64), device=H200)
    with pytest.raises(TypeError, match="Problem.dtype=torch.bfloat16: fields are None, bool, int"):
        family().choose(Problem(64, 64, torch.bfloat16), device=H200)


# ---- tables and the command line


def command(*words, known=None):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(words), {"fake": family()} if known is None else known)


def test_export_and_use_of_a_table(capsys, monkeypatch, tmp_path):
    for m in (64, 65):
        family().tune(Problem(m, 64), Clock(fast=m - 57), device=H200)
    assert command("--export", "fake") == 0
    path = tmp_path / "tables" / "nvidia-h200-132.json"
    assert f"{path}: 2 problems of fake written; the table holds 2" in capsys.readouterr().out
    assert len(path.read_text().splitlines()) == 8  # a line for each problem
    assert path.read_text().count('"seconds"') == 2  # of the winners
    family().tune(Problem(66, 64), Clock(), device=H200)
    command("--export", "fake", "--device", "h200")
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert [family().choose(Problem(m, 64), device=H200).tile for m in (64, 65, 66)] == [7, 8, 7]
    assert command("fake", "m=65", "n=64") == 0
    assert "chosen (table): tile=8" in capsys.readouterr().out


def test_lists(capsys):
    family().tune(Problem(64, 64), Clock(), device=H200)
    assert command() == 0
    assert "fake (m, n, dtype): tuned problems: 1 on NVIDIA H200 (disk)" in capsys.readouterr().out
    assert command("fake") == 0
    assert "m=64 n=64 dtype=bf16: 1.00 µs with tile=7" in capsys.readouterr().out
    assert command("fake", "m=64", "n=64", "--device", "B200") == 0
    assert "on NVIDIA B200\nchosen (model)" in capsys.readouterr().out


@pytest.mark.parametrize("words, said", [
    (["gemm"], "gemm: no family of kernels of that name; there are fake"),
    (["fake", "k=3"], "k=3: a problem of fake is given as key=value with the keys m, n, dtype"),
    (["fake", "m=x", "n=3"], "m=x: m of fake is a value of type int"),
    (["fake", "m=3"], "a problem has the keys m, n, dtype"),
    (["fake", "m=3", "n=3", "--device", "TPU"], "Device.named('TPU'): known are H100, H200, B200"),
    (["--export", "fake"], "--export fake with no --device: one device with results in"),
    (["fake", "--export", "fake"], "--export takes the family's name"),
    (["fake", "--output", "x.json"], "only --export writes a file"),
])  # fmt: skip
def test_refusals(capsys, words, said):
    assert command(*words) == 2
    assert said in capsys.readouterr().err


def test_the_command_is_reached(capsys, monkeypatch):
    monkeypatch.setattr(cli, "registered", lambda: {"fake": family()})
    assert main(["tuned", "fake", "m=64", "n=64", "--device", "H200"]) == 0
    assert "chosen (model): tile=1" in capsys.readouterr().out


def test_a_table_belongs_to_one_device(tmp_path):
    shipped.write(tmp_path / "t.json", H200_KEY, [ENTRY])
    with pytest.raises(ValueError, match=r"is the table of NVIDIA H200 \(132 multiprocessors\), not of NVIDIA B200"):
        shipped.write(tmp_path / "t.json", store.DeviceKey("NVIDIA B200", 148, (10, 0)), [ENTRY])


def test_shipped_tables_are_of_registered_families(monkeypatch):
    """Each winner of the package's tables is a candidate of its family for its problem: else it would never be used."""
    monkeypatch.undo()
    shipped.tables.cache_clear()
    known = cli.registered()
    for table in shipped.tables():
        for entry in table.entries.values():
            found = known[entry.family]
            problem = found.problem_type(**{name: tuner._tuples(value) for name, value in entry.problem.items()})
            assert found._config(entry.config, found._options((H200, problem)), problem) is not None, (
                table.path.name,
                entry,
            )


def test_what_is_known_to_be_measured():
    choices, problem = family(), Problem(64, 64)
    assert not choices.is_measured(problem, H200) and choices.may_measure(H200)
    choices.choose(problem, device=H200)
    assert not choices.is_measured(problem, H200), "a prediction is no measurement"
    choices.tune(problem, lambda config: 1e-6 * config.tile, H200)
    assert choices.is_measured(problem, H200) and not choices.is_measured(Problem(64, 65), H200)
    choices.forget()
    assert choices.is_measured(problem, H200), "the disk has it"
    with sim.device("sm_90a"):
        assert not choices.may_measure()
