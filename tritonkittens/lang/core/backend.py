"""The only module of `lang` that uses Triton's internals and Gluon's names. A new Triton release is ported here.

`op` makes a device function of the language from a Python function that runs while a kernel is traced (or, under
Triton's interpreter, interpreted).
Its first parameter is the `Trace`: the place in the program, and the means to emit code there.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import triton.language as tl
from triton import knobs
from triton._C.libtriton import gluon_ir, ir, passes
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language._layouts import DistributedLayout
from triton.experimental.gluon.language._semantic import GluonSemantic
from triton.experimental.gluon.language.nvidia import blackwell, hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_scaled,
    tensor_memory_descriptor_type,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import base_type, base_value
from triton.runtime.interpreter import InterpretedFunction, interpreter_semantic
from triton.runtime.jit import JITFunction

from tritonkittens.arch import Chip, chip_of, require_feature
from tritonkittens.inline_ptx._traced import Semantic, Traced
from tritonkittens.lang.core import interpreter as _interpreter
from tritonkittens.lang.core.constants import unwrap
from tritonkittens.lang.core.errors import ArchitectureError, TileError
from tritonkittens.lang.core.mistakes import plain_error
from tritonkittens.lang.core.resources import bill
from tritonkittens.launch.ahead import tracing
from tritonkittens.launch.fallbacks import ATTRIBUTE

__all__ = [
    "ArchitectureError",
    "Callee",
    "DistributedLayout",
    "ExplicitSource",
    "GluonJITFunction",
    "InterpretedFunction",
    "JITFunction",
    "Semantic",
    "TensorMemoryLayout",
    "TensorMemoryScalesLayout",
    "Trace",
    "Traced",
    "allocate_tensor_memory",
    "async_copy",
    "base_type",
    "base_value",
    "blackwell",
    "gl",
    "hopper",
    "library_hash",
    "mbarrier",
    "mma_v2",
    "op",
    "tcgen05_commit",
    "tcgen05_copy",
    "tcgen05_mma",
    "tcgen05_mma_scaled",
    "tensor_memory_descriptor_type",
    "tma",
]

PAIRS = "ttng.two-ctas"  # Triton's attribute of a module whose tcgen05 instructions are of CTA pairs
_SEMAPHORES = re.compile(r"!ttg.memdesc<\d+x1xi64,")  # the type of an array; a product's barrier has one dimension
P = ParamSpec("P")
R = TypeVar("R")
Callee: TypeAlias = Callable[..., Traced] | str  # the argument of `Trace.call`


@functools.cache
def library_hash() -> str:
    """Return a hash of this library's source and of its location.

    Triton's compile cache does not look into trace-time functions, so every key carries this hash. The cached text
    names files and lines, so another checkout needs another key.
    """
    root = pathlib.Path(__file__).resolve().parents[2]
    digest = hashlib.sha256(str(root).encode())
    for path in key_sources(root):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key_sources(root: pathlib.Path) -> list[pathlib.Path]:
    """Return the source files under the package's folder that decide the compiled code."""
    return sorted([root / "arch.py", *root.glob("lang/**/*.py"), *root.glob("inline_ptx/**/*.py")])


class ExplicitSource(GluonASTSource):
    """The source of an explicit kernel for Triton's compiler, with a cache key of its own.

    Triton's key is the same for a plain kernel of the same function, and for every `cluster` size. A process would
    then load another's code, or code with the wrong shared memory.
    """

    def __init__(
        self,
        fn: JITFunction,
        signature: dict[str, Any],
        constexprs: dict[Any, Any],
        attributes: dict[Any, Any],
        cluster: int,
        multiplies_through_tmem: bool,
    ) -> None:
        super().__init__(fn, signature, constexprs, attributes)
        self.cluster, self.multiplies_through_tmem = cluster, multiplies_through_tmem

    def make_ir(self, *args: Any, **kwargs: Any) -> Any:
        """Trace the kernel. Raises the error of `mistakes.plain_error`."""
        try:
            with tracing():
                module = super().make_ir(*args, **kwargs)
            if bill().pairs and self.cluster % 2:
                raise TileError(
                    f"{self.fn.__name__}(cluster_size={self.cluster}): tensor memory of CTA pairs (pair=True) needs an "
                    "even number of blocks in a cluster"
                )
        except Exception as error:
            raised = error if knobs.compilation.front_end_debugging else plain_error(error)
        else:
            if bill().makes_barriers:
                _keep_semaphores(module)
            builder = ir.builder(module.context)
            if bill().mma_sync:
                module.set_attr(ATTRIBUTE, builder.get_string_attr("\n".join(dict.fromkeys(bill().mma_sync))))
            if bill().pairs:  # Triton then allocates tensor memory for both CTAs (cta_group::2)
                module.set_attr(PAIRS, builder.get_bool_attr(True))
            return module
        raise raised

    def hash(self) -> str:
        of = f"explicit, {self.cluster} blocks a cluster, {self.multiplies_through_tmem}"
        return hashlib.sha256(f"{of}: {super().hash()}".encode()).hexdigest()


