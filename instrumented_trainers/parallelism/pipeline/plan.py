"""Which stage has which layers, and which rank which stages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tracekit.conventions import pipeline_schedules
from tracekit.conventions.strategies import PP, Layout


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline of `ranks` along the mesh's axis pp, each with as many stages of a model of `layers` layers."""

    schedule: str
    ranks: int
    stages_per_rank: int
    layers: int
    micro_batches: int

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ranks * self.stages_per_rank

    def layers_of(self, stage: int) -> range:
        """Return the layers of a stage. Those that are left over go to stages without embedding or head, if any.

        >>> [len(PipelinePlan("1f1b", 4, 1, layers=10, micro_batches=8).layers_of(stage)) for stage in range(4)]
        [2, 3, 3, 2]
        """
        size, remainder = divmod(self.layers, self.stages)
        last = self.stages - 1
        larger = sorted(range(self.stages), key=lambda index: (index == last, index == 0, index))[:remainder]
        begins = [0]
        for number in range(self.stages):
            begins.append(begins[-1] + size + (1 if number in larger else 0))
        return range(begins[stage], begins[stage + 1])

    def stages_on(self, place: int) -> tuple[int, ...]:
        """Return the stages on a rank of that place along pp, in their order.

        >>> PipelinePlan("interleaved", 4, 2, 8, 8).stages_on(1), PipelinePlan("zbv", 4, 2, 8, 8).stages_on(1)
        ((1, 5), (1, 6))
        """
        return pipeline_schedules.stages_at(self.schedule, self.stages, self.ranks, place)

    def as_manifest(self, layout: Layout) -> Mapping[str, Any]:
        """Entry ``pipeline`` of `run.json`: by stage the ranks that run it, and its layers."""
        places = {stage: place for place in range(self.ranks) for stage in self.stages_on(place)}
        ranks = range(layout.world_size)
        return {
            "schedule": self.schedule,
            "stages": self.stages,
            "virtual_stages": self.stages_per_rank,
            "micro_batches": self.micro_batches,
            "stage_ranks": [
                [rank for rank in ranks if layout.coordinate(rank)[PP] == places[stage]] for stage in sorted(places)
            ],
            "stage_layers": [list(self.layers_of(stage)) for stage in sorted(places)],
        }
