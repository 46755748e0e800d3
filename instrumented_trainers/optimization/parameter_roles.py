"""Which parameters of a model decay, and which are the matrices inside its layers.

Determined on the model before it is sharded: shards may be one-dimensional, and their modules wrapped.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

_WRAPPERS = frozenset({"module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


@dataclass(frozen=True)
class ParameterRoles:
    """Names of parameters, as `nn.Module.named_parameters` gives them before sharding."""

    numels: Mapping[str, int]
    decayed: frozenset[str]
    """All but norms, biases (fewer than two dims) and embeddings, a head that shares its weight with one included."""
    hidden_matrices: frozenset[str]
    """The two-dimensional ones inside ``layers``."""

    @classmethod
    def of(cls, model: nn.Module) -> "ParameterRoles":
        """Return the roles of a model that has `layers`, not yet sharded."""
        embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
        parameters = dict(model.named_parameters())
        decayed = frozenset(name for name, p in parameters.items() if p.dim() > 1 and id(p) not in embeddings)
        hidden = frozenset(name for name in decayed if name.startswith("layers.") and parameters[name].dim() == 2)
        return cls({name: p.numel() for name, p in parameters.items()}, decayed, hidden)

    def describe(self, weight_decay: float) -> str:
        """Return a line on how many parameters decay, and how many do not."""
        undecayed = [name for name in self.numels if name not in self.decayed]
        return f"weight decay {weight_decay:g} on {self._size(self.decayed)}, none on {self._size(undecayed)}"

    def _size(self, names: Iterable[str]) -> str:
        names = tuple(names)
        return f"{sum(self.numels[name] for name in names):,} parameters in {len(names)} tensors"


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a sharded model's parameters under the names that they had before."""
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


def plain_name(name: str) -> str:
    """Return a parameter's name without the wrappers around its modules.

    >>> plain_name("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.norm.weight")
    'layers.0.norm.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