def _keep_semaphores(module: Any) -> None:
    """Keep the memory of semaphores that the kernel made until its end. The compiler would give it to barriers of
    products after their last use, and PTX allows no mbarrier.init over an mbarrier (PTX ISA, mbarrier.init)."""
    manager = ir.pass_manager(module.context)
    passes.gluon.add_inliner(manager)
    manager.run(module, "semaphores")
    operations: list[Any] = []
    module.walk(operations.append)
    builder = gluon_ir.GluonOpBuilder(module.context)
    for end in [op for op in operations if op.get_name() == "tt.return"]:
        body = [op for op in operations if op.get_block() and op.get_block().id() == end.get_block().id()]
        memories = [op.get_result(0) for op in body if op.get_name() == "ttg.local_alloc"]
        for memory in memories:
            if _SEMAPHORES.match(str(memory.get_type())):
                builder.set_insertion_point_after(body[body.index(end) - 1])
                builder.create_local_dealloc(memory)


class Trace:
    """The place where an operation is emitted: a plain Triton kernel, an explicit kernel, or Triton's interpreter."""

    def __init__(self, semantic: Semantic, generator: Any) -> None:
        self.semantic = semantic
        self.generator = generator
        self.explicit = isinstance(semantic, GluonSemantic)
        self.interpreted = semantic is None

    @property
    def builder(self) -> Any:
        """Triton's builder of IR."""
        return self.semantic.builder

    @property
    def arch(self) -> int:
        """Compute capability of the target as an integer: 90 for sm_90a."""
        match = re.fullmatch(r"sm_?(\d+)a?", str(self.builder.options.arch))
        assert match, self.builder.options.arch
        return int(match[1])

    @property
    def chip(self) -> Chip:
        """The target's chip: features and limits."""
        return chip_of(self.arch)

    @property
    def num_warps(self) -> int:
        """Warps that execute this code: the kernel's, or the role's."""
        return unwrap(self.semantic.num_warps(self.generator)) if self.explicit else self.builder.options.num_warps

    def call(self, fn: Callee, *args: Traced, **kwargs: Traced) -> Traced:
        """Call, from trace-time code, a Triton function (by name: of `triton.language`), a `@triton.jit` function or
        another `op`.
        """
        # by name: the interpreter replaces the attributes of triton.language
        function: Callable[..., Traced] = getattr(tl, fn) if isinstance(fn, str) else fn
        if self.interpreted:
            # not the function itself: calling it would patch triton.language once more and never undo it
            return (
                function.rewrite()(*args, **kwargs)
                if isinstance(function, InterpretedFunction)
                else function(*args, **kwargs)
            )
        if isinstance(function, JITFunction):
            return self.generator.call_JitFunction(function, list(args), kwargs)
        parameters = getattr(function, "signature", None) or inspect.signature(function)
        if "_semantic" in parameters.parameters:
            kwargs["_semantic"] = self.semantic
        if "_generator" in parameters.parameters:
            kwargs["_generator"] = self.generator
        return function(*args, **kwargs)

    def method(self, value: Traced, name: str, *args: Traced, **kwargs: Traced) -> Traced:
        """Call a method of a Triton value, e.g. an operator: `t.method(x, '__mul__', y)`."""
        if self.interpreted and name == "to" and _interpreter.must_cast(value, *args, **kwargs):
            return _interpreter.cast(value, *args, **kwargs)
        return self.call(getattr(value, name), *args, **kwargs)

    def scalar(self, x: Traced) -> Traced:
        """Return a scalar Triton value for a Python number; any other value unchanged."""
        x = unwrap(x)
        semantic = interpreter_semantic if self.interpreted else self.semantic
        return semantic.to_tensor(x) if isinstance(x, (bool, int, float)) else x

    def condition(self, x: Traced) -> Traced:
        """Return the result of comparing scalars in a form that combines with comparisons of tiles."""
        return _interpreter.condition(x) if self.interpreted else x

    def arange(self, extent: int, axis: int, like: Traced) -> Traced:
        """Return 0 … extent − 1 as the vector along `axis` of the tile `like`."""
        if self.explicit:
            return self.semantic.arange(0, extent, gl.SliceLayout(1 - axis, like.type.layout))
        return self.call("arange", 0, extent)

    def vector(self, v: Traced, axis: int, like: Traced) -> Traced:
        """Return `v` in a layout that broadcasts along the other axis of the tile `like`."""
        if self.explicit:
            layout = gl.SliceLayout(1 - axis, like.type.layout)
            if v.type.layout != layout:
                return self.semantic.convert_layout(v, layout)
        return v

    def relayout(self, x: Traced, like: Traced) -> Traced:
        """Return `x` in the register layout of `like` (explicit kernels; free where the layouts agree)."""
        if (
            self.explicit
            and x.type.is_block()
            and like.type.is_block()
            and x.type.layout != like.type.layout
            and len(x.shape) == len(like.shape)
        ):
            return self.semantic.convert_layout(x, like.type.layout)
        return x

    def convert(self, x: Traced, layout: DistributedLayout) -> Traced:
        """Return `x` in an explicit register layout."""
        return x if x.type.layout == layout else self.semantic.convert_layout(x, layout)

    def full(
        self, shape: tuple[int, ...], value: Traced, dtype: tl.dtype, layout: DistributedLayout | None = None
    ) -> Traced:
        """Return a tensor that is `value` everywhere. `layout` is for explicit kernels."""
        if self.explicit:
            return self.semantic.full(list(shape), unwrap(value), dtype, layout)
        if self.interpreted and dtype in _interpreter.HELD_AS_BITS:
            return self.method(self.call("full", shape, value, tl.float32), "to", dtype)
        return self.call("full", shape, value, dtype)

    def require(self, what: str, feature: str) -> None:
        """Refuse a target whose chip lacks a feature (a field of `arch.Chip`)."""
        require_feature(what, feature, self.arch)

    def require_capability(self, what: str, lowest: int) -> None:
        """Refuse a target older than sm_`lowest`."""
        if self.arch < lowest:
            raise ArchitectureError(f"{what} needs sm_{lowest} or newer; this kernel is compiled for sm_{self.arch}")

    def require_explicit(self, name: str) -> None:
        """Refuse a call of operation `name` in a plain Triton kernel."""
        if not self.explicit:
            raise TileError(f"{name}: works on explicit tiles only; put @tk.kernel over the @triton.jit function")


