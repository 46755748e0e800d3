"""What the strategies do around each layer: DDP, FSDP1, fully_shard (on a mesh of two axes HSDP), and YaFSDP."""

from tracekit.conventions.strategies import GATHERED_BYTES, REDUCED_BYTES
from tracekit.simulate import kernels
from tracekit.simulate.job import Job
from tracekit.simulate.program import (
    ALL_REDUCE_STREAM,
    COPY_IN_STREAM,
    GATHER_STREAM,
    MAIN_STREAM,
    REDUCE_STREAM,
    REPLICATE,
    Allocate,
    Free,
    Synchronize,
)
from tracekit.simulate.schedule import Schedule, Sharded

_SPLIT, _ADD = "split_with_sizes_copy", "AddFunctor<float>"


class Fsdp2(Sharded):
    """fully_shard: prefetches on the device without blocking the host; gradients are packed on the compute stream.

    As by default, gathers and reductions share a communicator, and one reduction is in flight.
    """

    prefix = "FSDP::"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._reduced: list[int] = []
        self._copied_out: int | None = None

    def begin_forward(self) -> None:
        """Gather the root, which stays gathered."""
        with self.span("pre_forward", None):
            self.host.follow(COPY_IN_STREAM, MAIN_STREAM)  # for the weights that the optimizer has just written
            self._unshard(None)
            self._await(None)

    def enter_forward(self, layer: int) -> None:
        """Gather the layer."""
        with self.span("pre_forward", layer):
            self._unshard(layer)
            self._await(layer)

    def leave_forward(self, layer: int) -> None:
        """Free the layer's weights."""
        with self.span("post_forward", layer):
            self.free_weights(layer)

    def enter_backward(self, layer: int) -> None:
        """Gather the layer, if that was not done early, and the one below early."""
        with self.span("pre_backward", layer):
            if layer not in self.gathers:
                self._unshard(layer)
            self._await(layer)
            if layer and self.job.impairments.prefetches:
                with self.span(f"backward_prefetch for layers.{layer - 1}"):
                    self._unshard(layer - 1)

    def leave_backward(self, layer: int) -> None:
        """Reduce the layer's gradients once those of the layer above are reduced."""
        with self.span("post_backward_reshard", layer):
            self.free_weights(layer)
        self._reduce(layer)

    def end_backward(self) -> None:
        """Reduce the root's gradients, and wait for all."""
        with self.span("root_post_backward_callback"):
            self._reduce(None)
            for event in self._reduced:
                self.host.wait(MAIN_STREAM, event)
            self._reduced = []
            self.free_weights(None)

    def _unshard(self, layer: int | None) -> None:
        parameters = self.parameters(layer)
        with self.span("all_gather", layer):
            self.host.add(Allocate(f"weights {layer}", 2 * GATHERED_BYTES * parameters))
            shard = parameters // self.job.shards
            self.move("fsdp::all_gather_copy_in", _SPLIT, kernels.COPY_BYTES, shard, COPY_IN_STREAM)
            self.host.follow(GATHER_STREAM, COPY_IN_STREAM)
            self.gather(layer)

    def _await(self, layer: int | None) -> None:
        if self._copied_out is not None:
            self.host.wait(COPY_IN_STREAM, self._copied_out)  # the gather after this one may overwrite its output
        self.await_gather(layer)
        with self.span("all_gather_copy_out", layer):
            self.move("fsdp::split_with_sizes_copy", _SPLIT, kernels.COPY_BYTES, self.parameters(layer), MAIN_STREAM)
        self._copied_out = self.host.record(MAIN_STREAM)

    def _reduce(self, layer: int | None) -> None:
        if not self.reduces:
            return
        parameters = self.parameters(layer)
        with self.span("post_backward_reduce", layer):
            while self._reduced:  # by default one input buffer: the next reduction waits for the last
                with self.span("post_backward_rs_wait", layer):
                    self.host.wait(MAIN_STREAM, self._reduced.pop(0))
            buffer = f"gradients {layer}"
            self.host.add(Allocate(buffer, REDUCED_BYTES * parameters))
            self._prepare(parameters)
            self.collective("reduce_scatter", REDUCE_STREAM, parameters)
            reduced = self.host.record(REDUCE_STREAM)
            shard = parameters // self.job.shards
            self._finish(shard, reduced)
            self.host.add(Free(buffer))

    def _prepare(self, parameters: int) -> None:
        if not self.job.impairments.prepares_on_communication:
            self.move("fsdp::chunk_cat", "chunk_cat_cuda_kernel<float>", kernels.CAST_BYTES, parameters, MAIN_STREAM)
        self.host.follow(REDUCE_STREAM, MAIN_STREAM)
        if self.job.impairments.prepares_on_communication:
            self.cast_and_divide(parameters, REDUCE_STREAM)

    def _finish(self, shard: int, reduced: int) -> None:
        self.move("aten::add_", _ADD, 3 * REDUCED_BYTES, shard, REDUCE_STREAM)
        self._reduced.append(reduced)
        if self.is_last_micro_batch:
            self._reduced[-1] = self.host.record(REDUCE_STREAM)


