"""The GEMM's cost model against the committed sample of random shapes, and the script that fits it."""

import dataclasses
import math

import numpy as np
import pytest

from bench import gemm_fit, gemm_sample
from bench.gemm_random import Shape, has_aligned_rows
from tritonkittens import tune
from tritonkittens.kernels.gemm import Config
from tritonkittens.kernels.gemm.cost_model import CONSTANTS, Constants, cost

H200 = tune.Device.named("H200")


@pytest.fixture(scope="module")
def data():
    return gemm_fit.Measurements(gemm_sample.Sample.read(gemm_sample.SAMPLE), H200)


def test_the_models_choices_are_nearly_the_fastest_of_the_sample(data):
    """As docs/notes/gemm_model.md says of the committed constants."""
    regret = data.regret(CONSTANTS, range(len(data.shapes)))
    assert len(data.shapes) == 192 and len(data.seconds) == 5197
    assert np.exp(np.log(regret).mean()) < 1.03 and regret.max() < 1.25
    assert (regret > 1.05).mean() < 0.2


def test_predictions_of_many_are_those_of_each(data):
    together = data.predicted(CONSTANTS)
    for i in range(0, len(together), 97):
        config = Config.from_text(data.configs[i])
        alone = cost(gemm_sample.problem_of(data.shapes[data.groups[i]]), config, H200).total
        assert together[i] == pytest.approx(alone, rel=1e-12)


def test_a_fit_finds_back_what_the_times_were_made_with(rng, data):
    """Times that the model itself has made with other constants: the fit approaches them, and its choices are right."""
    changed = dataclasses.replace(CONSTANTS, stage_rate=30.0, two_consumers=80.0, launch=5.0)
    shapes = rng.choice(len(data.shapes), 12, replace=False)
    made = data.predicted(changed) * 1e6
    rows = {data.shapes[g]: {data.configs[i]: float(made[i]) for i in data.members[g]} for g in sorted(shapes.tolist())}
    few = gemm_fit.Measurements(gemm_sample.Sample({}, rows), H200)
    seen = np.ones(len(few.shapes), dtype=bool)
    found = gemm_fit.fitted(few, CONSTANTS, seen, 400, 0)
    assert few.error(changed, seen) < 1e-9 and few.error(found, seen) < 0.3 * few.error(CONSTANTS, seen)


def test_rows_that_tma_cannot_address_are_left_out():
    odd, even = Shape(100, 101, 103, "NN"), Shape(104, 104, 104, "NN")
    times = {"cublas": 5.0, gemm_sample.text_of(Config()): 6.0, gemm_sample.text_of(Config(tile_n=128)): 5.5}
    found = gemm_fit.Measurements(gemm_sample.Sample({}, {odd: dict(times), even: dict(times)}), H200)
    assert not has_aligned_rows(odd) and found.shapes == [even] and len(found.seconds) == 2
    assert found.regret(CONSTANTS, [0]) in ([1.0], [pytest.approx(6 / 5.5)])


def test_a_sample_is_read_as_it_was_written(tmp_path):
    times = {
        "cublas": 1.5,
        gemm_sample.text_of(Config(tile_n=96, swap_ab=True)): 2.5,
        gemm_sample.text_of(Config()): 3.0,
    }
    sample = gemm_sample.Sample({"gpu": "some"}, {Shape(1, 2, 3, "NT"): times, Shape(4, 5, 6, "TN"): {"cublas": 9.0}})
    sample.write(tmp_path / "sample.json")
    assert gemm_sample.Sample.read(tmp_path / "sample.json") == sample
    assert gemm_sample.Sample.read(tmp_path / "none.json") == gemm_sample.Sample({}, {})
    assert Config.from_text(gemm_sample.text_of(Config(cluster=2))) == Config(cluster=2)


def test_constants_are_written_into_the_source(monkeypatch, tmp_path):
    copy = tmp_path / "cost_model.py"
    copy.write_text(open(gemm_fit.cost_model.__file__).read())
    monkeypatch.setattr(gemm_fit.cost_model, "__file__", str(copy))
    new = Constants(*(float(i) + 0.5 for i in range(len(dataclasses.fields(Constants)))))
    gemm_fit.write(new)
    for name, value in dataclasses.asdict(new).items():
        assert f"    {name}: float = {value}  #" in copy.read_text()


def test_what_is_tried_begins_with_the_models_first(monkeypatch):
    monkeypatch.setattr(tune.Device, "of", staticmethod(lambda index=None: H200))
    shape = Shape(512, 1024, 4096, "NT")
    best = gemm_sample.tried(shape, 5, 0)
    assert len(best) == 5 and gemm_sample.tried(shape, 2, 0) == best[:2]
    shared = gemm_sample.tried(shape, 5, 2)
    assert shared[:5] == best and len(shared) == len(set(shared)) > 5
    tails = [config for config in shared[5:] if config.schedule == "split_tail"]
    tiles = [math.prod(config.tiles(gemm_sample.problem_of(shape))) for config in tails]
    assert tiles and min(tiles) >= H200.multiprocessors, "split-K splits fewer tasks, which is faster"
