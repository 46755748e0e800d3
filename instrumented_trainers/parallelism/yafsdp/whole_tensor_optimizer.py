"""An optimizer that needs whole tensors, such as Muon or Shampoo, for the shards of a model.

Each parameter has an owner among the ranks, which keeps the optimizer's state for it. A step gathers weights and
gradients unit by unit, the owners step their whole parameters, and the result is scattered back. So state, and the work
of a step, are divided among the ranks as the weights are.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from instrumented_trainers.parallelism.yafsdp.communication_lane import Lane, PendingCollective, lane_for
from instrumented_trainers.parallelism.yafsdp.flat_parameters import FlatParameters
from instrumented_trainers.parallelism.yafsdp.flat_shard import FlatShard, Owned
from instrumented_trainers.parallelism.yafsdp.optimizer_support import couples_parameters, units_of


class WholeTensorOptimizer(Optimizer):
    """Steps shards by an optimizer of any kind that sees whole tensors.

    Made as that one would be: ``WholeTensorOptimizer(parameters, torch.optim.Muon, lr=0.02)``, with a sharded model's
    parameters or with parameter groups. Its own groups have the options, so schedulers work; its state dict holds
    whole tensors' state under the parameters' numbers, each known to its owner.

    Every rank must make it for the same parameters and step it together. Each step all-gathers the units' weights and
    gradients once and reduce-scatters the weights once, in the dtype of the shards; it needs memory for two of the
    largest unit, and for the weights and gradients of the parameters that the rank owns. Raises ValueError for a
    parameter that is no shard.
    """

    def __init__(self, params: Iterable[Any], kind: Callable[..., Optimizer], **options: Any) -> None:
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
        if groups and all(group.keys() == {"params"} for group in groups):
            groups = [{"params": [parameter for group in groups for parameter in group["params"]]}]
        groups = [group | {"params": list(group["params"])} for group in groups]
        super().__init__(groups, dict(options))
        self._parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._units = units_of(self)
        shard_places = {
            id(parameter.shard): (unit, flat, parameter)
            for unit in self._units
            for flat in unit.flats
            for parameter in flat.parameters
        }
        if any(id(parameter) not in shard_places for parameter in self._parameters):
            raise ValueError("YaFSDP: WholeTensorOptimizer steps the parameters of a sharded model only")
        if any(parameter.place.region for parameter in self._parameters if parameter.place.shows_whole):
            raise NotImplementedError(
                "YaFSDP: WholeTensorOptimizer steps no parameters that are DTensors beneath YaFSDP: it would step the "
                "part that this rank has of them"
            )
        self._places = [shard_places[id(parameter)] for parameter in self._parameters]
        self._flats = list(dict.fromkeys((unit, flat) for unit, flat, _ in self._places))
        self._owners = self._chosen_owners()
        self._whole = [
            nn.Parameter(torch.empty(parameter.shape, dtype=flat.dtype, device=flat.device)) if is_own else None
            for (_, flat, parameter), is_own in zip(self._places, self._is_own(), strict=True)
        ]
        if couples_parameters(kind, options):
            raise NotImplementedError(
                f"YaFSDP: {getattr(kind, '__name__', kind)} with these options depends on all parameters together, as "
                "by the norm of all gradients or a rate estimated from all, and a rank steps some; clip by "
                "clip_grad_norm_ before the step, or take an optimizer that steps parameters one by one"
            )
        self._inner = kind(self._owned_groups(groups), **options)
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({name: value for name, value in inner.items() if name != "params"})
        self.defaults = self._inner.defaults
        self._lanes = {unit: lane_for(unit.device, unit.ranks) for unit in self._units}
        self._described: list[dict[str, Any]] | None = None

    def _chosen_owners(self) -> list[int]:
        """Rank of its unit that owns each parameter: the one with the fewest elements until then."""
        load: dict[Any, list[int]] = {}
        owners = []
        for unit, _, parameter in self._places:
            of_group = load.setdefault(unit.ranks.members, [0] * unit.ranks.shards.size())
            owners.append(of_group.index(min(of_group)))
            of_group[owners[-1]] += parameter.shape.numel()
        return owners

    def _is_own(self) -> list[bool]:
        return [owner == unit.rank for owner, (unit, _, _) in zip(self._owners, self._places, strict=True)]

    def _owned_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        owned = iter(self._whole)
        return [
            group | {"params": [weight for _ in group["params"] if (weight := next(owned)) is not None]}
            for group in groups
        ]

    # Stepping --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({name: value for name, value in group.items() if name != "params"})
        for flat, weights, gradients in self._gather_flats():
            for number, weight in self._owned_in(flat):
                span = self._places[number][2].span
                has_gradient = self._parameters[number].grad is not None
                weight.copy_(weights[span].view(weight.shape))
                weight.grad = gradients[span].view(weight.shape).clone() if has_gradient else None
        self._inner.step()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({name: value for name, value in inner.items() if name != "params"})  # some count steps there
        self._scatter()
        for weight in self._whole:
            if weight is not None:
                weight.grad = None
        self._describe()
        return loss

    def _owned_in(self, flat: FlatParameters) -> Iterator[tuple[int, nn.Parameter]]:
        for number, (place, weight) in enumerate(zip(self._places, self._whole, strict=True)):
            if place[1] is flat and weight is not None:
                yield number, weight

    def _gather_flats(self) -> Iterator[tuple[FlatParameters, Tensor, Tensor]]:
        """Yield whole weights and gradients of each flat tensor, while those of the next are gathered."""
        running: list[tuple[FlatParameters, Tensor, Tensor, PendingCollective]] = []
        for unit, flat in self._flats:
            running.append(self._gather(self._lanes[unit], flat))
            if len(running) > 1:
                yield _finish_gather(*running.pop(0))
        for gather in running:
            yield _finish_gather(*gather)

    def _gather(self, lane: Lane, flat: FlatParameters) -> tuple[FlatParameters, Tensor, Tensor, PendingCollective]:
        weights = torch.empty(flat.layout.numel, dtype=flat.dtype, device=flat.device)
        gradients = torch.zeros_like(weights)
        lane.chunk(weights).copy_(flat.master)
        for parameter in flat.parameters:
            if parameter.shard.grad is not None:
                flat.own_part(lane.chunk(gradients), parameter).copy_(parameter.shard.grad.to_local())
        return flat, weights, gradients, lane.all_gather([weights, gradients])

    def _scatter(self) -> None:
        """Give each rank its shards of what the owners stepped: sums of one owner's values and of zeros."""
        for unit, flat in self._flats:
            buffer = torch.zeros(flat.layout.numel, dtype=flat.dtype, device=flat.device)
            for number, owned in self._owned_in(flat):
                buffer[self._places[number][2].span] = owned.flatten()
            lane = self._lanes[unit]
            lane.reduce_scatter([buffer], over_replicas=False).wait()
            for parameter, (_, parameter_flat, unit_parameter) in zip(self._parameters, self._places, strict=True):
                if parameter_flat is flat and parameter.grad is not None:
                    parameter.to_local().copy_(flat.own_part(lane.chunk(buffer), unit_parameter))

    # State -----------------------------------------------------------------------------------------------------------

    def _describe(self) -> None:
        """Send all ranks, once, which state there is of each parameter: its owner alone has it."""
        if self._described is not None:
            return
        own_state = {
            number: tree_map(_describe_value, dict(self._inner.state[weight]))
            for number, weight in enumerate(self._whole)
            if weight is not None and weight in self._inner.state
        }
        described: list[dict[str, Any]] = [{} for _ in self._parameters]
        for group in dict.fromkeys(unit.ranks.shards for unit in self._units):
            answers: list[Any] = [None] * group.size()
            dist.all_gather_object(answers, own_state, group=group)
            for answer in answers:
                for number, values in answer.items():
                    described[number] = values
                    self.state[self._parameters[number]] = {}  # not empty: there is state, though not of this shard
        self._described = described

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters: tensors of which the owner has all elements and the others none."""
        state = {
            number: self._state_of(number, described)
            for number, described in enumerate(self._described or [])
            if described
        }
        numbers = iter(range(len(self._parameters)))
        groups = [group | {"params": [next(numbers) for _ in group["params"]]} for group in self.param_groups]
        return {"state": state, "param_groups": groups}

    def _state_of(self, number: int, described: dict[str, Any]) -> Any:
        """Return the state of a parameter: any nesting of tensors, of which the owner has the elements."""
        (unit, _, _), weight = self._places[number], self._whole[number]
        leaves, tree = tree_flatten(described)
        values = leaves if weight is None else tree_leaves(dict(self._inner.state[weight]))

        def shard(described: Any, value: Any) -> Any:
            if not isinstance(described, _Value):
                return described
            place = Owned(described.shape, self._owners[number], unit.ranks.shards, unit.device)
            if weight is None:
                return FlatShard(torch.empty(0, dtype=described.dtype, device=described.device), place)
            return FlatShard(torch.as_tensor(value).contiguous().view(-1), place)

        return tree_unflatten([shard(*pair) for pair in zip(leaves, values, strict=True)], tree)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, on any number of ranks, or state with whole tensors.

        Raises ValueError if the groups have other numbers of parameters.
        """
        saved, groups = state_dict["param_groups"], self.param_groups
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
            raise ValueError("YaFSDP: the loaded optimizer's groups have other numbers of parameters")
        self._describe()  # which state there is, and of what type a number was
        for group, loaded in zip(groups, saved, strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
        numbers = [number for group in saved for number in group["params"]]
        for number, weight, described in zip(numbers, self._whole, self._described or [], strict=True):
            if weight is not None and number in state_dict["state"]:
                loaded = functools.partial(_load_value, parameter=weight)
                self._inner.state[weight] = _map_values(loaded, dict(state_dict["state"][number]), described)
        self._described = None
        self._describe()


def _finish_gather(
    flat: FlatParameters, weights: Tensor, gradients: Tensor, pending: PendingCollective
) -> tuple[FlatParameters, Tensor, Tensor]:
    pending.wait()
    return flat, weights, gradients


class _Value:
    """What a rank must know of a tensor or a number that another rank has."""

    def __init__(self, value: Any) -> None:
        tensor = torch.as_tensor(value)
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device.type
        self.number = None if isinstance(value, Tensor) else type(value)


def _describe_value(value: Any) -> Any:
    return _Value(value) if isinstance(value, Tensor | int | float) else value


def _map_values(function: Callable[[Any, Any], Any], values: Any, described: Any) -> Any:
    """Return the values, any nesting, mapped with what is known of each: None of what is new."""
    if isinstance(values, dict):
        by_key = described if isinstance(described, dict) else {}
        return {key: _map_values(function, value, by_key.get(key)) for key, value in values.items()}
    if isinstance(values, list | tuple):
        descriptions = described if isinstance(described, list | tuple) else [None] * len(values)
        return type(values)(_map_values(function, *pair) for pair in zip(values, descriptions, strict=True))
    return function(values, described)


def _load_value(value: Any, described: Any, parameter: nn.Parameter) -> Any:
    """Return a value of the state as the optimizer keeps it: a tensor of its own, or a number."""
    if isinstance(value, FlatShard):
        value = value.local.view(value.shape)
    if not isinstance(value, Tensor):
        return value
    if isinstance(described, _Value) and described.number is not None:
        return described.number(value.item())
    return value.clone() if not value.dim() else value.to(parameter.device, copy=True)
