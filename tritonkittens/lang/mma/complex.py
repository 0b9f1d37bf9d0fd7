"""Complex tiles: what operations of the language do with pairs of a real and an imaginary tile.

`op` calls a rule of this module where an operand is complex. An operation that is linear works on each component.
Products of complex numbers are four real products, or two where one operand is real.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl

from tritonkittens.inline_ptx import math as ptx_math
from tritonkittens.lang.core.backend import Trace, Traced, complex_rules, is_complex, op
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import TileError
from tritonkittens.lang.core.records import apply_pieces, struct, struct_type
from tritonkittens.lang.memory.global_access import load
from tritonkittens.lang.memory.shared_tiles import shared
from tritonkittens.lang.memory.tensor_memory import tensor_tile
from tritonkittens.lang.mma import mma
from tritonkittens.lang.register.elementwise import add, neg, sub

Operation = Callable[..., Traced]

# Operations that work on each component. Those of the second set take a complex first and second operand.
BY_COMPONENT = ("zero", "neg", "cast", "copy", "load", "allocate", "subtile", "transpose", "swap_layout", "where")
OF_TWO = ("add", "sub", "store", "load_async", "store_async")
PRODUCTS = ("mul", "mul_row", "mul_col")


class complex_type(struct_type):
    """The type of a complex tile."""

    def mangle(self) -> str:
        return "C" + super().mangle()

    def _unflatten_ir(self, handles: list[Any], cursor: int) -> tuple[complex, int]:
        parts, cursor = super()._unflatten_ir(handles, cursor)
        return complex(**parts.fields), cursor


class complex(struct):
    """A complex tile or vector in a kernel: `real` and `imag` are two tiles of one type, wherever they lie.

    `zero`, `allocate`, `load`, `store`, `load_async`, `store_async`, `subtile`, `cast`, `transpose`, `where`, `add`,
    `sub`, `neg`, `mul`, `mul_row`, `mul_col`, `conj`, `mma_*`, `mm_*` and `mma_wait` take complex tiles. Other
    operations take a component, `x.real`. `tk.crt`, `tk.cst` and `tk.csv` are types of complex tiles.

    Example::

        z = tk.complex(tk.load(a), tk.load(b))
        z = tk.mul(tk.mm_AB(z, table), twiddles)
    """

    is_complex = True
    outside_registers = "this tile is complex; the operation takes a component, x.real or x.imag"

    def __init__(self, real: Traced, imag: Traced):
        super().__init__(real=real, imag=imag)

    @property
    def nbytes(self) -> int:
        """Bytes of a tile in shared memory."""
        return int(self.real.nbytes + self.imag.nbytes)

    @property
    def type(self) -> complex_type:
        return complex_type(tuple((n, v.type) for n, v in self.fields.items()))


def _part(x: Traced, name: str) -> Traced:
    return getattr(x.value if isinstance(x, tl.constexpr) else x, name) if is_complex(x) else x


def _by_component(t: Trace, fn: Operation, *args: Traced, **kwargs: Traced) -> Traced:
    """Compute each component; real operands and other arguments serve both."""
    real, imag = (
        fn(t, *(_part(x, name) for x in args), **{key: _part(x, name) for key, x in kwargs.items()})
        for name in ("real", "imag")
    )
    return None if real is None else complex(real, imag)


def _of_two(t: Trace, fn: Operation, a: Traced, b: Traced, *args: Traced, **kwargs: Traced) -> Traced:
    if not is_complex(a) or not is_complex(b):
        raise TileError(f"{fn.__name__}: one operand is complex and one is real; give both as tk.complex(real, imag)")
    return _by_component(t, fn, a, b, *args, **kwargs)


def _multiply(t: Trace, fn: Operation, a: Traced, b: Traced) -> Traced:
    """Compute a · b, element by element."""
    if not (is_complex(a) and is_complex(b)):
        return _by_component(t, fn, a, b)
    real = t.call(sub, fn(t, a.real, b.real), fn(t, a.imag, b.imag))
    return complex(real, t.call(add, fn(t, a.real, b.imag), fn(t, a.imag, b.real)))


def _of_accumulator(fn: Operation) -> Callable[..., Traced]:
    """Return the rule of mma_* (`a`, `b`, `acc`), or of mm_* where the accumulators are new."""
    plain = fn.__name__.startswith("mm_")
    multiply_add: Callable[..., Traced] = getattr(mma, fn.__name__.replace("mm_", "mma_"))

    def product(t: Trace, _: Operation, a: Traced, b: Traced, acc: Traced = None, wait: Traced = True) -> Traced:
        wait = unwrap(wait)
        if not plain and not is_complex(acc):
            raise TileError(f"{fn.__name__}: the accumulator is real and an operand complex; give a complex one")

        def first(x: Traced, y: Traced, part: str) -> Traced:
            return fn(t, x, y, wait=False) if plain else fn(t, x, y, _part(acc, part), wait=False)

        if not (is_complex(a) and is_complex(b)):
            real, imag = (first(_part(a, part), _part(b, part), part) for part in ("real", "imag"))
        else:
            real, imag = first(a.real, b.real, "real"), first(a.real, b.imag, "imag")
            imag = t.call(multiply_add, a.imag, b.real, imag, wait=False)
            real = t.call(multiply_add, _negated(t, fn, a.imag), b.imag, real, wait=False)
        return t.call(mma.mma_wait, complex(real, imag)) if wait else complex(real, imag)

    return product


def _negated(t: Trace, fn: Operation, x: Traced) -> Traced:
    """Return −x, an operand of a product, in registers."""
    if isinstance(x, tensor_tile):
        raise TileError(f"{fn.__name__}: A is complex in tensor memory; its imaginary part is negated in registers")
    if isinstance(x, shared):
        if fn.__name__.endswith(("_AtB", "_AtBt")):
            raise TileError(
                f"{fn.__name__}: A is complex in shared memory; its imaginary part is negated in registers, which "
                "hold A as M×K: transpose it there, tk.transpose(tk.load(a))"
            )
        x = t.call(load, x)
    packed = not t.interpreted and x.dtype.primitive_bitwidth == 16  # the compiler negates such elements one by one
    return apply_pieces(t, lambda piece: t.call(ptx_math.neg, piece), x) if packed else t.call(neg, x)


def _wait(t: Trace, _: Operation, *products: Traced, leave: Traced = ()) -> Traced:
    later = leave if isinstance(leave, (tuple, list, tl.tuple)) else (leave,)
    flat = [part for p in products for part in _parts(p)]
    done = iter(t.call(mma.mma_wait, *flat, leave=tuple(part for p in later for part in _parts(p))))
    found = [complex(next(done), next(done)) if is_complex(p) else next(done) for p in products]
    return found[0] if len(found) == 1 else tl.tuple(found)


def _parts(x: Traced) -> tuple[Traced, ...]:
    return (x.real, x.imag) if is_complex(x) else (x,)


complex_rules |= dict.fromkeys(BY_COMPONENT, _by_component)
complex_rules |= dict.fromkeys(OF_TWO, _of_two)
complex_rules |= dict.fromkeys(PRODUCTS, _multiply)
complex_rules["mma_wait"] = _wait
for _name in mma.FAMILIES:
    complex_rules[_name] = _of_accumulator(getattr(mma, _name).__wrapped__)


@op
def conj(t: Trace, x: Traced) -> Traced:
    """Return the complex conjugate of a complex tile `x`. Raises `TileError` for a real one."""
    if not is_complex(x):
        raise TileError(f"conj: takes a complex tile (tk.complex), got {x!r}")
    return complex(x.real, t.call(neg, x.imag))


__all__ = ["complex", "conj"]
