"""The training step that all strategies share: who runs what in which order. Strategies fill in their hooks."""

from collections.abc import Iterable

from tracekit import conventions
from tracekit.simulate import costs, kernels
from tracekit.simulate.job import Job
from tracekit.simulate.kernels import Op
from tracekit.simulate.program import (
    AUTOGRAD_THREAD,
    COPY,
    MAIN_STREAM,
    SHARD,
    Allocate,
    Call,
    Flush,
    Free,
    Host,
    Kernel,
    PassTime,
    Step,
    Synchronize,
)
from tracekit.simulate.topology import World

_READ_BYTES = 4
_PCIE_BYTES_PER_S = 20e9
_LAYER_ACTIVATION_BYTES = (
    40.5  # per token and unit of width, 16 bits, grouped heads, flash attention (no softmax stored)
)
_INPUT_BYTES = 2  # per token and unit of width: all that a recomputing layer keeps
_COLLECTIVE_NAMES = {
    "all_gather": ("c10d::_allgather_base_", "nccl:_all_gather_base", "_allgather_base"),
    "reduce_scatter": ("c10d::_reduce_scatter_base_", "nccl:_reduce_scatter_base", "_reduce_scatter_base"),
    "all_reduce": ("c10d::allreduce_", "nccl:all_reduce", "allreduce"),
}


