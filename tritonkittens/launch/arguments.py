"""Kernel arguments: the properties that change the compiled code or a prebuilt launch, and the layout of the
parameters.
"""

import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from triton._utils import canonicalize_dtype
from triton.backends.driver import expand_signature
from triton.language import constexpr

from .tensormap import MapSpec, addressable_strides, mapped

POINTER_ALIGNMENT = 16  # bytes; Triton's "tt.divisibility" of a pointer
BYTES = {torch.float8_e8m0fnu: "u8", torch.float4_e2m1fn_x2: "u8"}  # Triton has no type of their own for these
ALIGNED = [["tt.divisibility", POINTER_ALIGNMENT]]  # Triton's attribute of a pointer whose address is a multiple of it


Args = tuple[Any, ...]  # a launch's arguments: tensors, GlobalArg, numbers, None, constexpr, and tuples of these
Path = tuple[int, ...]  # of an argument: its number, then the number inside it, …
Types = tuple[Any, ...]  # an ArgType for each argument, nested as the arguments are


class GlobalArg(NamedTuple):
    """A tensor that a kernel moves with TMA: one tensor map per tile in ``specs``.

    As kernel parameters, each spec is the tensor map, the shape (int32 each) and the strides in elements (int64
    each), in this order. Triton calls it a ``tensordesc`` argument.
    Reuse one ``specs`` tuple from call to call: the launcher first compares its identity.
    """

    tensor: torch.Tensor
    specs: tuple[MapSpec, ...]


class ArgType(NamedTuple):
    """The properties of one argument on which the compiled code may depend.

    ========== ============================================ =======================================
    kind       type                                         also
    ========== ============================================ =======================================
    pointer    ``"*bf16"``                                  ``aligned``: address a multiple of 16
    descriptor ``"bf16"``, the element type                 ``specs``, one Triton argument for each
    scalar     ``"i32"``, ``"i64"``, ``"u64"``, ``"fp32"``, ``"u1"``
    constexpr  ``"constexpr"``: takes no parameter
    ========== ============================================ =======================================
    """

    kind: str
    type: str
    aligned: bool = False
    specs: tuple[MapSpec, ...] = ()


CONSTEXPR = ArgType("constexpr", "constexpr")


def scalar_type(value: int | float) -> str | None:
    """Return Triton's type of a Python scalar: ``u1``, ``i32``, ``i64``, ``u64`` or ``fp32``; None for an integer
    beyond 64 bits.
    """
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    if -(1 << 31) <= value < 1 << 31:
        return "i32"
    if -(1 << 63) <= value < 1 << 63:
        return "i64"
    return "u64" if 0 <= value < 1 << 64 else None


Names = Sequence[Any]  # of arguments, for messages: a str each, or for a tuple the names of its items


def name_at(names: Names, i: int) -> Any:
    """Return the name of argument number ``i`` in messages, or the names of its items."""
    return names[i] if i < len(names) else f"argument {i}"


def names_inside(name: Any, value: Args) -> Names:
    """Return the names of a tuple argument's items.

    They are the given ones, the tensor's for all parts of a tensor (a tuple whose class says ``of_one_tensor``), the
    fields of a named tuple, or numbers.
    """
    if not isinstance(name, str):
        return name
    if getattr(value, "of_one_tensor", False):
        return [name] * len(value)
    fields = getattr(value, "_fields", None)
    return [f"{name}.{field}" for field in fields] if fields else [f"{name}[{j}]" for j in range(len(value))]


def leaves(args: Sequence[Any], names: Names = ()) -> Iterator[tuple[str, Any]]:
    """Return the arguments in parameter order with a name for messages. Nested tuples are flattened; a GlobalArg is
    one leaf.
    """
    for i, value in enumerate(args):
        name = name_at(names, i)
        if isinstance(value, tuple) and not isinstance(value, GlobalArg):
            yield from leaves(value, names_inside(name, value))
        else:
            yield name, value


def fingerprint(args: Sequence[Any], scalars: list[int | float]) -> tuple[Hashable, ...]:
    """Return a hashable key that is equal for two argument lists only if the same prebuilt launch serves both.

    Tensors enter as integers and dtypes, never as objects. Scalars enter as types; their values are appended to
    ``scalars``.
    """
    out: list[Any] = []
    for value in args:
        if isinstance(value, torch.Tensor):
            out += (value.data_ptr(), value.dtype, value.get_device())
        elif isinstance(value, GlobalArg):
            tensor, specs = value
            if isinstance(tensor, torch.Tensor):
                out += (tensor.data_ptr(), tensor.dtype, tensor.get_device(), tensor.shape, tensor.stride())
            out.append(specs)
        elif isinstance(value, (int, float)):
            out.append(scalar_type(value))
            scalars.append(value)
        elif isinstance(value, tuple):
            out.append(fingerprint(value, scalars))
        else:
            out.append(None if isinstance(value, constexpr) else type(value))
    return tuple(out)


