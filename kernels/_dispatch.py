"""How a call reaches its kernel: directly where operands are plain tensors, else through an operator of torch.library.

torch can trace such an operator, batch it, run it on fake tensors, and pass it to tensor subclasses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from tritonkittens.arch import chip_of
from tritonkittens.kernels._sharding import is_distributed, register_shardings
from tritonkittens.launch import device_facts, is_reachable, simulator

is_compiling = torch.compiler.is_compiling
is_grad_enabled = torch.is_grad_enabled
_is_tracing = torch._C._is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms_are_active = torch._C._are_functorch_transforms_active
_has_memory = torch._C._has_storage
_any_autocast = torch._C._is_any_autocast_enabled
function_modes = torch._C._len_torch_function_stack
PLAIN = frozenset((Tensor, torch.nn.Parameter))
ORDINARY = PLAIN | {FakeTensor}
P = ParamSpec("P")
Result = TypeVar("Result")


def is_plain(*tensors: Tensor | None) -> bool:
    """Can the kernel run on these tensors without the operator of torch.library? None stands for an operand left out.

    True if all are torch's own tensors without a lazy negation, and none of these is active: torch.compile,
    torch.jit.trace, a dispatch mode (fake tensors, make_fx, selective checkpoints), a transform of `torch.func`,
    forward-mode differentiation.
    """
    if is_compiling() or _dispatch_modes() or _transforms_are_active() or _is_tracing():
        return False
    if forward_ad._current_level >= 0 and is_forward_mode():
        return False
    for x in tensors:
        if x is not None and (x.__class__ not in PLAIN or x.is_neg()):
            return False
    return True


def is_inference() -> bool:
    """Can a call on plain tensors launch its kernel at once? It does not look at the tensors.

    True if gradients are off, and none of these is active: what `is_plain` lists, a function mode, `torch.autocast`.
    """
    return not (
        is_compiling()
        or is_grad_enabled()
        or _transforms_are_active()
        or _dispatch_modes()
        or function_modes()
        or _any_autocast()
        or _is_tracing()
        or forward_ad._current_level >= 0
    )


def have_memory(*tensors: Tensor | None) -> bool:
    """Do all of these tensors have memory? None stands for an operand left out.

    Batched gradients (`is_grads_batched`) and sparse tensors have none.
    """
    return all(x is None or _has_memory(x) for x in tensors)


def is_forward_mode() -> bool:
    """Is forward-mode differentiation active (`torch.autograd.forward_ad.dual_level`, `torch.func.jvp`)?

    Operands may then have tangents.
    """
    return forward_ad._current_level >= 0 and (is_compiling() or torch._C._is_fwd_grad_enabled())


def is_ordinary(x: Tensor) -> bool:
    """Is it a dense tensor of torch's own, possibly faked, transformed or distributed by torch, and no other subclass,
    nested or sparse tensor?"""
    return (type(x) in ORDINARY or is_distributed(type(x))) and not x.is_nested and x.layout is torch.strided


def unseen_by_function_modes(run: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap `run` so that torch's function modes (`torch.set_default_device` is one) do not see it read plain tensors.

    Under such a mode, each attribute of a tensor takes microseconds to read, and a call reads dozens.
    """

    @functools.wraps(run)
    def unseen(*args: Any, **named: Any) -> Result:
        if is_compiling() or not function_modes() or any(isinstance(x, Tensor) and type(x) not in PLAIN for x in args):
            return run(*args, **named)
        with torch._C.DisableTorchFunction():
            return run(*args, **named)

    return unseen


def constant_in_traces(run: Callable[..., Result]) -> Callable[..., Result]:
    """Mark `run`, so that torch.compile calls it while it traces, and keeps the result as a constant.

    `torch.compiler.assume_constant_result` does the same, but imports torch._dynamo, which takes a second.
    """
    run._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return run


@constant_in_traces  # a device does not change between a trace and its runs
def has_kernels(device: torch.device, needs_tma: bool = False) -> bool:
    """Can a kernel take tensors on `device`?"""
    return is_reachable(device) and (not needs_tma or chip_of(device_facts(device).capability).tma)


def takes(dtypes: tuple[torch.dtype, ...], *tensors: Tensor | None, needs_tma: bool = False) -> bool:
    """Can a kernel take these tensors together: torch's own, dense, whole, of these dtypes, on one device, without
    tangents? None stands for an operand left out."""
    given = [x for x in tensors if x is not None]
    device = given[0].device
    for x in given:
        if not is_ordinary(x) or is_distributed(type(x)) or x.device != device or x.dtype not in dtypes:
            return False
    return has_kernels(device, needs_tma) and not has_tangent(*given)


_register_shardings = constant_in_traces(register_shardings)


