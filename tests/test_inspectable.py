"""The kernels that can be inspected: every schedule, activation, place of an operand, scale mode and kernel class
occurs among them. None is compiled here."""

import importlib
import pkgutil

import pytest
import torch

import tritonkittens.lang as tk
from tests.test_device_code import is_whole, subclasses
from tritonkittens import kernels
from tritonkittens.inspect.cli import registry
from tritonkittens.kernels._inspection import Inspectable, h200, launches_of
from tritonkittens.kernels.gemm import BlockwiseGemm, Config, Gemm, gemm
from tritonkittens.kernels.gemm.checks import FP8, RESULTS
from tritonkittens.kernels.gemm.checks import OPERANDS as GEMM_TYPES
from tritonkittens.kernels.gemm.config import ORDERS, SCHEDULES
from tritonkittens.kernels.gemm.device.epilogue import ACTIVATIONS
from tritonkittens.kernels.gemm.epilogue import PREFIX
from tritonkittens.launch import PlainKernel, simulator
from tritonkittens.launch.arguments import argument_types

KERNELS = registry()


@pytest.fixture(scope="module")
def launches():
    return {name: kernel.launch() for name, kernel in KERNELS.items()}


@pytest.fixture(scope="module")
def templates(launches):
    """Those of launches of template kernels; others have none."""
    constants = [launch.key[0][0][0] for launch in launches.values() if isinstance(launch.key, tuple)]
    return [template for template in constants if isinstance(template, tk.lcf)]


@pytest.fixture(scope="module")
def products(templates):
    return [template for template in templates if type(template) is Gemm]


def modules():
    names = [m.name for m in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + ".")]
    return [importlib.import_module(name) for name in names]


def test_every_kernel_is_one_that_an_operator_launches():
    assert all(isinstance(kernel, Inspectable) for kernel in KERNELS.values())


def test_no_two_names_stand_for_one_kernel(launches):
    seen = {}
    for name, launch in launches.items():
        key = (id(launch.launcher), launch.key, argument_types(launch.args))
        assert seen.setdefault(key, name) == name, f"{name} is {seen[key]}"


def test_every_template_class_and_plain_kernel_occurs(launches, templates):
    used = {type(template) for template in templates}
    shipped = {cls for cls in subclasses(tk.lcf) if cls.__module__.startswith(kernels.__name__) and is_whole(cls)}
    assert shipped and {cls.__name__ for cls in shipped - used} == set()
    plain = {
        name: value for module in modules() for name, value in vars(module).items() if isinstance(value, PlainKernel)
    }
    launchers = {id(launch.launcher) for launch in launches.values()}

    def is_launched(kernel):
        return any(id(variant.launcher) in launchers for variant in (kernel, *kernel.variants.values()))

    assert plain and {name for name, kernel in plain.items() if not is_launched(kernel)} == set()


def test_every_schedule_and_order_of_products_occurs(products):
    made = {
        schedule: type(Config(schedule=schedule, splits=2 if "split_k" in schedule else 1).scheduler())
        for schedule in SCHEDULES
    }
    assert set(made.values()) <= {type(template.schedule) for template in products}
    assert len({type(template.order) for template in products}) >= len(ORDERS)


def test_every_schedule_class_of_attention_occurs(templates):
    """Persistent, dynamic, shared by a cluster, and split where tasks do not divide evenly."""
    used = {type(template.schedule) for template in templates if not isinstance(template, (Gemm, BlockwiseGemm))}
    assert {tk.Persistent, tk.Dynamic, tk.ClusterSplitK, tk.SplitRest} <= used


def test_every_epilogue_occurs(products):
    def functions(products):
        return {step.function for template in products for step in template.epilogue.steps}

    built_in = {function for function in ACTIVATIONS.values() if function}
    assert built_in <= functions(products) and built_in <= functions(
        template for template in products if template.deferred_epilogue
    )
    assert any(not template.epilogue.steps for template in products)
    assert any(template.activation_steps for template in products) and any(template.gates_late for template in products)
    assert {template.reloaded_subtiles for template in products} == {0, 1, 2}
    operands = [operand for template in products for operand in template.epilogue.operands]
    places = {
        name: {operand.place for operand in operands if operand.name == name}
        for name in ("scale_a", "scale_b", "bias", "gate")
    }
    assert places == {
        "scale_a": {"scalar", "row", "col"},
        "scale_b": {"scalar", "col", "row"},
        "bias": {"scalar", "col", "row"},
        "gate": {"scalar", "row", "col", "tile"},
    }
    assert any(template.epilogue.residual for template in products)
    of_users = [
        operand
        for template in products
        for step in template.epilogue.steps
        for operand in step.operands
        if operand.name.startswith(PREFIX)
    ]
    assert {operand.place for operand in of_users} == {"row", "col", "staged", "number"}


def test_every_kind_of_operands_of_products_occurs(products, templates):
    assert {(t.a_stored_km, t.b_stored_nk) for t in products} == {(a, b) for a in (False, True) for b in (False, True)}
    assert {t.dtype for t in products} == {tk.from_torch(dtype) for dtype in GEMM_TYPES}
    assert {tk.from_torch(dtype) for dtype in RESULTS} - {tk.from_torch(FP8[1])} <= {t.out_dtype for t in products}
    assert {t.accumulate for t in products} == {tk.fp32, tk.fp16} and {t.batched for t in products} == {False, True}
    assert {t.consumers for t in products} == {1, 2, 3, 4} and {t.cluster for t in products} == {1, 2, 4}
    assert {t.pingpong for t in products} == {t.c_stored_nm for t in products} == {False, True}
    assert {t.cache_hint for t in products} == {None, "evict_first"}
    assert {t.tile_n for t in templates if isinstance(t, BlockwiseGemm)} == {128, 256}


def test_a_launch_that_has_no_name_is_found():
    def call():
        a = torch.empty(128, 64, dtype=torch.bfloat16)
        return gemm(a, a.T, config=Config(tile_n=64, consumers=1)), gemm(a, a.T, config=Config(tile_n=128, consumers=1))

    first, second = (launches_of(call, "one", "two")[name].template for name in ("one", "two"))
    assert (first.tile_n, second.tile_n) == (64, 128) and simulator.get() is None and h200().index == -1
    (only,) = launches_of(call, "one").values()
    with pytest.raises(RuntimeError, match="2 kernel launches; 1 are named"):
        only.launch()


def test_importing_kernels_does_not_list_them():
    assert "inspectable" not in vars(kernels.gemm) and "inspectable" not in vars(kernels.attention)
