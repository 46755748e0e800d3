"""Classes of parameters that say how they are gathered, as fp8's do: FSDP2's extensions of its all-gather.

``fsdp_pre_all_gather`` makes of a rank's rows what is sent, ``fsdp_post_all_gather`` makes the whole weight of what has
come (`torch.distributed.fsdp._fully_shard._fsdp_param` of torch 2.13).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor


@dataclass(frozen=True)
class OriginalClass:
    """The class of a parameter with gather hooks, whose values are one inner tensor."""

    kind: type[Any]
    inner_name: str
    context: Any

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @classmethod
    def of(cls, parameter: Tensor) -> Self | None:
        """Class of a parameter that has gather hooks; None of any other."""
        if not has_gather_hooks(parameter):
            return None
        (inner_name,), context = parameter.__tensor_flatten__()  # type: ignore[attr-defined]
        return cls(type(parameter), inner_name, context)

    def wrap(self, values: Tensor) -> Tensor:
        """Tensor of the class with these values."""
        wrapped: Tensor = self.kind.__tensor_unflatten__(
            {self.inner_name: values}, self.context, values.shape, values.stride()
        )
        return wrapped


def has_gather_hooks(parameter: Tensor) -> bool:
    """Return whether the class of a parameter says how it is gathered."""
    return hasattr(parameter, "fsdp_pre_all_gather")


def plain_values(tensor: Tensor) -> Tensor:
    """Values of a tensor with gather hooks, as a plain tensor; any other tensor as it is."""
    original_class = OriginalClass.of(tensor)
    return tensor if original_class is None else getattr(tensor, original_class.inner_name)


def refuse_gather_hooks(parameter: Tensor, name: str, world_size: int) -> None:
    """Raise NotImplementedError for a parameter with gather hooks whose parts YaFSDP cannot make or hand to them."""
    kind = type(parameter).__name__
    if not hasattr(parameter, "fsdp_post_all_gather"):
        raise NotImplementedError(f"YaFSDP: {name} is a {kind} with fsdp_pre_all_gather, but no fsdp_post_all_gather")
    if not hasattr(parameter, "__tensor_flatten__") or len(_inner_names(parameter)) != 1:
        raise NotImplementedError(
            f"YaFSDP: {name} is a {kind}, gathered by fsdp_pre_all_gather, whose values are not one inner tensor of "
            "__tensor_flatten__; use FSDP2"
        )
    values = plain_values(parameter)
    if (values.shape, values.dtype) != (parameter.shape, parameter.dtype):
        raise NotImplementedError(
            f"YaFSDP: {name} is a {kind}, gathered by fsdp_pre_all_gather, whose inner tensor has another shape or "
            "dtype than it; use FSDP2"
        )
    if not parameter.dim() or parameter.shape[0] % world_size:
        raise NotImplementedError(
            f"YaFSDP: {name} {tuple(parameter.shape)} is a {kind}, gathered by fsdp_pre_all_gather, whose first dim "
            f"cannot be divided by {world_size} ranks"
        )


def _inner_names(parameter: Tensor) -> Sequence[str]:
    names: Sequence[str] = parameter.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return names