def autocasts(device: torch.device) -> torch.dtype | None:
    """The dtype to which `torch.autocast` casts operands on `device`, or None where it is off.

    Device "meta" counts as a GPU: `tritonkittens.warm` replaces tensors on a GPU by tensors without memory.
    """
    # a fast check first; torch.compile cannot trace it
    if not (is_compiling() or _any_autocast()):
        return None
    kind = "cuda" if device.type == "meta" else device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast an operand of a matrix product as `torch.autocast` does: float64 and non-float tensors stay."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def requires_grad(*tensors: Tensor | None) -> bool:
    """Does one of these tensors require a gradient, and are gradients on? None stands for an operand left out."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def check_tensors(name: str, *, optional: bool = False, **tensors: Any) -> None:
    """Raise TypeError for what is no tensor, by the `name` of the function that was called. Operands that are
    `optional` may be None."""
    for argument, x in tensors.items():
        if not (isinstance(x, Tensor) or (optional and x is None)):
            raise TypeError(f"{name}: {argument} is {type(x).__name__}; it must be a torch tensor")


def has_tangent(*tensors: Any) -> bool:
    """Has one of the tensors a tangent, or may have one in a nest of transforms?"""
    if not is_forward_mode():
        return False
    try:
        return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    except RuntimeError:
        return True


def check_no_gradient(name: str, advice: str, **tensors: Tensor | None) -> None:
    """Raise ValueError where an operator without gradients would drop one that is wanted, or a tangent."""
    if has_tangent(*tensors.values()):
        raise ValueError(f"{name}: it has no forward-mode derivative; {advice}")
    if torch.is_grad_enabled():
        for argument, x in tensors.items():
            if getattr(x, "requires_grad", False):
                raise ValueError(
                    f"{name}: {argument} requires a gradient, which {name} does not compute; call it under "
                    f"torch.no_grad(), or {advice}"
                )


def refusing(message: str) -> Callable[..., Any]:
    """The backward of an operator that has none: it raises NotImplementedError with `message`, also where a transform
    hides that a gradient is wanted."""

    def refuse(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(message)

    return refuse


def check_no_tangent(name: str) -> None:
    """Raise NotImplementedError in a backward that would drop the tangents of its gradients."""
    if is_forward_mode():
        raise NotImplementedError(
            f"{name}: its backward has no forward-mode derivative, unless its forward is computed under the same dual "
            "level"
        )


def second_derivative_of(name: str) -> Callable[..., Any]:
    """The backward of an operator that computes gradients of `name`, and has none itself."""
    return refusing(
        f"{name} has no second derivative by backward; use torch's attention, or differentiate the gradient in "
        "forward mode"
    )


def call(name: str, *args: Any) -> Any:
    """Call the operator `tritonkittens::name`, which torch may trace, fake, batch and differentiate.

    torch cannot differentiate an operator of torch.library between two transforms of `torch.func` (`vmap(grad(…))`):
    there an autograd function does the same.
    """
    if is_distributed(type(args[0])):
        _register_shardings(name)
    if not is_compiling() and _transforms_are_active() and name in _transformed and not _is_functionalized():
        return _transformed[name].apply(*args)
    return getattr(torch.ops.tritonkittens, name)(*args)


def _is_functionalized() -> bool:
    """Is the innermost transform `torch.func.functionalize`? It takes operators, and no autograd functions."""
    return torch._C._functorch.peek_interpreter_stack().key() == torch._C._functorch.TransformType.Functionalize


def describes(operator: Any) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Make a function the fake of `operator`: it gives results of the right shapes and dtypes, without computing
    them. Where launches are recorded, the operator itself runs on tensors without memory, so that its launches are,
    too."""

    def register(shapes: Callable[P, Result]) -> Callable[P, Result]:
        def fake(*args: P.args, **named: P.kwargs) -> Result:
            target = simulator.get()
            recording = target is not None and "meta" in target.device_types
            if recording and is_plain(*[x for x in args if isinstance(x, Tensor)]):
                return operator._init_fn(*args, **named)
            return shapes(*args, **named)

        operator.register_fake(fake)
        return shapes

    return register


_transformed: dict[str, type[torch.autograd.Function]] = {}
Rule = Callable[..., tuple[Any, Any]]


