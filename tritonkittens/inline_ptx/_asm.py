"""The base of every shim: one trace-time `asm` for plain Triton and for explicit (Gluon) kernels, and the
architecture checks.

A `@triton.jit` function is compiled with its caller's semantics, so one shim uses two inline-assembly operations.
Gluon's is threadwise: its operands may be register tiles and shared or tensor-memory descriptors, and it may have no
result.
Plain Triton's is element-wise: it needs at least one result and takes scalars only (as far as this package uses it).
`asm` hides the difference. In both, every thread of the program (or partition) executes the block once, so a shim of
a single-thread instruction guards it with `issued`.
"""

import contextvars
import hashlib
import inspect
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._semantic import GluonSemantic
from triton.experimental.gluon.language.nvidia.blackwell import tensor_memory_descriptor
from triton.runtime.jit import ConstexprFunction, constexpr_function

from tritonkittens.arch import ArchitectureError, chip_of
from tritonkittens.inline_ptx._traced import Semantic, Traced

_DESCRIPTORS = (gl.shared_memory_descriptor, tensor_memory_descriptor)
# PTX operand references ($0, $1, ...): of each operand those of its registers
References: TypeAlias = tuple[tuple[str, ...], ...]
Function = TypeVar("Function", bound=Callable[..., Any])
_REFERENCE = re.compile(r"\$\$|\$(\d+)|\$\{(\d+)")


# Is the kernel that is being traced launched in clusters? Gluon hands the address of a descriptor to assembly without
# the bits that name the CTA (it takes every single-CTA kernel for one that is alone), and rank 1 would then address the
# memory of rank 0: the shared window of a CTA starts at its rank << 24.
in_cluster: contextvars.ContextVar[bool] = contextvars.ContextVar("in_cluster", default=False)
# The name of the kernel that is being traced: its parameters are called <name>_param_<i> in PTX.
kernel_name: contextvars.ContextVar[str] = contextvars.ContextVar("kernel_name", default="")
_OWN_WINDOW = "{ .reg .b32 rank; mov.u32 rank, %cluster_ctarank; shl.b32 rank, rank, 24; or.b32 $0, $1, rank; }"

_PACKAGE = pathlib.Path(__file__).parent
_SOURCE = hashlib.sha256(
    b"".join(path.read_bytes() for path in (*sorted(_PACKAGE.rglob("*.py")), _PACKAGE.parent / "arch.py"))
).hexdigest()


class OperandError(TypeError):
    """An operand of an instruction has a type, a width or a value that the instruction does not take."""


def builtin(fn: Function) -> Function:
    """Marks `fn(..., _semantic=None)` as callable from kernel code. It runs as Python while the kernel is traced.

    Triton's compile cache does not look into such functions, but it hashes the annotations of aggregates. Through
    them, this package's source is part of the key of every kernel that uses it.
    """
    marked: Any = fn  # Triton reads attributes that a function's type does not have
    # what the code generator reads; the annotations below are no longer the parameters'
    marked.signature = inspect.signature(fn)
    marked.__triton_builtin__ = True
    marked.__triton_aggregate__ = True
    marked.__annotations__ = {"source": _SOURCE}
    marked.hash_attrs = ()
    return fn


def unwrap(value: Traced) -> Traced:
    """The Python value of a constexpr, and of constexprs in lists and tuples; anything else unchanged."""
    if isinstance(value, tl.constexpr):
        return unwrap(value.value)
    if isinstance(value, (list, tuple, tl.tuple)):
        return tuple(unwrap(item) for item in value)
    return value


def _semantic_of(_semantic: Semantic, what: str) -> Semantic:
    if _semantic is None:
        raise RuntimeError(
            f"{what} is inline PTX and cannot run in Triton's interpreter (TRITON_INTERPRET=1) or outside a kernel; "
            "compile the kernel for an NVIDIA GPU"
        )
    return _semantic


def arch_number(name: object) -> int | None:
    """The compute capability of Triton's architecture name, for example "sm90" -> 90; None for a target that is not
    NVIDIA's.
    """
    match = re.fullmatch(r"sm_?(\d+)[af]?", str(name))
    return int(match.group(1)) if match else None


