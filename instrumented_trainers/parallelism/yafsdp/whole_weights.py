"""Whole weights of a sharded module outside its forward: to read, to change, or to run without communication."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from instrumented_trainers.parallelism.yafsdp.communication_lane import lane_for
from instrumented_trainers.parallelism.yafsdp.flat_parameters import FlatParameters, UnitParameter
from instrumented_trainers.parallelism.yafsdp.refusals import refuse_running
from instrumented_trainers.parallelism.yafsdp.unit import Unit


class WholeWeights:
    """The whole weights of units, in memory of their own, in the place of the shards until `reshard`.

    Also a context that reshards at its end.
    """

    def __init__(self, units: Sequence[Unit], *, writeback: bool) -> None:
        """Gather the weights. Raises RuntimeError if a unit runs, or is unsharded already."""
        for unit in units:
            refuse_running(unit, "be unsharded")
        self._units, self._writeback = list(units), writeback
        self._weights: dict[UnitParameter, nn.Parameter] = {}
        for unit in self._units:
            for flat in unit.flats:
                self._register(flat, _gather_weights(flat))
            unit.is_unsharded = True

    def _register(self, flat: FlatParameters, flat_weights: Tensor) -> None:
        for parameter in flat.parameters:
            values = flat_weights[parameter.span].view(parameter.shape)
            requires_grad = parameter.shard.requires_grad
            self._weights[parameter] = parameter.module_parameter(values, requires_grad=requires_grad)
            parameter.register(self._weights[parameter])

    @torch.no_grad()
    def reshard(self) -> None:
        """Register the shards again; each rank keeps its part of what was written, unless without `writeback`."""
        for parameter, weight in self._weights.items():
            if self._writeback:
                parameter.copy_from_whole(weight)
            parameter.register(parameter.shard)
        self._weights.clear()
        for unit in self._units:
            unit.is_unsharded = False
        self._units.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reshard()


@torch.no_grad()
def _gather_weights(flat: FlatParameters) -> Tensor:
    weights = torch.empty(flat.layout.numel, dtype=flat.dtype, device=flat.device)
    lane = lane_for(flat.device, flat.ranks)
    lane.chunk(weights).copy_(flat.master)
    lane.all_gather([weights]).wait()
    return weights