def op(fn: Callable[Concatenate[Trace, P], R]) -> Callable[P, R]:
    """Make a trace-time Python function `fn(trace, …)` callable from kernels."""

    @functools.wraps(fn)
    def device_function(*args: Any, _semantic: Any = None, _generator: Any = None, **kwargs: Any) -> Any:
        if _semantic is None and not _interpreting():
            raise TileError(f"{fn.__name__}: call it inside a kernel (@triton.jit)")
        t, rule = Trace(_semantic, _generator), complex_rules.get(fn.__name__)
        try:
            if rule is not None and any(map(is_complex, (*args, *kwargs.values()))):
                return rule(t, fn, *args, **kwargs)
            return fn(t, *args, **kwargs)
        except TypeError:
            _check_arguments(fn.__name__, marked.__signature__, args, kwargs)
            raise

    marked: Any = device_function  # Triton reads attributes that a function's type does not have
    parameters = list(inspect.signature(fn).parameters.values())[1:]
    hidden = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in ("_semantic", "_generator")]
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    rest = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    marked.signature = inspect.Signature([*named, *hidden, *rest])  # for the code generator
    marked.__signature__ = inspect.Signature(parameters)  # for help()
    marked.__triton_builtin__ = True
    # Triton hashes the annotations of aggregates into the key of every kernel that names them. No other public way puts
    # our source into the key.
    marked.__triton_aggregate__ = True
    marked.__annotations__ = {"tritonkittens": library_hash()}
    marked.hash_attrs = ()
    return device_function


# by operation: rule(trace, operation, …) for operands of which one is complex (lang.mma.complex)
complex_rules: dict[str, Callable[..., Any]] = {}


def is_complex(x: Traced) -> bool:
    """Whether `x` is a complex tile, a type of such, or the global layouts of a complex tensor."""
    if isinstance(x, tl.tuple):
        return tuple(x.type.fields or ()) == ("real", "imag")
    return getattr(x.value if isinstance(x, tl.constexpr) else x, "is_complex", False) is True


def _check_arguments(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `TileError` where a call does not fit the parameters that help() shows."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TileError(f"{name}: {error}; its parameters are {signature}") from None


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