class Hsdp(Fsdp2):
    """fully_shard on a mesh of two axes: units are sharded inside a node, and their shards all-reduced across nodes."""

    def _finish(self, shard: int, reduced: int) -> None:
        self.host.follow(ALL_REDUCE_STREAM, REDUCE_STREAM)
        ranks = self.job.gpus // self.job.node
        self.collective("all_reduce", ALL_REDUCE_STREAM, shard, group=REPLICATE, ranks=ranks)
        self.move("aten::add_", _ADD, 3 * REDUCED_BYTES, shard, ALL_REDUCE_STREAM)
        self._reduced.append(reduced)

    def end_backward(self) -> None:
        """Wait for the all-reduces too."""
        super().end_backward()
        self.host.follow(MAIN_STREAM, ALL_REDUCE_STREAM)


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


class Yafsdp(Sharded):
    """This project's YaFSDP: two buffers for weights and two for gradients, one communication stream of high priority.

    A gather waits for the release of the buffer it writes to, the layer two further; gradients are cast into a buffer
    on the compute stream once the reduction two layers above has left it.
    """

    prefix = "YaFSDP::"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._released: dict[int, int] = {}
        self._reduced: dict[int, int] = {}
        self._still_gathered: set[int] = set()

    def begin_forward(self) -> None:
        """Gather the root, which has buffers of its own."""
        self._released, self._still_gathered = {}, set()
        with self.span("pre_forward", None):
            # For the weights that the optimizer has just written.
            self._unshard(None, after=self.host.record(MAIN_STREAM))
            self.await_gather(None)

    def enter_forward(self, layer: int) -> None:
        """Gather the layer if that was not done early, and the next one early."""
        with self.span("pre_forward", layer):
            if layer not in self.gathers:
                self._unshard(layer, after=self._released.get(layer - 2))
            with self.span("all_gather_wait", layer):
                self.await_gather(layer)
            if layer + 1 < self.layers and self.job.impairments.prefetches:
                with self.span(f"forward_prefetch for layers.{layer + 1}"):
                    self._unshard(layer + 1, after=self._released.get(layer - 1))

    def leave_forward(self, layer: int) -> None:
        """Release the layer's buffer; the last two stay."""
        with self.span("post_forward", layer):
            if layer >= self.layers - 2:
                self._still_gathered.add(layer)
            else:
                self._released[layer] = self.host.record(MAIN_STREAM)

    def enter_backward(self, layer: int) -> None:
        """Gather the layer, and the one below early."""
        with self.span("pre_backward", layer):
            if layer in self._still_gathered:
                self._still_gathered.discard(layer)
            else:
                if layer not in self.gathers:
                    self._unshard(layer, after=self._released.get(layer + 2))
                self.await_gather(layer)
            below = layer - 1
            if below >= 0 and below not in self._still_gathered and self.job.impairments.prefetches:
                with self.span(f"backward_prefetch for layers.{below}"):
                    self._unshard(below, after=self._released.get(below + 2))

    def leave_backward(self, layer: int) -> None:
        """Release the layer's weights and reduce its gradients."""
        self._reduce(layer)
        with self.span("post_backward_reshard", layer):
            self._released[layer] = self.host.record(MAIN_STREAM)

    def end_backward(self) -> None:
        """Reduce the root's gradients, and wait for all."""
        with self.span("root_post_backward_callback"):
            self._reduce(None)
            self.host.follow(MAIN_STREAM, GATHER_STREAM)
            self._reduced = {}

    def _unshard(self, layer: int | None, *, after: int | None = None) -> None:
        with self.span("all_gather", layer):
            self.gather(layer, after=after)

    def _reduce(self, layer: int | None) -> None:
        parameters = self.parameters(layer)
        if layer is not None and layer + 2 in self._reduced:
            with self.span("grad_slot_wait", layer):
                self.host.wait(MAIN_STREAM, self._reduced.pop(layer + 2))
        on_communication_stream = self.job.impairments.prepares_on_communication
        if not on_communication_stream:
            self.cast(parameters, MAIN_STREAM, op="aten::copy_")
        with self.span("post_backward_reduce", layer):
            self.host.follow(GATHER_STREAM, MAIN_STREAM)
            if on_communication_stream:
                self.cast_and_divide(parameters, GATHER_STREAM)
            self.collective("reduce_scatter", GATHER_STREAM, parameters)
            if layer is not None:
                self._reduced[layer] = self.host.record(GATHER_STREAM)


