"""The training step that all strategies share: who runs what in which order. Strategies fill in their hooks."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType

from tracekit import conventions
from tracekit.simulate import kernels, memory, program
from tracekit.simulate.job import Job
from tracekit.simulate.kernels import Op

_PCIE_BYTES_PER_S = 20e9
_COLLECTIVE_NAMES = {
    "all_gather": ("c10d::_allgather_base_", "nccl:_all_gather_base", "_allgather_base"),
    "reduce_scatter": ("c10d::_reduce_scatter_base_", "nccl:_reduce_scatter_base", "_reduce_scatter_base"),
    "all_reduce": ("c10d::allreduce_", "nccl:all_reduce", "allreduce"),
    "broadcast": ("c10d::broadcast_", "nccl:broadcast", "broadcast"),
    "all_to_all": ("c10d::alltoall_base_", "nccl:all_to_all", "all_to_allv"),
    "send": ("c10d::send", "nccl:send {0}->{1}", "send"),
    "recv": ("c10d::recv_", "nccl:recv {0}<-{1}", "recv"),
}
"""By kind: the dispatcher op, the back end's span, and the name in the arguments."""


class TrainingProgram:
    """Writes what any training step has: a batch, ops, collectives, the optimizer."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.host = program.Host(0 if job.impairments.ideal_host else round(job.hardware.op_s * 1e9))

    def load_batch(self, tokens: int) -> None:
        """Wait for a batch and copy it to the device."""
        size_bytes = 8 * 2 * tokens
        took_ns = max(1_000, round(size_bytes / _PCIE_BYTES_PER_S * 1e9))
        name = "Memcpy HtoD (Pinned -> Device)"
        copy = program.Kernel(name, program.COPY, program.MAIN_STREAM, took_ns, bytes=size_bytes)
        with self.host.span(conventions.span_name(conventions.DATA)):
            with self.host.span("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", cost_ns=50_000):
                self.host.add(program.PassTime(self.job.impairments.data_stall_ns))
            with self.host.op("aten::to"), self.host.op("aten::_to_copy"), self.host.op("aten::copy_"):
                self.host.launch(copy)

    def run(self, op: Op) -> None:
        """Run an op, in backward inside its autograd node."""
        dims: dict[str, object] | None = {"Input Dims": op.dims} if op.dims else None
        if not op.node:
            with self.host.op(op.name, dims):
                self.host.launch(op.kernel)
            return
        node = f"autograd::engine::evaluate_function: {op.node}"
        with self.host.op(node), self.host.span(op.node, "cpu_op"), self.host.op(op.name, dims):
            self.host.launch(op.kernel)

    def communicate(
        self, kernel: program.Kernel, *, place: int = 0, further_args: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        """Run a collective, or a send or receive of the rank at a `place` of its group."""
        message = kernel.collective
        assert message is not None
        outer, backend, name = _COLLECTIVE_NAMES[message.op]
        args: dict[str, object] = {
            "Collective name": name,
            "dtype": message.dtype,
            "group": message.group.split(":")[0],
        }
        args |= {"In msg nelems": message.sent, "Out msg nelems": message.received, **further_args}
        span = backend.format(place, message.peer)
        with self.host.op(outer), self.host.op("record_param_comms", args), self.host.span(span):
            self.host.launch(kernel)

    def step_optimizer(self, ops: Iterable[Op]) -> None:
        """Run the optimizer's ops."""
        name = conventions.span_name(conventions.OPTIMIZER)
        with self.host.span(name), self.host.span("Optimizer.step#AdamW.step", "cpu_op"):
            for op in ops:
                self.run(op)


