"""The kernels in the layers of one model of Hugging Face transformers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from tritonkittens.ops.layers import Replacement

KINDS = ("norm", "mlp", "rotary", "mixer", "experts", "loss")


class Patch:
    """A model whose layers run on the kernels, until `undo` or the end of a `with` block.

    `replaced`: how many layers of each kind. `already_patched`: how many another patch had replaced before.
    """

    def __init__(self, model: str, kinds: tuple[str, ...], replacements: list[Replacement]) -> None:
        self._model = model
        self._replacements = [x for x in replacements if not x.is_in_place]
        self.replaced: dict[str, int] = dict.fromkeys(kinds, 0) | Counter(x.kind for x in self._replacements)
        self.already_patched = dict(Counter(x.kind for x in replacements if x.is_in_place))
        for x in self._replacements:
            setattr(x.module, x.name, x.value)

    def undo(self) -> None:
        """Give the model its own layers back. What else replaced a forward since then stays."""
        for x in self._replacements:
            if x.module.__dict__.get(x.name) is x.value:
                delattr(x.module, x.name)
        self._replacements = []

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.undo()

    def __repr__(self) -> str:
        already = {kind: f" ({count} already patched)" for kind, count in self.already_patched.items()}
        counts = (f"{kind}: {count}{already.get(kind, '')}" for kind, count in self.replaced.items())
        return f"Patch({self._model}, {', '.join(counts)})"


def patch(model: nn.Module, kinds: tuple[str, ...] = KINDS) -> Patch:
    """Run layers of one model of Hugging Face transformers (5.17 or newer) on the shipped kernels.

    A layer is replaced where its class has the code of a known one, such as `LlamaRMSNorm`, which most models share.
    Everything else stays: other layers, other models, parameters, names. Replaced layers run transformers' own code for
    what the kernels do not take: a CPU outside of the simulator, float64, DTensors, forward-mode differentiation.

    Args:
        model: a model, or a part of one.
        kinds: what to replace. "norm": RMS norms, also of heads and with a gate. "mlp": MLPs with a gate; hooks of the
            activation in them do not run. "rotary": rotary embeddings in attention. "mixer": causal convolutions,
            Mamba-2's scan and the gated delta rule, with and without a cache. "experts": experts with a gate. "loss":
            the loss of causal language models. docs/models.md lists kernels and models.

    Returns:
        A `Patch`: `replaced` counts layers by kind. `undo()`, or the end of a `with` block, gives the model its own
        layers back. Another patch of a patched model replaces other kinds only; `already_patched` counts the rest. A
        `copy.deepcopy` that is made in a block stays patched after it. `torch.nn.DataParallel` cannot run a patched
        model: its replicas have the forwards of the model itself.

    Raises:
        TypeError: for what is no module, or kinds that are no tuple.
        ValueError: for another kind.
        ImportError: without transformers.

    Example::

        with patch(model) as patched:
            print(patched)
            model.generate(**inputs)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model is {type(model).__name__}; it must be a torch.nn.Module")
    if not isinstance(kinds, (tuple, list)):
        raise TypeError(f"patch: kinds is a {type(kinds).__name__}; give a tuple, such as kinds=('norm', 'mlp')")
    wrong = [kind for kind in kinds if kind not in KINDS]
    if wrong:
        raise ValueError(f"patch: kinds contain {wrong[0]!r}; they are {', '.join(map(repr, KINDS))}")
    from tritonkittens.ops.layers import replacements

    return Patch(type(model).__name__, kinds, list(replacements(model, kinds)))
