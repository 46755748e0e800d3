"""FullyShardedDataParallel and DistributedDataParallel: the older wrappers."""

from tracekit.conventions.strategies import GATHERED_BYTES, REDUCED_BYTES
from tracekit.simulate.job import Job
from tracekit.simulate.program import (
    ALL_REDUCE_STREAM,
    GATHER_STREAM,
    MAIN_STREAM,
    REDUCE_STREAM,
    Allocate,
    Free,
    Synchronize,
)
from tracekit.simulate.schedule import Schedule, Sharded


class Ddp(Schedule):
    """DistributedDataParallel with a bucket per layer: gradients are all-reduced while backward goes on."""

    def leave_backward(self, layer: int) -> None:  # noqa: ARG002 all layers are alike
        """Reduce the layer's bucket."""
        if self.reduces:
            self._reduce(self.job.model.layer_parameters)

    def end_backward(self) -> None:
        """Reduce the root's bucket and wait for all."""
        if self.reduces:
            self._reduce(2 * self.job.model.outer_parameters)
            self.host.follow(MAIN_STREAM, ALL_REDUCE_STREAM)

    def begin_forward(self) -> None:
        """Leave DDP's mark."""
        with self.host.span("DistributedDataParallel.forward"):
            pass

    def _reduce(self, parameters: int) -> None:
        self.host.follow(ALL_REDUCE_STREAM, MAIN_STREAM)
        self.collective("all_reduce", ALL_REDUCE_STREAM, parameters, ranks=self.job.gpus)


class Fsdp1(Sharded):
    """FullyShardedDataParallel: at most two gathers ahead, limited on the host; AG and RS share a communicator.

    Its post-backward stream waits for compute, which by then waits for the next unit's gather: so the preparation of
    gradients (cast, divide) begins together with the next unit's compute, and is slowed by it (give-way).
    """

    prefix = "FullyShardedDataParallel."

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._freed: list[int] = []

    def begin_forward(self) -> None:
        """Gather the root, which stays gathered."""
        with self.span("forward"), self.span("_pre_forward"):
            self.host.follow(GATHER_STREAM, MAIN_STREAM)  # for the weights that the optimizer has just written
            self._gather(None)
            self.await_gather(None)

    def enter_forward(self, layer: int) -> None:
        """Gather the layer, once the one before the last is free."""
        with self.span("_pre_forward"):
            self._gather(layer)
            self.await_gather(layer)

    def leave_forward(self, layer: int) -> None:
        """Free the layer's weights."""
        with self.span("_post_forward"):
            self._free(layer)

    def begin_backward(self) -> None:
        """Gather the last layer while the head's backward pass runs."""
        with self.span("_pre_backward_hook"):
            self.host.follow(GATHER_STREAM, MAIN_STREAM)
            if self.job.impairments.prefetches:
                self._gather(self.layers - 1)

    def enter_backward(self, layer: int) -> None:
        """Wait for the layer's weights, reduce the layer above, gather the layer below."""
        with self.span("_pre_backward_hook"):
            if layer not in self.gathers:
                self._gather(layer)
            self.await_gather(layer)
        if layer < self.layers - 1:
            self._post_backward(layer + 1)
        if layer and self.job.impairments.prefetches:
            with self.span("_pre_backward_prefetch"):
                self._gather(layer - 1)

    def leave_backward(self, layer: int | None) -> None:
        """Add the gradients of the unit's weights into its flat one."""
        self.move("aten::cat", "CatArrayBatchedCopy<c10::BFloat16>", 4, self.parameters(layer), MAIN_STREAM)

    def end_backward(self) -> None:
        """Reduce what is left, and wait for it."""
        self._post_backward(0)
        self.leave_backward(None)
        self._post_backward(None)
        self.host.follow(MAIN_STREAM, REDUCE_STREAM)
        self.free_weights(None)

    def _gather(self, layer: int | None) -> None:
        if len(self._freed) >= 2:
            with self.span("rate_limiter"):
                self.host.add(Synchronize(self._freed.pop(0), "cudaEventSynchronize"))
        self.host.add(Allocate(f"weights {layer}", GATHERED_BYTES * self.parameters(layer)))
        self.gather(layer)

    def _free(self, layer: int) -> None:
        self._freed.append(self.host.record(MAIN_STREAM))
        self.free_weights(layer)

    def _post_backward(self, layer: int | None) -> None:
        parameters = self.parameters(layer)
        with self.span("_post_backward_hook"):
            if layer is not None:
                self._free(layer)
            if not self.reduces:
                return
            self.host.follow(REDUCE_STREAM, MAIN_STREAM)
            buffer = f"gradients {layer}"
            self.host.add(Allocate(buffer, REDUCED_BYTES * parameters))
            self.cast_and_divide(parameters, REDUCE_STREAM)
            self.collective("reduce_scatter", REDUCE_STREAM, parameters)
            self.host.add(Free(buffer))