class Schedule:
    """Writes the program of a job's training, step by step. A subclass gives the hooks of one strategy.

    Layers are numbered from 0; None stands for the root, which is embedding and head.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.world = World(job)
        self.parts = costs.parts_of(job)
        self.host = Host(0 if job.impairments.ideal_host else round(job.hardware.op_s * 1e9))
        self.layers = job.model.layers
        self.micro_batch = 0
        self._forward_ops = kernels.layer_forward(job, self.parts)
        self._backward_ops = kernels.layer_backward(job, self.parts)

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
            host.add(Step(number))
            host.begin(f"{number} data")
            self._load_batch()
            for micro_batch in range(self.job.micro_batches):
                self.micro_batch = micro_batch
                self._forward(number)
                self._backward(number)
            host.begin(f"{number} optimizer")
            with (
                host.span(conventions.span_name(conventions.OPTIMIZER)),
                host.span("Optimizer.step#AdamW.step", "cpu_op"),
            ):
                self._run(kernels.optimizer(self.parts))
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

    def collective(
        self, op: str, stream: int, parameters: int, *, group: str = SHARD, dtype: str | None = None, ranks: int = 0
    ) -> None:
        """Run a collective on a unit's weights or gradients: in several where the unit is cut up."""
        whole = -(-parameters // self.job.impairments.collectives_per_unit)
        kind = dtype or ("BFloat16" if op == "all_gather" else "Float")
        kernel = kernels.collective(op, group, stream, whole=whole, ranks=ranks or self.job.shards, dtype=kind)
        outer, backend, collective_name = _COLLECTIVE_NAMES[op]
        message = kernel.collective
        assert message is not None
        args: dict[str, object] = {"Collective name": collective_name, "dtype": kind, "group": group}
        args |= {"In msg nelems": message.sent, "Out msg nelems": message.received}
        for _ in range(self.job.impairments.collectives_per_unit):
            with self.host.op(outer), self.host.op("record_param_comms", args), self.host.span(backend):
                self.host.launch(kernel)

    def unit(self, layer: int | None) -> str:
        """Return how spans call a unit: `` (layers.0)``; nothing for the root."""
        return "" if layer is None else f" (layers.{layer})"

    # Its parts -------------------------------------------------------------------------------------------------------
    def _load_batch(self) -> None:
        size_bytes = 8 * 2 * self.job.tokens
        copy = Kernel(
            "Memcpy HtoD (Pinned -> Device)",
            COPY,
            MAIN_STREAM,
            max(1_000, round(size_bytes / _PCIE_BYTES_PER_S * 1e9)),
            bytes=size_bytes,
        )
        with self.host.span(conventions.span_name(conventions.DATA)):
            with self.host.span("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", cost_ns=50_000):
                self.host.add(PassTime(self.job.impairments.data_stall_ns))
            with self.host.op("aten::to"), self.host.op("aten::_to_copy"), self.host.op("aten::copy_"):
                self.host.launch(copy)

    def _forward(self, number: int) -> None:
        host = self.host
        place = f"{number} {self.micro_batch} forward"
        with host.span(conventions.span_name(conventions.FORWARD)):
            host.begin(f"{place} root")
            self.begin_forward()
            self._run([kernels.embedding(self.job, backward=False)])
            for layer in range(self.layers):
                host.begin(f"{place} {layer}")
                host.add(PassTime(self.job.impairments.launch_delay_ns))
                self.enter_forward(layer)
                self._allocate_activations(f"activations {layer}", layer)
                self._run(self._forward_ops)
                self._read_output()
                self.leave_forward(layer)
            host.begin(f"{place} head")
            self.enter_head()
            self._run(kernels.head(self.job, self.parts, backward=False))

    def _backward(self, number: int) -> None:
        host = self.host
        place = f"{number} {self.micro_batch} backward"
        with host.span(conventions.span_name(conventions.BACKWARD)), host.on(AUTOGRAD_THREAD):
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
                        host.add(Allocate(f"recomputed {layer}", self._activation_bytes))
                        self._run(self._forward_ops)
                self._run(self._backward_ops)
                host.add(Free(f"recomputed {layer}"))
                host.add(Free(f"activations {layer}"))
                self.leave_backward(layer)
            host.begin(f"{place} root")
            self._run([kernels.embedding(self.job, backward=True)])
            self.end_backward()

    def _run(self, ops: Iterable[Op]) -> None:
        for op in ops:
            if op.node:
                with (
                    self.host.op(f"autograd::engine::evaluate_function: {op.node}"),
                    self.host.span(op.node, "cpu_op"),
                ):
                    self._run_one(op)
            else:
                self._run_one(op)

    def _run_one(self, op: Op) -> None:
        self.host.run(op.name, op.kernel, {"Input Dims": op.dims} if op.dims else None)

    def _allocate_activations(self, buffer: str, layer: int) -> None:
        input_bytes = round(_INPUT_BYTES * self.job.tokens * self.job.model.width)
        self.host.add(Allocate(buffer, input_bytes if layer < self.job.recomputed_layers else self._activation_bytes))

    @property
    def _activation_bytes(self) -> int:
        return round(_LAYER_ACTIVATION_BYTES * self.job.tokens * self.job.model.width)

    def _read_output(self) -> None:
        host_read_ns = self.job.impairments.host_read_ns
        if host_read_ns is None:
            return
        copy = Kernel("Memcpy DtoH (Device -> Pageable)", COPY, MAIN_STREAM, 1_500, bytes=_READ_BYTES)
        with self.host.op("aten::item"), self.host.op("aten::_local_scalar_dense"):
            self.host.launch(copy)
            self.host.add(Synchronize(self.host.record(MAIN_STREAM), "cudaStreamSynchronize"))
        self.host.add(PassTime(host_read_ns))

    def _retry(self) -> None:
        """Let the allocator run out of memory: it waits for the device, frees its cache and allocates it again."""
        with self.host.op("aten::empty"):
            self.host.add(Call("cudaDeviceSynchronize", 5_000, drains=True))
            for _ in range(self.job.impairments.retry_cuda_calls):
                self.host.add(Call("cudaFree", 400_000, drains=True))
            self.host.add(Flush(empties=True))
            for _ in range(self.job.impairments.retry_cuda_calls):
                self.host.add(Call("cudaMalloc", 600_000))
            self.host.add(Flush(empties=False))

    def _save(self) -> None:
        with self.host.span(conventions.span_name(conventions.CHECKPOINT)):
            self.host.add(Call("cudaDeviceSynchronize", 5_000, drains=True))
            self.host.add(PassTime(self.job.impairments.save_ns))
