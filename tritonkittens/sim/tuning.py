"""`triton.autotune` on a simulated device: Triton's benchmarks time nothing, and the first configuration that
compiles and fits wins.

A benchmark of the user's own (`do_bench=`) runs as on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Autotuner

from .patches import Patch

if TYPE_CHECKING:
    from .device import SimulatedDevice

_RUN = Autotuner.run
_tuner = Patch(lambda: Autotuner.run, lambda run: setattr(Autotuner, "run", run))


def first_that_fits(simulated: SimulatedDevice) -> Callable[..., list[float]]:
    """Return a benchmark for autotuners. A trial compiles a configuration and launches nothing. After one that fits,
    no others are tried.
    """
    fits = False

    def bench(kernel_call: Callable[[], Any], quantiles: Any = None) -> list[float]:
        nonlocal fits
        if fits:
            return [float("inf")] * 3
        with simulated.only_trying():
            kernel_call()  # raises the errors that make Triton skip a configuration
        fits = True
        return [0.0] * 3

    return bench


@contextlib.contextmanager
def tuning_for_simulation(simulated: SimulatedDevice) -> Iterator[None]:
    """Make autotuners without a benchmark of the user's use `first_that_fits`, with Triton's own pruning and hooks,
    inside this context.

    Choices are kept per simulated device, separate from those of GPUs and of the disk. `best_config` is the
    configuration of the last run.
    """
    caches: dict[Any, dict[Any, Any]] = {}

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        of_user = tuner._do_bench is not None and not tuner._do_bench.__module__.startswith("triton.")
        bench = tuner._do_bench if of_user else first_that_fits(simulated)
        own = dict(cache=caches.setdefault(tuner, {}), cache_results=False, do_bench=bench)
        before = {name: vars(tuner)[name] for name in own if name in vars(tuner)}
        vars(tuner).update(own)
        try:
            return _RUN(tuner, *args, **kwargs)
        finally:
            for name in own:
                del vars(tuner)[name]
            vars(tuner).update(before)

    with _tuner(run):
        yield
