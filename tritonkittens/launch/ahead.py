"""Kernels that are compiled before their launch, in threads.

Triton's compiler holds Python's lock only while it traces a kernel, a fifth of its time. So kernels are traced one
after the other, and all else of them is compiled at the same time. A launch whose kernel is being compiled waits for
it; what fails here is compiled again at the launch, which raises the error.

TK_COMPILE_WORKERS is the number of threads: 8, or the CPUs but one if those are fewer. With 0 no launch has others
compiled, and what is asked for is compiled by one thread.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from triton.runtime.cache import triton_key

from .arguments import Types
from .device import capability

if TYPE_CHECKING:
    from .recorder import RecordedLaunch

MOST_WORKERS = 8
SHORT_TURN = 1e-4  # seconds
Task = Callable[[], Any]


def workers() -> int:
    """Return the number of threads: TK_COMPILE_WORKERS, or 8, at most the CPUs of this process but one.

    Raises:
        ValueError: TK_COMPILE_WORKERS is no number from 0 on.
    """
    value = os.environ.get("TK_COMPILE_WORKERS") or str(min(MOST_WORKERS, len(os.sched_getaffinity(0)) - 1))
    if not value.isdecimal():
        raise ValueError(f"TK_COMPILE_WORKERS={value!r}: the number of threads that compile is an integer from 0 on")
    return int(value)


class _Pool:
    """Threads that live while there are tasks. When the process ends, tasks that have not begun are dropped."""

    def __init__(self) -> None:
        self.lock, self.tasks, self.threads = threading.Lock(), deque[tuple[Future[Any], Task]](), 0

    def submit(self, task: Task) -> Future[Any]:
        future: Future[Any] = Future()
        with self.lock:
            self.tasks.append((future, task))
            is_short_of_threads = self.threads < max(1, workers())
            self.threads += is_short_of_threads
        if is_short_of_threads:
            threading.Thread(target=self._work, name="tritonkittens compiler").start()
        return future

    def _work(self) -> None:
        while True:
            with self.lock:
                while self.tasks and not threading.main_thread().is_alive():
                    self.tasks.popleft()[0].cancel()
                if not self.tasks:
                    self.threads -= 1
                    return
                future, task = self.tasks.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            del future, task


class _State:
    """What is being compiled, by `RecordedLaunch.identity`, and what is prepared once in a process, by its task."""

    def __init__(self) -> None:
        self.pool, self.front_end = _Pool(), threading.RLock()
        self.pending: dict[Hashable, Future[Any]] = {}
        self.prepared: dict[Task, Future[Any]] = {}


_state = _State()


def _forget() -> None:
    """A forked process has none of the threads."""
    global _state
    _state = _State()


os.register_at_fork(after_in_child=_forget)


def submit(task: Task) -> Future[Any]:
    """Run a task in a thread."""
    return _state.pool.submit(task)


def prepare(task: Task) -> Future[Any]:
    """Run a task in a thread, once in a process. It keeps its result: a second run costs nothing."""
    found = _state.prepared.get(task)
    return _state.prepared.setdefault(task, submit(task)) if found is None else found


def prepared(task: Task) -> Any:
    """Return the result of a task of `prepare`. One that has not begun runs here."""
    future = prepare(task)
    return task() if future.cancel() else future.result()


def begin(launches: Sequence[RecordedLaunch]) -> list[Future[Any]]:
    """Compile the kernels of launches, each for the device that was recorded. Returns a future of the CompiledKernel
    for each launch; equal kernels have one future.
    """
    return [_begin(launch, _state) for launch in launches]


def _begin(launch: RecordedLaunch, state: _State) -> Future[Any]:
    identity = launch.identity
    future = state.pending.get(identity)
    if future is None:
        future = state.pending[identity] = state.pool.submit(launch.compile)
        # Triton's cache on disk has it then
        future.add_done_callback(lambda _: state.pending.pop(identity, None))
    return future


def take(launcher: Any, key: Hashable, types: Types, device: int) -> Any:
    """Return the CompiledKernel that is being compiled for a launch, after waiting for it; None where there is none,
    or where that failed. A kernel whose compilation has not begun is left to the caller.
    """
    if not _state.pending:
        return None
    future = _state.pending.pop((launcher, key, types, capability(device)), None)
    if future is None or future.cancel():
        return None
    return None if future.exception() else future.result()


_following: ContextVar[Task | None] = ContextVar("following", default=None)


@contextlib.contextmanager
def followed_by(task: Task) -> Iterator[None]:
    """Run `task` in a thread as soon as a kernel has to be compiled inside the `with` statement: `task` begins to
    compile what is launched next.
    """
    token = _following.set(task)
    try:
        yield
    finally:
        _following.reset(token)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Trace a kernel: no other thread does meanwhile. Begins with what follows it (`followed_by`).

    A trace makes many objects and no garbage: Python's collector, which looks through all objects of the process
    again and again, pauses.
    """
    with _state.front_end:
        task = _following.get()
        if task is not None:
            _following.set(None)
            submit(task)
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def hash_of_triton() -> str:
    """Return Triton's hash of itself, which the first kernel of a process needs.

    The hash takes half a second of another CPU, while the modules that import this one are read. It takes Python's lock
    a thousand times. A thread that reads modules keeps the lock until another has waited for it, 5 ms by default:
    meanwhile threads take turns of `SHORT_TURN`.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SHORT_TURN)
    try:
        return str(triton_key())
    finally:
        sys.setswitchinterval(usual)


prepare(hash_of_triton)