def refusal(feature: str, name: object, minimum: int | None = None, only: Collection[int] | None = None) -> str | None:
    """The message that says why `feature` is not available on architecture `name`, or None where it is.

    `minimum` is the lowest capability (90 = sm_90) of a feature that every later architecture keeps; `only` lists the
    capabilities of an architecture-specific feature (those that PTX calls sm_90a, sm_100a, ...), which later or
    consumer architectures do not have.
    """
    number = arch_number(name)
    if only is not None:
        targets = [f"sm_{target}a" for target in sorted(only)]
        needs = targets[0] if len(targets) == 1 else ", ".join(targets[:-1]) + " or " + targets[-1]
        available = number in only
    else:
        assert minimum is not None, "one of the two is given"
        needs = f"sm_{minimum} or newer"
        available = number is not None and number >= minimum
    if available:
        return None
    target = f"sm_{number}" if number is not None else f"{name}, which is not an NVIDIA architecture"
    return f"{feature} needs {needs}; this kernel is compiled for {target}"


@builtin
def is_explicit(_semantic: Semantic = None) -> Traced:
    """constexpr: is the calling code compiled as an explicit (Gluon) kernel? False in plain Triton and in its
    interpreter."""
    return tl.constexpr(isinstance(_semantic, GluonSemantic))


@builtin
def arch(_semantic: Semantic = None) -> Traced:
    """constexpr int: the compute capability that the kernel is compiled for, e.g. 90 for sm_90 (0: not an NVIDIA
    GPU)."""
    return tl.constexpr(arch_number(_semantic_of(_semantic, "arch()").builder.options.arch) or 0)


@builtin
def require(feature: Traced, minimum: Traced = None, only: Traced = None, _semantic: Semantic = None) -> None:
    """Refuses to compile where the target lacks an instruction.

    `feature` is the instruction's name for the message, `minimum` a compute capability (90) or `only` a tuple of them:
    see `refusal`.
    """
    feature = unwrap(feature)
    name = _semantic_of(_semantic, feature).builder.options.arch
    message = refusal(feature, name, unwrap(minimum), unwrap(only))
    if message is not None:
        raise ArchitectureError(message)


@builtin
def has_clusters(sm: int) -> bool:
    """Whether the chip of compute capability `sm` has `Chip.clusters`. For constexpr functions, which may call builtins
    only."""
    return chip_of(sm).clusters


@constexpr_function
def issued(instructions: str | tuple[str, ...], issuer: str, sm: int, declarations: str = "") -> str:
    """PTX in which the threads chosen by `issuer` execute `instructions`, in a scope of its own (braces scope
    registers and labels).

    Args:
        instructions: one string or a tuple of single instructions, each without a predicate.
        issuer: "thread" is every thread that reaches the block, "warp" one lane of each warp, "warpgroup" the threads
            whose %tid.x is a multiple of 128, "cta" the thread whose %tid.x is 0. "first" is one lane of the block's
            first warp, by elect.sync; ptxas then adds no loop over threads around uniform operands.
        sm: the compute capability. Without `Chip.clusters` there is no elect.sync, and lane 0 is elected.
        declarations: PTX that every thread executes before.
    """
    if issuer not in ("thread", "warp", "warpgroup", "cta", "first"):
        raise OperandError(
            f"issuer={issuer!r}: it is 'thread' (every thread), 'warp' (one lane of each warp), 'warpgroup' (the "
            "threads with %tid.x % 128 == 0), 'cta' (the thread with %tid.x == 0) or 'first' (one lane of the first "
            "warp)"
        )
    lines = (instructions,) if isinstance(instructions, str) else tuple(instructions)
    thread_0 = ".reg .pred issue; .reg .b32 lane; mov.u32 lane, %tid.x; setp.eq.u32 issue, lane, 0; "
    choose = {
        "thread": "",
        "warp": (
            ".reg .pred issue; elect.sync _|issue, 0xffffffff; "
            if has_clusters(sm)
            else ".reg .pred issue; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 issue, lane, 0; "
        ),
        "warpgroup": (
            ".reg .pred issue; .reg .b32 lane; mov.u32 lane, %tid.x; and.b32 lane, lane, 127; "
            "setp.eq.u32 issue, lane, 0; "
        ),
        "cta": thread_0,
        "first": (
            ".reg .pred issue, elected; .reg .b32 lane; elect.sync _|elected, 0xffffffff; mov.u32 lane, %tid.x; "
            "setp.lt.and.u32 issue, lane, 32, elected; "
            if has_clusters(sm)
            else thread_0
        ),
    }[issuer]
    guard = "" if issuer == "thread" else "@issue "
    body = " ".join(f"{guard}{line}" for line in lines)
    return "{ " + choose + (declarations + " " if declarations else "") + body + " }"


