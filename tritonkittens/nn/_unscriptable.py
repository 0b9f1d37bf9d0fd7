"""Modules that TorchScript cannot compile."""

from __future__ import annotations

from typing import NoReturn

from torch import nn


class Unscriptable:
    """A base of modules for which `torch.jit.script` raises NotImplementedError that says what to use instead."""

    def __prepare_scriptable__(self) -> NoReturn:
        name = type(self).__name__
        instead = f", or keep torch.nn.{name} in what is scripted" if hasattr(nn, name) else ""
        raise NotImplementedError(
            f"torch.jit.script({name}): TorchScript cannot compile it; use torch.compile or torch.export{instead}"
        )