class YafsdpV1(Sharded):
    """YaFSDP as published: embedding, layers and head are units; a reduction is put off until its buffer is needed.

    Before the backward pass of a unit the communication stream casts and reduces the gradients of the unit two further,
    then gathers the unit; its compute waits for both.
    """

    prefix = "YaFSDP::"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._released: dict[int, int] = {}

    def begin_forward(self) -> None:
        """Gather the embedding."""
        self._released = {}
        self._gather(-1, after=self.host.record(MAIN_STREAM))
        self.await_gather(-1)

    def enter_forward(self, layer: int) -> None:
        """Gather the layer into the buffer that the unit two before it has released."""
        if layer == 0:
            self._released[-1] = self.host.record(MAIN_STREAM)
        self._gather(layer, after=self._released.get(layer - 2))
        self.await_gather(layer)

    def leave_forward(self, layer: int) -> None:
        """Release the layer's buffer; the last layer and the head stay gathered."""
        self._released[layer] = self.host.record(MAIN_STREAM)

    def enter_head(self) -> None:
        """Gather the head."""
        self._gather(self.layers, after=self._released.get(self.layers - 2))
        self.await_gather(self.layers)

    def leave_head(self) -> None:
        """Note when the head's gradients are whole."""
        self._released[self.layers] = self.host.record(MAIN_STREAM)

    def enter_backward(self, layer: int) -> None:
        """Reduce the unit two above, gather the layer, wait for both."""
        if layer == self.layers - 1:
            return
        with self.span("pre_backward", layer):
            self._reduce(layer + 2)
            self._gather(layer, after=self._released[layer + 2])
            self.await_gather(layer)

    def leave_backward(self, layer: int) -> None:
        """Note when the layer's gradients are whole."""
        self._released[layer] = self.host.record(MAIN_STREAM)

    def end_backward(self) -> None:
        """Reduce the last units, and wait for all."""
        self._released[-1] = self.host.record(MAIN_STREAM)
        for unit in (1, 0, -1):
            if unit < self.layers:
                self._reduce(unit)
        self.host.follow(MAIN_STREAM, GATHER_STREAM)

    def parameters(self, layer: int | None) -> int:
        """Return the weights of a unit: -1 is the embedding, the number of layers is the head."""
        return self.job.model.layer_parameters if layer in range(self.layers) else self.job.model.outer_parameters

    def unit(self, layer: int | None) -> str:
        """Return a unit's suffix in the names of spans."""
        names: dict[int | None, str] = {-1: " (embedding)", self.layers: " (head)"}
        return names.get(layer, super().unit(layer))

    def _gather(self, unit: int, *, after: int | None = None) -> None:
        with self.span("all_gather", unit):
            self.gather(unit, after=after)

    def _reduce(self, unit: int) -> None:
        parameters = self.parameters(unit)
        with self.span("post_backward_reduce", unit):
            self.host.wait(GATHER_STREAM, self._released[unit])
            self.cast(parameters, GATHER_STREAM)
            self.collective("reduce_scatter", GATHER_STREAM, parameters)