def argument_types(args: Sequence[Any], names: Names = ()) -> Types:
    """Return the arguments' :class:`ArgType`, nested as the arguments are.

    Raises TypeError for an argument that a kernel cannot take, ValueError for an integer beyond 64 bits.
    """
    out: list[Any] = []
    for i, value in enumerate(args):
        name = name_at(names, i)
        if isinstance(value, torch.Tensor):
            out.append(ArgType("pointer", "*" + element_type(value, name), value.data_ptr() % POINTER_ALIGNMENT == 0))
        elif isinstance(value, GlobalArg):
            if not isinstance(value.tensor, torch.Tensor):
                raise TypeError(
                    f"{name}: GlobalArg({type(value.tensor).__name__}, ...); its first field is a torch tensor"
                )
            if not isinstance(value.specs, tuple) or not value.specs:
                raise TypeError(
                    f"{name}: GlobalArg(..., specs={value.specs!r}); specs is a tuple of at least one TensorMapSpec"
                )
            for spec in value.specs:
                if not isinstance(spec, MapSpec) or not isinstance(spec.box, tuple):
                    raise TypeError(
                        f"{name}: {spec!r}; a tile is described by a TensorMapSpec or an Im2colSpec; the box is a "
                        "tuple of ints"
                    )
            out.append(ArgType("descriptor", element_type(value.tensor, name), specs=value.specs))
        elif isinstance(value, (int, float)):
            scalar = scalar_type(value)
            if scalar is None:
                raise ValueError(f"{name}: {value} does not fit in 64 bits")
            out.append(ArgType("scalar", scalar))
        elif isinstance(value, tuple):
            nested = argument_types(value, names_inside(name, value))
            # kernels read a named tuple by its names
            out.append(type(value)(*nested) if hasattr(value, "_fields") else nested)
        elif value is None or isinstance(value, constexpr):
            out.append(CONSTEXPR)
        else:
            raise TypeError(
                f"{name}: {type(value).__name__} {value!r}; a kernel takes torch tensors, GlobalArg, int, float, bool, "
                "None, constexpr and tuples of these"
            )
    return tuple(out)


def signature_of(
    kind: Any,
    path: Path,
    attributes: dict[Path, Any],
    constexprs: dict[Path, Any],
    descriptor: Callable[[str, MapSpec], str] | None = None,
) -> Any:
    """Return Triton's type of an argument of this :class:`ArgType`, nested as the argument is. ``path`` is its
    position among the parameters.

    Properties of pointers are added to ``attributes``, arguments without a parameter to ``constexprs``.
    ``descriptor`` returns the type of a tensor map of an element type; a descriptor argument becomes the tuple of its
    maps.
    """
    if not isinstance(kind, ArgType):
        nested = tuple(
            signature_of(inner, (*path, i), attributes, constexprs, descriptor) for i, inner in enumerate(kind)
        )
        return type(kind)(*nested) if hasattr(kind, "_fields") else nested
    if kind.kind == "descriptor" and descriptor is not None:
        return tuple(descriptor(kind.type, spec) for spec in kind.specs)
    if kind.kind == "constexpr":
        constexprs[path] = None
    elif kind.kind == "pointer" and kind.aligned:
        attributes[path] = ALIGNED
    return kind.type


def element_type(tensor: torch.Tensor, name: str) -> str:
    """Return Triton's name of a tensor's dtype, such as ``bf16``. Raises TypeError if it has none."""
    try:
        return BYTES.get(tensor.dtype) or canonicalize_dtype(tensor.dtype)
    except KeyError:
        raise TypeError(f"{name}: {tensor.dtype} has no Triton type") from None


def check_devices(args: Sequence[Any], names: Names, *device_types: str) -> None:
    """Refuse tensors that are on none of ``device_types``, or not all on the device of the first. Raises
    ValueError.
    """
    first: tuple[str, torch.device] | None = None
    for name, value in leaves(args, names):
        tensor = value.tensor if isinstance(value, GlobalArg) else value
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.device.type not in device_types:
            simulated = (
                ", or on the CPU in the simulator (`with tritonkittens.sim.device():`)"
                if (tensor.device.type, device_types[0]) == ("cpu", "cuda")
                else ""
            )
            raise ValueError(
                f"{name}: a tensor on {tensor.device} (shape {tuple(tensor.shape)}, {tensor.dtype}); kernels take "
                f"tensors on {device_types[0]}{simulated}"
            )
        if first is None:
            first = name, tensor.device
        elif tensor.device != first[1]:
            raise ValueError(
                f"{name} is on {tensor.device}, {first[0]} on {first[1]}; one kernel's tensors lie on one device"
            )


def tensor_device(args: Sequence[Any]) -> int | None:
    """Return the device index of the first tensor, None if there is none."""
    for value in args:
        if isinstance(value, GlobalArg):
            value = value.tensor
        if isinstance(value, torch.Tensor):
            return value.get_device()
        if isinstance(value, tuple) and (device := tensor_device(value)) is not None:
            return device
    return None


