"""YaFSDP: this project's engine, and the one published in May 2024."""

from tracekit.simulate.job import Job
from tracekit.simulate.program import GATHER_STREAM, MAIN_STREAM
from tracekit.simulate.schedule import Sharded


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