def _renumber(template: str, by: int) -> str:
    """`template` with each operand reference $n (or ${n:modifier}) raised by `by`; $$ is a literal dollar and stays."""

    def shift(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$$"
        if match.group(1) is not None:
            return f"${int(match.group(1)) + by}"
        return "${" + str(int(match.group(2)) + by)

    return _REFERENCE.sub(shift, template)


def _lower(arg: Traced) -> tuple[Traced, ...]:
    """The values of one operand. A lang object provides its wrapped value (a descriptor, a tensor, or a tuple of
    these).
    """
    arg = unwrap(arg)
    if arg is None:
        return ()
    if hasattr(arg, "__asm_operand__"):
        return _lower(arg.__asm_operand__)
    return tuple(value for item in arg for value in _lower(item)) if isinstance(arg, tuple) else (arg,)


def _scalar(value: Traced, constraint: str, semantic: Semantic, template: str) -> Traced:
    """A scalar as the register that `constraint` names: integers are widened (by their own sign), pointers become
    64-bit addresses."""
    if isinstance(value, int) and not isinstance(value, bool) and constraint in ("f", "d"):
        value = float(value)
    value = semantic.to_tensor(value)
    if value.type.is_block():
        return value
    if value.type.is_ptr():
        value = semantic.cast(value, tl.int64)
    if value.type.is_int():
        bits = value.type.primitive_bitwidth
        wanted = {"r": 32, "l": 64}.get(constraint, bits)
        if bits > wanted:
            raise OperandError(
                f"inline PTX: an operand of type {value.type} is given where a {wanted}-bit register is wanted "
                f"(constraint {constraint!r}); convert it first: {template}"
            )
        if bits < wanted:
            value = semantic.cast(value, getattr(tl, f"{'u' if value.type.is_int_unsigned() else ''}int{wanted}"))
    if constraint == "d" and value.type.is_fp32():
        value = semantic.cast(value, tl.float64)
    return value


def _split(constraints: str | Sequence[str], operands: int) -> tuple[list[str], list[str]]:
    """Constraints as one list per logical operand, and the clobbers; a string is cut at its commas."""
    items = (
        [item.strip() for item in constraints.split(",")]
        if isinstance(constraints, str)
        else [str(item) for item in constraints]
    )
    items = [item for item in items if item]
    clobbers = [item for item in items if item.startswith("~")]
    items = [item for item in items if not item.startswith("~")]
    if not isinstance(constraints, str) and len(items) != operands:
        raise OperandError(
            f"inline PTX: {len(items)} constraints {items} for {operands} operands (results first, then arguments)"
        )
    return items, clobbers


def _references(counts: Iterable[int]) -> list[tuple[str, ...]]:
    groups, cursor = [], 0
    for count in counts:
        groups.append(tuple(f"${i}" for i in range(cursor, cursor + count)))
        cursor += count
    return groups


def _value_constraints(
    items: Sequence[str], lowered: Sequence[tuple[Traced, ...]], by_operand: bool
) -> list[list[str]]:
    """The constraint of each value of each operand. `items`: one for each operand, or one for each value; "" where they
    are one for each register of a tile, and the string is taken as it is."""
    if by_operand:
        return [[item] * len(values) for item, values in zip(items, lowered, strict=True)]
    if len(items) != sum(len(values) for values in lowered):
        return [[""] * len(values) for values in lowered]
    rest = iter(items)
    return [[next(rest) for _ in values] for values in lowered]


def _operand(value: Traced, constraint: str, semantic: Semantic, template: str) -> Traced:
    """A value as the assembly operation takes it. A shared descriptor in a cluster becomes its address with the bits
    that name the CTA."""
    if not isinstance(value, _DESCRIPTORS):
        return _scalar(value, constraint, semantic, template)
    if not isinstance(semantic, GluonSemantic):
        raise OperandError(f"inline PTX: a memory descriptor is an operand in explicit kernels only: {template}")
    if in_cluster.get() and isinstance(value, gl.shared_memory_descriptor):
        return semantic.inline_asm(_OWN_WINDOW, "=r,r", [value], (tl.int32,), False)[0]
    return value


def _registers(type_: Traced, semantic: Semantic) -> int:
    """Registers of a value of `type_` in one thread."""
    if isinstance(semantic, GluonSemantic):
        return int(semantic.builder.get_total_elems_per_thread(type_.to_ir(semantic.builder)))
    return 1


def _expanded(template: Traced, counts: Sequence[int], results: int) -> str:
    """The text of a template for operands of these numbers of registers, of which the first `results` are results."""
    if isinstance(template, ConstexprFunction):
        groups = _references(counts)
        template = template(tuple(groups[:results]), tuple(groups[results:]))
    if not isinstance(template, str):
        raise OperandError(
            f"inline PTX: the template is a string or a constexpr function that returns one, not {template!r}"
        )
    return template


def _emit(
    template: str,
    items: list[str],
    clobbers: list[str],
    operands: list[Traced],
    results: tuple[Traced, ...],
    is_pure: bool,
    semantic: Semantic,
) -> tuple[Traced, ...]:
    """The block by Gluon's operation, or by plain Triton's. Returns the results."""
    if isinstance(semantic, GluonSemantic):
        out = semantic.inline_asm(template, ",".join(items + clobbers), operands, results, is_pure)
        return out if isinstance(out, tuple) else (out,)
    types = results
    if not results:  # the element-wise operation insists on a result
        template, items, types = "mov.b32 $0, 0; " + _renumber(template, 1), ["=r"] + items, (tl.int32,)
    constraints = ",".join(items + clobbers)
    out = tl.inline_asm_elementwise(template, constraints, operands, types, is_pure, 1, _semantic=semantic)
    return out if results else ()


@builtin
def asm(
    template: Traced,
    constraints: Traced,
    args: Traced,
    result_types: Traced = (),
    is_pure: Traced = False,
    _semantic: Semantic = None,
) -> Traced:
    """One block of PTX, executed by every thread of the program or partition.

    template      PTX with operand references $0, $1, ... (results first, then arguments), or a constexpr function of
                  `(outputs, inputs)` that returns it; each of the two is a tuple of one tuple of references per
                  operand.
    constraints   LLVM's, as a string ("=r,r,l") or as a tuple with one entry per operand (repeated for every register
                  of that operand; entries that start with "~" are clobbers).
    args          scalars; in explicit kernels also register tiles and shared or tensor-memory descriptors ("r": the i32
                  address); lang objects, which provide one of these in their property `__asm_operand__`; a tuple of
                  these is one operand of several registers, and None is an operand of no register.
    result_types  () for none, a scalar dtype, in explicit kernels a tile type (`tile.type`), or a tuple of these (gives
                  a tuple).
    is_pure       True only where the block reads nothing but its operands: the compiler may then move, merge or drop
                  it.

    The compiler models nothing that the block does to memory or barriers, and takes scalar results as uniform.
    """
    semantic = _semantic_of(_semantic, "asm(...)")
    constraints, results = unwrap(constraints), unwrap(result_types)
    template = template.value if isinstance(template, tl.constexpr) else template
    shown = template if isinstance(template, str) else getattr(template, "__name__", "template")
    single = not isinstance(results, tuple)
    results = (results,) if single else results
    lowered = [_lower(arg) for arg in (args if isinstance(args, (list, tuple, tl.tuple)) else (args,))]

    by_operand = not isinstance(constraints, str)
    items, clobbers = _split(constraints, len(results) + len(lowered))
    wanted = _value_constraints(items[len(results) :], lowered, by_operand)
    operands = [
        [_operand(value, constraint, semantic, shown) for value, constraint in zip(values, of_values, strict=True)]
        for values, of_values in zip(lowered, wanted, strict=True)
    ]
    counts = [_registers(type_, semantic) for type_ in results]
    for group in operands:
        counts.append(
            sum(1 if isinstance(value, _DESCRIPTORS) else _registers(value.type, semantic) for value in group)
        )
    text = _expanded(template, counts, len(results))
    if by_operand:
        items = [item for item, count in zip(items, counts, strict=True) for _ in range(count)]
    flat = [value for group in operands for value in group]
    out = _emit(text, items, clobbers, flat, results, bool(unwrap(is_pure)), semantic)
    if single:
        return out[0]
    return tl.tuple(out) if out else None
