"""Tensor maps: the copy engine's 128-byte descriptors of a tensor. The driver encodes them on the host; the device
can change fields.

Everything is in the hardware's order: the fastest dimension first.
Sources: CUDA Driver API, "Tensor Map Object Management" (`cuTensorMapEncodeTiled`); PTX ISA, "Tensors",
"tensormap.replace", "membar / fence" (tensormap proxy).
"""

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from tritonkittens.inline_ptx._asm import OperandError, arch, asm, builtin, issued, kernel_name, require, unwrap
from tritonkittens.inline_ptx._meaning import Instruction, Machine, Register, lanes, meaning, uniform
from tritonkittens.inline_ptx._traced import Semantic, Traced

# the host's half belongs to the same vocabulary
from tritonkittens.launch.encoding import NBYTES as NBYTES
from tritonkittens.launch.encoding import check_tiled as check_tiled
from tritonkittens.launch.encoding import driver as driver
from tritonkittens.launch.encoding import encode_tiled as encode_tiled

# where the simulator maps kernel parameters: parameter i is at i · NBYTES of it, above every real address
PARAMETER_WINDOW = 1 << 56

# The names in PTX's order: `tensormap.replace.elemtype` and Triton's `ttng.tensormap_create` count by it. The driver's
# numbers, in _DTYPES, differ from 8 on.
ELEMENT_TYPES = (
    "uint8",
    "uint16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float32_ftz",
    "float64",
    "bfloat16",
    "tfloat32",
    "tfloat32_ftz",
)
TARGETS = tl.constexpr((90, 100, 103, 120))
_FIELDS = {
    "global_address": ("b64", False),
    "rank": ("b32", False),
    "box_dim": ("b32", True),
    "global_dim": ("b32", True),
    "global_stride": ("b64", True),
    "element_stride": ("b32", True),
}


@constexpr_function
def replace_text(field: str, ordinal: int, space: str, issuer: str, sm: int) -> str:
    if field not in _FIELDS:
        raise OperandError(f"tensormap.replace(field={field!r}): one of {', '.join(_FIELDS)}")
    if space not in ("global", "shared::cta"):
        raise OperandError(f"tensormap.replace(space={space!r}): 'global' or 'shared::cta'")
    kind, indexed = _FIELDS[field]
    if indexed and ordinal not in range(5):
        raise OperandError(f"tensormap.replace(field={field!r}, ordinal={ordinal}): the dimension, 0 to 4")
    which = f"{ordinal}, " if indexed else ""
    return issued(f"tensormap.replace.tile.{field}.{space}.b1024.{kind} [$0], {which}$1;", issuer, sm)


@constexpr_function
def replace_constraints(field: str, space: str) -> str:
    return f"{'l' if space == 'global' else 'r'},{'l' if field in ('global_address', 'global_stride') else 'r'}"


@triton.jit
def replace(
    tensor_map,
    value,
    field: tl.constexpr,
    ordinal: tl.constexpr = 0,
    space: tl.constexpr = "global",
    issuer: tl.constexpr = "warp",
):
    """`tensormap.replace.tile`: overwrites one field of a tensor map in memory. sm_90a, sm_100a, sm_103a, sm_120a.

    tensor_map  a generic address (u64 or pointer), or with `space` "shared::cta" an i32 shared address; 128-byte
                aligned.
    value       the new value.
    field       "global_address" (bytes, u64), "rank" (i32, rank - 1), "box_dim", "global_dim", "element_stride" (i32,
                elements) or "global_stride" (u64, bytes; ordinal 0 is dimension 1).
    ordinal     the dimension, fastest first.

    Publish the map with `tma.fence_tensormap_release`. PTX ISA "tensormap.replace".
    """
    require("tensormap.replace", only=TARGETS)
    asm(replace_text(field, ordinal, space, issuer, arch()), replace_constraints(field, space), [tensor_map, value])


@builtin
def _parameter_text(index: Traced, _semantic: Semantic = None) -> Traced:
    name = f"{kernel_name.get()}_param_{int(unwrap(index))}"
    return tl.constexpr(
        f"{{ .reg .b32 place; .reg .b64 wide; mov.b32 place, {name}; cvt.u64.u32 wide, place; cvta.param.u64 $0, wide; }}"  # noqa: E501
    )


@triton.jit
def parameter_address(index: tl.constexpr):
    """`cvta.param` -> i64: the generic address of the tensor map that is kernel parameter number `index`. sm_90.

    Gluon passes tensor maps as parameters without their addresses, which multicast copies need. Inside `@tk.kernel`
    only. PTX ISA "cvta", "Kernel Function Parameters".
    """
    require("cvta.param", 90)
    return asm(_parameter_text(index), "=l", [], tl.int64, is_pure=True)


# --- meanings: the effect of each instruction, on the CPU
# --------------------------------------------------------------------------------


@meaning(
    f"tensormap.replace.tile.{{field:{'|'.join(_FIELDS)}}}.{{space:global|shared::cta}}.b1024.{{type:b32|b64}}",
    destinations=0,
)
def _replace(t: Machine, i: Instruction, addresses: Register, *operands: Register) -> None:
    *ordinal, value = operands
    for address, word in zip(lanes(addresses, i.active), lanes(value, i.active)):
        ordinal_of = uniform(ordinal[0], i.active, "the dimension of tensormap.replace") if ordinal else 0
        t.replace_tensor_map(
            (i.fields["space"] or "").split("::")[0], address, i.fields["field"] or "", ordinal_of, word
        )


@meaning(
    "tensormap.replace.tile.{field:elemtype|interleave_layout|swizzle_mode|fill_mode}.{space:global|shared::cta}.b1024.b32",
    destinations=0,
)
def _replace_choice(t: Machine, i: Instruction, addresses: Register, number: Register) -> None:
    """Fields whose new value is an immediate."""
    for address in lanes(addresses, i.active):
        t.replace_tensor_map((i.fields["space"] or "").split("::")[0], address, i.fields["field"] or "", 0, int(number))


@meaning("cvta.param.u64")
def _parameter_address(t: Machine, i: Instruction, place: Register) -> Register:
    return np.uint64(PARAMETER_WINDOW) + np.asarray(place).astype(np.uint64)