class Schedule(TrainingProgram):
    """Writes the program of a job's training, step by step. A subclass gives the hooks of one strategy.

    Layers are numbered from 0; None stands for the root, which is embedding and head.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.parts = kernels.parts_of(job)
        self.layers = job.model.layers
        self.micro_batch = 0
        self._forward_ops = list(kernels.layer_forward(job, self.parts))
        self._backward_ops = list(kernels.layer_backward(job, self.parts))

    # Hooks -----------------------------------------------------------------------------------------------------------
    def begin_forward(self) -> None:
        """Do what comes before the embedding."""

    def enter_forward(self, layer: int) -> None:
        """Do what comes before a layer's forward pass."""

    def leave_forward(self, layer: int) -> None:
        """Do what comes after a layer's forward pass."""

    def enter_head(self) -> None:
        """Do what comes before the head."""

    def begin_backward(self) -> None:
        """Do what comes before the head's backward pass."""

    def leave_head(self) -> None:
        """Do what comes after the head's backward pass."""

    def enter_backward(self, layer: int) -> None:
        """Do what comes before a layer's backward pass."""

    def leave_backward(self, layer: int) -> None:
        """Do what comes after a layer's backward pass."""

    def end_backward(self) -> None:
        """Do what comes after all backward passes: the root's reduction, and waiting for all of them."""

    # The step --------------------------------------------------------------------------------------------------------
    def step(self, number: int) -> None:
        """Write one training step down."""
        host, impairments = self.host, self.job.impairments
        with host.span(f"ProfilerStep#{number}"):
            host.add(program.Step(number))
            host.begin(f"{number} data")
            self.load_batch(self.job.tokens)
            for micro_batch in range(self.job.micro_batches):
                self.micro_batch = micro_batch
                self._forward(number)
                if impairments.host_stalls and micro_batch == 0:
                    host.add(program.Stall())
                self._backward(number)
            host.begin(f"{number} optimizer")
            self.step_optimizer(kernels.optimizer(self.parts.optimizer_s))
            if impairments.save_ns and number == impairments.save_step:
                self._save()

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether gradients are whole after this micro-batch's backward pass."""
        return self.micro_batch == self.job.micro_batches - 1

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced in this micro-batch."""
        return self.is_last_micro_batch or self.job.impairments.reduces_every_micro_batch

    def collective(self, op: str, stream: int, parameters: int, *, group: str = program.SHARD, ranks: int = 0) -> None:
        """Run a collective on a unit's weights or gradients: in several where the unit is cut up."""
        elements = -(-parameters // self.job.impairments.collectives_per_unit)
        kind = "BFloat16" if op == "all_gather" else "Float"
        kernel = kernels.collective(op, group, stream, elements=elements, ranks=ranks or self.job.shards, dtype=kind)
        for _ in range(self.job.impairments.collectives_per_unit):
            self.communicate(kernel)

    def unit(self, layer: int | None) -> str:
        """Return a unit's suffix in the names of spans: `` (layers.0)``; nothing for the root."""
        return "" if layer is None else f" (layers.{layer})"

    # Its parts -------------------------------------------------------------------------------------------------------
    def _forward(self, number: int) -> None:
        host = self.host
        place = f"{number} {self.micro_batch} forward"
        with host.span(conventions.span_name(conventions.FORWARD)):
            host.begin(f"{place} root")
            self.begin_forward()
            self._run([kernels.embedding(self.job, backward=False)])
            for layer in range(self.layers):
                host.begin(f"{place} {layer}")
                host.add(program.PassTime(self.job.impairments.launch_delay_ns))
                self.enter_forward(layer)
                recomputes = layer < self.job.recomputed_layers
                self._allocate(f"activations {layer}", memory.INPUT_BYTES if recomputes else memory.ACTIVATION_BYTES)
                self._run(self._forward_ops)
                self._read_output()
                self.leave_forward(layer)
            host.begin(f"{place} head")
            self.enter_head()
            self._run(kernels.head(self.job, self.parts, backward=False))

    def _backward(self, number: int) -> None:
        host = self.host
        place = f"{number} {self.micro_batch} backward"
        with host.span(conventions.span_name(conventions.BACKWARD)), host.on(program.AUTOGRAD_THREAD):
            host.begin(f"{place} head")
            self.begin_backward()
            self._run(kernels.head(self.job, self.parts, backward=True))
            self.leave_head()
            if number in self.job.impairments.retry_steps:
                self._retry()
            for layer in reversed(range(self.layers)):
                host.begin(f"{place} {layer}")
                self.enter_backward(layer)
                if layer < self.job.recomputed_layers:
                    with self.host.span("CheckpointFunctionBackward", "cpu_op"):
                        self._allocate(f"recomputed {layer}", memory.ACTIVATION_BYTES)
                        self._run(self._forward_ops)
                self._run(self._backward_ops)
                host.add(program.Free(f"recomputed {layer}"))
                host.add(program.Free(f"activations {layer}"))
                self.leave_backward(layer)
            host.begin(f"{place} root")
            self._run([kernels.embedding(self.job, backward=True)])
            self.end_backward()

    def _run(self, ops: Iterable[Op]) -> None:
        for op in ops:
            self.run(op)

    def _allocate(self, buffer: str, bytes_per_unit: float) -> None:
        """Allocate a buffer of so many bytes per token and unit of width."""
        self.host.add(program.Allocate(buffer, round(bytes_per_unit * self.job.tokens * self.job.model.width)))

    def _read_output(self) -> None:
        host_read_ns = self.job.impairments.host_read_ns
        if host_read_ns is None:
            return
        self.host.read_item()
        self.host.add(program.PassTime(host_read_ns))

    def _retry(self) -> None:
        """Let the allocator run out of memory: it waits for the device, frees its cache and allocates it again."""
        with self.host.op("aten::empty"):
            self.host.add(program.Call("cudaDeviceSynchronize", 5_000, drains=True))
            for _ in range(self.job.impairments.retry_cuda_calls):
                self.host.add(program.Call("cudaFree", 400_000, drains=True))
            self.host.add(program.Flush(empties=True))
            for _ in range(self.job.impairments.retry_cuda_calls):
                self.host.add(program.Call("cudaMalloc", 600_000))
            self.host.add(program.Flush(empties=False))

    def _save(self) -> None:
        with self.host.span(conventions.span_name(conventions.CHECKPOINT)):
            self.host.add(program.Call("cudaDeviceSynchronize", 5_000, drains=True))
            self.host.add(program.PassTime(self.job.impairments.save_ns))


class Sharded(Schedule):
    """What the sharded strategies share: units that are gathered into buffers and reduced out of them."""

    prefix: str
    """Of the spans' names."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.gathers: dict[int | None, int] = {}
        """By layer: the event that its gather is done."""

    def gather(self, layer: int | None, *, after: int | None = None) -> None:
        """Gather a unit on the gather stream, after an event; without prefetching, after all compute so far."""
        if after is not None:
            self.host.wait(program.GATHER_STREAM, after)
        if not self.job.impairments.prefetches:
            self.host.follow(program.GATHER_STREAM, program.MAIN_STREAM)
        self.collective("all_gather", program.GATHER_STREAM, self.parameters(layer))
        self.gathers[layer] = self.host.record(program.GATHER_STREAM)

    def await_gather(self, layer: int | None) -> None:
        """Let compute wait for a unit's gather."""
        self.host.wait(program.MAIN_STREAM, self.gathers.pop(layer))

    def parameters(self, layer: int | None) -> int:
        """Return the weights of a unit; the root holds embedding and head."""
        return 2 * self.job.model.outer_parameters if layer is None else self.job.model.layer_parameters

    def move(self, op: str, what: str, bytes_per_parameter: float, parameters: int, stream: int) -> None:
        """Run an op that copies, casts or divides a unit's gradients."""
        with self.host.op(op, {"Input Dims": ((parameters,),)}):
            for kernel in kernels.moving(self.job, what, bytes_per_parameter, parameters, stream):
                self.host.launch(kernel)

    def cast(self, parameters: int, stream: int, *, op: str = "aten::_to_copy") -> None:
        """Cast a unit's gradients for their reduction."""
        self.move(op, "CastFunctor<float>", kernels.CAST_BYTES, parameters, stream)

    def cast_and_divide(self, parameters: int, stream: int) -> None:
        """Cast a unit's gradients for their reduction, and divide them by the number of ranks."""
        self.cast(parameters, stream)
        self.move("aten::div_", "DivFunctor<float>", kernels.DIVIDE_BYTES, parameters, stream)

    def free_weights(self, layer: int | None) -> None:
        """Free the buffer of a unit's gathered weights."""
        self.host.add(program.Free(f"weights {layer}"))

    def span(self, name: str, layer: int | None = None) -> AbstractContextManager[None]:
        """Surround what is written meanwhile by a span of a unit."""
        return self.host.span(f"{self.prefix}{name}{self.unit(layer)}")
