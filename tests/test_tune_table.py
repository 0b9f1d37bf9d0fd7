"""Pruning of the shipped table, `python -m bench.tune_table --prune`, with a dictionary as clock."""

import dataclasses

import pytest

from bench import gemm, tune_table
from tritonkittens import tune
from tritonkittens.arch import GPUS
from tritonkittens.kernels.gemm import Config, Problem, family
from tritonkittens.kernels.gemm.call_plan import CallPlan
from tritonkittens.launch import Device as Facts
from tritonkittens.launch.recorder import Recorder
from tritonkittens.tune import shipped, store

H200 = tune.Device.named("H200")
H200_KEY = store.DeviceKey(H200.name, H200.multiprocessors, H200.capability)
PACKAGED = shipped.TABLES
NT = Problem("bf16", "bf16", "mk", "nk", "", "", 1, 1024, 3072, 2048)
NN, SMALL = NT._replace(b="kn"), NT._replace(m=64, n=576, k=8192)


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """Tables of this test only, and no results on disk."""
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(shipped, "TABLES", tmp_path / "tables")
    shipped.tables.cache_clear()
    family.forget()
    yield
    shipped.tables.cache_clear()
    family.forget()


def ranked(problem):
    """The model's configurations of a problem, the best first."""
    rows = sorted(family.explain(problem, H200).rows, key=lambda row: row.predicted)
    return [Config(**row.config) for row in rows]


def written(name, device, configs):
    """A table of these configurations by problem."""
    path = shipped.TABLES / f"{name}.json"
    shipped.write(
        path, device, [store.Entry("gemm", p._asdict(), dataclasses.asdict(c), 1e-5) for p, c in configs.items()]
    )
    family.forget()
    return shipped.read(path)


def pruned(table, folder, seconds):
    """The entries that stay, by problem, and what was compared. `seconds`: of each configuration, by problem."""
    compared = []

    def measure(pairs):
        compared.append(dict(pairs))
        return [(p, seconds[p][second] / seconds[p][first]) for p, (first, second) in pairs.items()]

    folder.mkdir()
    path = tune_table.pruned(table, folder, measure, H200)
    entries = shipped.read(path).entries.values()
    return {Problem(**entry.problem): Config(**entry.config) for entry in entries}, compared


def test_entries_stay_that_are_two_percent_faster_than_the_models_choice(tmp_path, capsys):
    best, second = {p: ranked(p)[0] for p in (NT, SMALL)}, {p: ranked(p)[1] for p in (NT, SMALL)}
    table = written("h200", H200_KEY, second)
    seconds = {NT: {best[NT]: 1.03, second[NT]: 1.0}, SMALL: {best[SMALL]: 1.01, second[SMALL]: 1.0}}
    kept, compared = pruned(table, tmp_path / "new", seconds)
    assert kept == {NT: second[NT]}
    assert compared == [{p: (second[p], best[p]) for p in (NT, SMALL)}]
    printed = capsys.readouterr().out
    assert "bf16 bf16 mk nk 1 1024 3072 2048: kept, 1.030" in printed
    assert "bf16 bf16 mk nk 1 64 576 8192: dropped, 1.010" in printed


def test_an_entry_with_the_models_choice_is_dropped_without_a_measurement(tmp_path):
    table = written("h200", H200_KEY, {p: ranked(p)[0] for p in (NT, SMALL)})
    assert pruned(table, tmp_path / "new", {}) == ({}, [])


def test_an_entry_is_compared_again_where_another_that_stays_changes_its_choice(tmp_path):
    """NN without its entry is computed as NT, which is alike, as soon as NT has one."""
    first, (best, second, third) = ranked(NT)[0], ranked(NN)[:3]
    table = written("h200", H200_KEY, {NT: third, NN: second})
    seconds = {NT: {first: 2.0, third: 1.0}, NN: {best: 1.0, second: 1.0, third: 1.5}}
    kept, compared = pruned(table, tmp_path / "new", seconds)
    assert [set(pairs) for pairs in compared] == [{NT, NN}, {NN}] and compared[1][NN] == (second, third)
    assert kept == {NT: third, NN: second}


def test_tables_of_similar_devices_decide_where_the_pruned_one_does_not(tmp_path):
    best, second, third = ranked(NT)[:3]
    h100 = tune.Device.named("H100")
    other = written("h100", store.DeviceKey(h100.name, h100.multiprocessors, h100.capability), {NT: third})
    table = written("h200", H200_KEY, {NT: second})
    kept, compared = pruned(table, tmp_path / "new", {NT: {best: 2.0, second: 1.0, third: 1.0}})
    assert compared == [{NT: (second, third)}] and kept == {}
    assert shipped.read(tmp_path / "new" / "h100.json").entries == other.entries


def test_every_entry_of_the_h200_is_a_product_of_the_benchmarks(without_memory):
    """So that --prune and a new measurement find its operands."""
    tables = [shipped.read(path) for path in PACKAGED.glob("*.json")]
    entries = next(table.entries for table in tables if table.device == H200_KEY)
    found = without_memory(tune_table.problems)
    assert entries and {Problem(**entry.problem) for entry in entries.values()} <= set(found)


@pytest.fixture
def without_memory(monkeypatch):
    """Operands of the benchmarks without memory, on a device that runs nothing."""
    monkeypatch.setattr(gemm, "DEVICE", "meta")
    return Recorder(Facts.of_gpu(GPUS["H200"])).run


def test_gains_are_ratios_of_interleaved_rounds(monkeypatch, capsys, without_memory):
    fast, slow, broken = Config(), Config(tile_n=128), Config(tile_n=96)
    calls, compiled = [], []

    def seconds(config):
        calls.append(config)
        if config == broken:
            raise RuntimeError("the kernel spills")
        return len(calls) * (1.0 if config == fast else 1.5)  # the clock drifts

    monkeypatch.setattr(CallPlan, "measurement", lambda self, a, b, operands: seconds)
    monkeypatch.setattr(tune_table, "compile_in_parts", lambda wanted, workers: compiled.append((wanted, workers)))
    found = {p: (name, lambda: gemm.bf16(64, 64, 64)) for p, name in ((NT, "nt"), (NN, "nn"))}
    pairs = {NT: (slow, fast), NN: (broken, fast)}
    gained = without_memory(lambda: dict(tune_table.gains(pairs, found, 3)))
    assert list(gained) == [NT] and gained[NT] == pytest.approx(1 / 1.5, rel=0.1)
    assert calls.count(slow) == calls[: 2 * tune_table.ROUNDS].count(fast) == tune_table.ROUNDS
    assert compiled == [({"nt": (slow, fast), "nn": (broken, fast)}, 3)]
    assert "bf16 bf16 mk kn 1 1024 3072 2048: RuntimeError: the kernel spills" in capsys.readouterr().out
