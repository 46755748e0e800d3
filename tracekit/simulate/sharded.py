"""What the sharded strategies share: units that are gathered into buffers and reduced out of them."""

from tracekit.simulate import kernels
from tracekit.simulate.job import Job
from tracekit.simulate.program import GATHER_STREAM, MAIN_STREAM
from tracekit.simulate.schedule import Schedule

SPLIT, CAST, DIVIDE, ADD = "split_with_sizes_copy", "CastFunctor<float>", "DivFunctor<float>", "AddFunctor<float>"


class Sharded(Schedule):
    """What the sharded strategies share: units that are gathered into buffers and reduced out of them."""

    gathers: dict[int, int]
    """By layer: the event that its gather is done."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.gathers = {}

    def gather(self, layer: int | None, *, after: int | None = None) -> None:
        """Gather a unit on the gather stream, after an event; without prefetching, after all compute so far."""
        parameters = self.parameters(layer)
        if after is not None:
            self.host.wait(GATHER_STREAM, after)
        if not self.job.impairments.prefetches:
            self.host.follow(GATHER_STREAM, MAIN_STREAM)
        self.collective("all_gather", GATHER_STREAM, parameters)
        self.gathers[-1 if layer is None else layer] = self.host.record(GATHER_STREAM)

    def await_gather(self, layer: int | None) -> None:
        """Let compute wait for a unit's gather."""
        self.host.wait(MAIN_STREAM, self.gathers.pop(-1 if layer is None else layer))

    def parameters(self, layer: int | None) -> int:
        """Return the weights of a unit; the root holds embedding and head."""
        return 2 * self.job.model.outer_parameters if layer is None else self.job.model.layer_parameters

    def move(self, op: str, what: str, bytes_per_parameter: float, parameters: int, stream: int) -> None:
        """Run an op that copies, casts or divides a unit's gradients."""
        with self.host.op(op, {"Input Dims": ((parameters,),)}):
            for kernel in kernels.moving(self.job, what, bytes_per_parameter, parameters, stream):
                self.host.launch(kernel)
