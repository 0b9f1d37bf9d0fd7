"""A linear layer and cross entropy of what it computes, a chunk of tokens after the other, so that the logits of all
tokens never exist at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritonkittens.kernels._tensors import padded_empty
from tritonkittens.kernels.gemm import gemm
from tritonkittens.kernels.loss.call_plan import Options, run_cross_entropy, run_cross_entropy_backward, run_loss_sum
from tritonkittens.kernels.loss.config import SCALE_BLOCK, SCALE_PROGRAMS, TOKENS, TOKENS_UNIT
from tritonkittens.kernels.loss.device.linear import scale_in_place
from tritonkittens.launch import device_facts


class Wanted(NamedTuple):
    """Which operands want gradients, in the order of the operator."""

    input: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """Gradients of a linear layer and its loss, in the order of the operator; None for one that is not wanted."""

    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def forward_differentiates(options: Options, dtype: torch.dtype) -> bool:
    """Return whether the forward computes gradients, for a gradient of the loss of 1, and the backward scales them.

    In fp16 they could overflow, or have few digits left, where a scaled loss has gradients that fit.
    """
    return options.reduction != "none" and dtype != torch.float16


def chunk_tokens(tokens: int) -> int:
    """Return how many tokens a chunk has: at most `TOKENS`, and alike in all chunks."""
    if tokens <= TOKENS:
        return max(tokens, 1)
    even = -(-tokens // -(-tokens // TOKENS))
    return -(-even // TOKENS_UNIT) * TOKENS_UNIT


def run_chunks(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: Options,
    wanted: Wanted,
    of_rows: Tensor | None,
    scale: Tensor | None,
) -> tuple[Tensor, Gradients]:
    """Return losses of the tokens, and gradients.

    The gradient of the weight is summed over chunks in its own dtype: of 2,048 features or more, a sum in fp32 would
    take more memory than the logits of a chunk.

    Args:
        of_rows: gradients of the losses, (tokens); None: they are `scale`.
        scale: what gradients are multiplied by in fp32; None: 1.
    """
    tokens = len(input)
    step = chunk_tokens(tokens)
    dinput = torch.empty_like(input, memory_format=torch.contiguous_format) if wanted.input else None
    dbias = torch.zeros(len(weight), dtype=torch.float32, device=input.device) if wanted.bias else None
    dweight = weight.new_empty(weight.shape) if wanted.weight else None
    by_row = options._replace(reduction="none", lse_wanted=False)
    memory = padded_empty((min(step, tokens), len(weight)), input)  # of the logits of a chunk
    losses, gradients = [], options._replace(reduction="sum" if of_rows is None else "none", lse_wanted=False)
    one = torch.ones((), dtype=torch.float32, device=input.device) if of_rows is None and any(wanted) else None
    for first in range(0, tokens, step):
        rows = slice(first, first + step)
        x, labels = input[rows], target[rows]
        logits = gemm(x, weight.T, bias=bias, out=memory[: len(x)])
        found = run_cross_entropy(logits, labels, by_row)
        losses.append(found.loss)
        if any(wanted):
            dloss = one if of_rows is None else of_rows[rows]
            assert dloss is not None
            logits = run_cross_entropy_backward(dloss, None, logits, labels, found.lse, None, gradients, inplace=True)
        if dinput is not None:
            gemm(logits, weight, scale_a=scale, out=dinput[rows])
        if dweight is not None:
            gemm(logits.T, x, residual=dweight if first else None, scale_a=scale, out=dweight)
        if dbias is not None:
            dbias += logits.sum(0, dtype=torch.float32)
    if dweight is not None and tokens == 0:
        dweight.zero_()
    if dbias is not None and bias is not None:
        dbias = (dbias if scale is None else dbias * scale).to(bias.dtype)
    all_losses = losses[0] if len(losses) == 1 else torch.cat(losses) if losses else input.new_empty(0).float()
    return all_losses, Gradients(dinput, dweight, dbias)


def _share(target: Tensor, options: Options) -> Tensor | None:
    """Return the gradient of the loss of a token that is not ignored; None for 1."""
    if options.reduction != "mean":
        return None
    return (target != options.ignore_index).sum(dtype=torch.float32).clamp_(min=1).reciprocal_()


def _rows(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return input.reshape(-1, input.shape[-1]), target.reshape(-1).contiguous()


def run_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, wanted: Wanted
) -> tuple[Tensor, Gradients]:
    """The loss, and the gradients that are wanted where `forward_differentiates`."""
    x, labels = _rows(input, target)
    if not forward_differentiates(options, input.dtype):
        wanted = Wanted(False, False, False)
    scale = _share(labels, options) if any(wanted) else None
    losses, found = run_chunks(x, weight, labels, bias, options, wanted, None, scale)
    if options.reduction == "none":
        return losses.view(target.shape), found
    dinput = None if found.input is None else found.input.view(input.shape)
    return run_loss_sum(losses, labels, options)[0], found._replace(input=dinput)


def run_linear_cross_entropy_backward(
    dloss: Tensor, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options, wanted: Wanted
) -> Gradients:
    """Gradients for any gradient of the loss; it computes the logits again."""
    x, labels = _rows(input, target)
    if options.reduction == "none":
        _, found = run_chunks(x, weight, labels, bias, options, wanted, dloss.reshape(-1), None)
    else:
        share = _share(labels, options)
        _, found = run_chunks(x, weight, labels, bias, options, wanted, None, dloss if share is None else share * dloss)
    return found._replace(input=None if found.input is None else found.input.view(input.shape))


def run_scale(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply a contiguous tensor by a number, in place."""
    if x.numel():
        programs = min(-(-x.numel() // SCALE_BLOCK), SCALE_PROGRAMS * device_facts(x.device).multiprocessors)
        scale_in_place[(programs, 1, 1)](x, factor, x.numel(), SCALE_BLOCK)
    return x
