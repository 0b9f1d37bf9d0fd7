"""Simulated devices of several threads."""

import threading

import pytest
from triton import knobs
from triton.compiler import compiler
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner

from tritonkittens import sim


def of_triton():
    return knobs.runtime.add_stages_inspection_hook, compiler.get_cache_key, driver._active, Autotuner.run


@pytest.mark.parametrize("nested", [False, True])
def test_contexts_that_end_in_any_order_leave_triton_as_it_was(nested):
    before, began, ended = of_triton(), threading.Event(), threading.Event()

    def work():
        with sim.device():
            began.set()
            assert ended.wait(60)

    thread = threading.Thread(target=work)
    with sim.device():
        alone = of_triton()
        thread.start()
        assert began.wait(60)
        if nested:
            with sim.device():
                pass
    still = of_triton()
    ended.set()
    thread.join()
    assert of_triton() == before
    assert all(a is not b for a, b in zip(still, before, strict=True)), "the thread's device was still there"
    assert alone[0] is still[0], "kernels are compiled for the simulator"
