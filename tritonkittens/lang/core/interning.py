"""Classes whose objects are constants: a call with equal arguments returns the same, immutable object.

Finding an object again is hundreds of times faster than constructing it, so a call site may construct it at each call.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from tritonkittens.lang.core.errors import TileError

MAX_CALLS = 256  # constructor calls that a class remembers; a new one evicts the oldest
AMBIGUOUS = (float, tuple)  # types with values that compare equal but differ
_lock = threading.RLock()


def _exact(value: Any) -> Any:
    """Return a key that distinguishes values which Python compares as equal: True and 1, 1 and 1.0, 0.0 and −0.0,
    also inside tuples.
    """
    kind = value.__class__
    if kind is tuple:
        return kind, tuple([_exact(v) for v in value])
    return (kind, value.hex()) if kind is float else (kind, value)


class InterningMeta(type):
    """The metaclass of `Interned` classes. Every class has its own objects, also a class of equal name.

    A class attribute that is set later, such as the default of a knob, applies to objects made from then on.
    """

    _found: dict[Any, Any]  # objects by constructor arguments
    _alive: weakref.WeakValueDictionary[Any, Any]  # objects by identity

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any):
        super().__init__(name, bases, namespace, **options)
        type.__setattr__(cls, "_found", {})
        type.__setattr__(cls, "_alive", weakref.WeakValueDictionary())

    def __call__(cls, *args: Any, **knobs: Any) -> Any:
        key = args, tuple(knobs.items()), tuple(map(type, knobs.values()))
        try:
            return cls._found[key]
        except KeyError:
            return cls._make(key, args, knobs)
        except TypeError:
            unhashable = next(
                (
                    f"{n}={v!r}"
                    for n, v in [*((f"argument {i}", a) for i, a in enumerate(args)), *knobs.items()]
                    if not _is_hashable(v)
                ),
                None,
            )
            if unhashable is None:
                raise
            raise TileError(
                f"{cls.__name__}({unhashable}): a knob is a constant of the kernel; give a hashable value, such as a "
                "tuple"
            ) from None

    def _make(cls, key: Any, args: tuple[Any, ...], knobs: dict[str, Any]) -> Any:
        if args or any(isinstance(value, AMBIGUOUS) for value in knobs.values()):
            key = tuple(map(_exact, args)), tuple([(n, _exact(v)) for n, v in knobs.items()])
        with _lock:
            found = cls._found.get(key)
            if found is None:
                made = super().__call__(*args, **knobs)
                made.__dict__["_given"] = args, knobs
                found = cls._alive.setdefault(made._identity, made)
                while len(cls._found) >= MAX_CALLS:
                    del cls._found[next(iter(cls._found))]
                cls._found[key] = found
            return found

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        cls._forget()

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        cls._forget()

    def _forget(cls) -> None:
        """Forget all objects of this class and of its subclasses; later calls construct new ones."""
        with _lock:
            cls._found.clear()
            cls._alive.clear()
            derived: Any
            for derived in cls.__subclasses__():
                derived._forget()


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


class Interned(metaclass=InterningMeta):
    """An object that equal constructor arguments find again. A copy is the object itself; unpickling finds the object
    of its arguments.
    """

    @property
    def _identity(self) -> Any:
        """A hashable value that is equal for two objects only if they are interchangeable."""
        raise NotImplementedError

    def _described_change(self, name: str) -> str:
        """Return the error text for an attribute that is set after construction."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        if "_given" in self.__dict__:
            raise TileError(
                f"{type(self).__name__}: {name} = {value!r} after construction: {self._described_change(name)}"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if "_given" in self.__dict__:
            raise TileError(f"{type(self).__name__}: del {name} after construction: {self._described_change(name)}")
        super().__delattr__(name)

    def __copy__(self) -> Interned:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Interned:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _construct, (type(self), *self.__dict__["_given"])


def _construct(cls: type, args: tuple[Any, ...], knobs: dict[str, Any]) -> Any:
    return cls(*args, **knobs)