def register(
    operator: Any,
    rule: Rule,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Give `operator` its rule under vmap and, where it has one, its gradient.

    `rule`: a function of what to call, the dimension of samples of every argument (None: it has none), their number,
    and the arguments; it returns results and their dimensions of samples. `backward`, `setup_context`: as
    `torch.library.register_autograd` takes them.
    """
    operator.register_vmap(_batched(operator, rule))
    if backward is None:
        return
    operator.register_autograd(backward, setup_context=setup_context)
    name = operator._qualname.split("::")[1]
    run = functools.partial(call, name)
    methods: dict[str, Any] = dict(
        forward=run, setup_context=setup_context or _nothing_saved, backward=backward, vmap=_batched(run, rule)
    )
    _transformed[name] = type(
        f"Transformed_{name}",
        (torch.autograd.Function,),
        {key: staticmethod(method) for key, method in methods.items()},
    )


def _nothing_saved(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The context of a backward that refuses."""


def _batched(operator: Callable[..., Any], rule: Rule) -> Callable[..., tuple[Any, Any]]:
    return lambda info, in_dims, *args: rule(operator, in_dims, info.batch_size, *args)


# ---------------------------------------------------------------- vmap


def vmap_by_batch(operator: Callable[..., Any], dims: tuple[int | None, ...], size: int, *args: Any) -> tuple[Any, Any]:
    """`operator` under vmap where every tensor's first dimension, and every result's, is a batch: the samples of vmap
    become part of it."""
    batch = next(x.shape[1 if dim == 0 else 0] for x, dim in zip(args, dims, strict=True) if dim is not None)

    def merged(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    return _with_samples_first(operator(*map(merged, args, dims)), lambda x: x.unflatten(0, (size, batch)))


def vmap_by_loop(operator: Callable[..., Any], dims: tuple[int | None, ...], size: int, *args: Any) -> tuple[Any, Any]:
    """`operator` under vmap, sample by sample."""
    if size == 0:
        raise ValueError("vmap over no samples: without one nobody knows what the results are like")
    found = [
        operator(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, dims, strict=True)))
        for i in range(size)
    ]
    if isinstance(found[0], Tensor):
        return torch.stack(found), 0
    return tuple(torch.stack(results) for results in zip(*found, strict=True)), (0,) * len(found[0])


def _with_samples_first(results: Any, split: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    if isinstance(results, Tensor):
        return split(results), 0
    return tuple(map(split, results)), (0,) * len(results)


# ---------------------------------------------------------------- out=


def check_written(name: str, out: Tensor, argument: str = "out") -> None:
    """Raise ValueError for an `out` (by its name, `argument`) whose strides do not keep its elements apart."""
    reach = 0  # elements from the first to the last of the dimensions that were looked at
    for stride, extent in sorted(
        (stride, extent) for extent, stride in zip(out.shape, out.stride(), strict=True) if extent > 1
    ):
        if stride <= reach:
            raise ValueError(
                f"{name}: {argument} is {tuple(out.shape)} with strides {out.stride()}; some of its elements share "
                "memory"
            )
        reach += stride * (extent - 1)


def write(name: str, result: Tensor, out: Tensor | None) -> Tensor:
    """`result`, or `out` after `result` was copied to it.

    Raises TypeError or ValueError where dtype or shape of `out` differ, in the name of the public function `name`.
    """
    if out is None:
        return result
    check_tensors(name, out=out)
    if out.dtype != result.dtype:
        raise TypeError(f"{name}: out has dtype {out.dtype}; it must be {result.dtype}")
    if out.shape != result.shape:
        raise ValueError(f"{name}: out is {tuple(out.shape)}; it must be {tuple(result.shape)}")
    if not is_compiling():
        check_written(name, out)
    return out.copy_(result)


def announce_write(out: Tensor) -> None:
    """Increase the version of `out`, which a kernel writes: a backward that saved `out` before then raises.

    Raises RuntimeError for an inference tensor outside of inference mode.
    """
    if not torch.is_inference_mode_enabled():
        torch._C._increment_version((out,))


def overlaps(out: Tensor, *operands: Tensor | None) -> bool:
    """May `out` share memory with an operand? None stands for an operand left out."""
    return overlaps_within(reaches(out, *operands), out, *operands)


def overlaps_within(reaches: tuple[int, ...], out: Tensor, *operands: Tensor | None) -> bool:
    """`overlaps` of tensors whose `reaches` are known. By addresses, since two storages may share memory
    (`torch.from_dlpack`)."""
    first = out.data_ptr()
    behind = first + reaches[0]
    for i, x in enumerate(operands, 1):
        if x is not None:
            start = x.data_ptr()
            if first < start + reaches[i] and start < behind:
                return True
    return False


def reaches(*tensors: Tensor | None) -> tuple[int, ...]:
    """Bytes from the first up to the last of each tensor: the same for all tensors of their shapes, strides and
    dtypes."""
    return tuple(
        0
        if x is None or x.numel() == 0
        else x.element_size() * (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)))
        for x in tensors
    )


def begin_alike(x: Tensor, y: Tensor) -> bool:
    """Do both begin with the same element of one storage? Also for tensors without memory, whose addresses are 0."""
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata and x.storage_offset() == y.storage_offset()


def is_same_view(x: Tensor, y: Tensor) -> bool:
    """Are both the same elements of one memory, in the same places?"""
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