def signature_types(signature: Sequence[Any], tensordesc_meta: Any) -> list[str]:
    """Return Triton's parameter types of a compiled kernel, flat, without constexprs and scratch pointers. A tensor
    map is ``nvTmaDesc``.
    """
    flat: list[str] = []

    def visit(types: Sequence[Any]) -> None:
        for item in types:
            if isinstance(item, tuple):
                visit(item)
            elif item != "constexpr":
                flat.append(item)

    visit(expand_signature(signature, tensordesc_meta, "nvTmaDesc"))
    return flat


# Bytes and format of a scalar parameter in Triton's launcher (driver.c: an i1/u1 is passed as 32 bits).
SCALAR_FORMAT = {"u1": "<I", "i32": "<i", "i64": "<q", "u64": "<Q", "fp32": "<f"}


class Parameters(NamedTuple):
    """The parameter block of a launch: values, the offset of each parameter, and (offset, type) of the scalars to
    fill in.

    ``places`` locates the tensors' ``addresses``: (number of the tensor, offset, whether it is inside a tensor map).
    """

    block: bytes
    offsets: tuple[int, ...]
    slots: tuple[tuple[int, str], ...]
    places: tuple[tuple[int, int, bool], ...]
    addresses: tuple[int, ...]


class ParameterBlock:
    """Lays out parameters in sequence, each at its natural alignment relative to a block aligned to 128 bytes."""

    def __init__(self) -> None:
        self.data, self.types = bytearray(), list[str]()
        self.offsets, self.slots = list[int](), list[tuple[int, str]]()
        self.places, self.addresses = list[tuple[int, int, bool]](), list[int]()

    def add(self, type: str, value: bytes, alignment: int | None = None) -> None:
        """Append a parameter: its type in the kernel's signature, its bytes, and their alignment (by default their
        number)."""
        self.data += bytes(-len(self.data) % (alignment or len(value)))
        self.offsets.append(len(self.data))
        self.types.append(type)
        self.data += value

    def add_scalar(self, type: str) -> None:
        """Append a scalar whose value each launch fills in."""
        self.add(type, bytes(struct.calcsize(SCALAR_FORMAT[type])))
        self.slots.append((self.offsets[-1], type))

    def add_pointer(self, tensor: torch.Tensor, name: str) -> None:
        """Append a tensor's address. `name` is for messages."""
        self.add("*" + element_type(tensor, name), struct.pack("<Q", tensor.data_ptr()))
        self.places.append((len(self.addresses), self.offsets[-1], False))
        self.addresses.append(tensor.data_ptr())

    def add_global(self, arg: GlobalArg, maps: Sequence[bytes], name: str) -> None:
        """Append a global layout: for each tile its tensor map, extents and strides. Raises ValueError for an extent of
        2³¹ or more."""
        tensor = arg.tensor
        for extent in tensor.shape:
            if extent >= 1 << 31:
                raise ValueError(
                    f"{name}: shape {tuple(tensor.shape)}; a kernel receives extents as int32, below 2**31"
                )
        for tensor_map, spec in zip(maps, arg.specs, strict=True):
            shape, strides = mapped(tensor, spec)
            strides = addressable_strides(shape, strides, tensor.itemsize)
            self.add("nvTmaDesc", tensor_map)
            self.places.append((len(self.addresses), self.offsets[-1], True))
            for extent in shape:
                self.add("i32", struct.pack("<i", extent))
            for stride in strides:
                self.add("i64", struct.pack("<q", stride))
        self.addresses.append(tensor.data_ptr())

    def finish(self, scratch_pointers: int) -> Parameters:
        """Append null pointers for the compiler's scratch memory, and return the parameters."""
        for _ in range(scratch_pointers):
            self.add("scratch", bytes(8))
        return Parameters(
            bytes(self.data), tuple(self.offsets), tuple(self.slots), tuple(self.places), tuple(self.addresses)
        )


def pack(
    args: Sequence[Any],
    names: Names,
    expected: list[str],
    encode_map: Callable[[torch.Tensor, MapSpec, str, int], bytes],
    kernel: str,
) -> Parameters:
    """Return the parameter block of a launch, with zeros for scalars and Triton's two scratch pointers (global,
    profile; null) at its end.

    ``expected``: :func:`signature_types` of the compiled kernel. ``encode_map(tensor, spec, name, position)`` returns
    a tensor map's bytes; ``position`` counts the descriptors. Raises RuntimeError if the kernel was compiled for
    other parameters.
    """
    block, descriptors = ParameterBlock(), 0
    for name, value in leaves(args, names):
        if isinstance(value, torch.Tensor):
            block.add_pointer(value, name)
        elif isinstance(value, GlobalArg):
            maps = [encode_map(value.tensor, spec, name, descriptors + i) for i, spec in enumerate(value.specs)]
            descriptors += len(maps)
            block.add_global(value, maps, name)
        elif isinstance(value, (int, float)):
            block.add_scalar(str(scalar_type(value)))
    # A pointer to const is "*k..." in a Triton signature.
    if [expect.replace("*k", "*", 1) for expect in expected] != block.types:
        raise RuntimeError(
            f"{kernel} was compiled for parameters ({', '.join(expected)}), but its arguments are "
            f"({', '.join(block.types)}); the compile "
            "callback must build its signature from the argument types it was given"
        )
    return block.finish(scratch_pointers=2)
