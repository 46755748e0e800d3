"""The program of one rank of a hybrid job: its stages' actions in order, the reduction of gradients, the optimizer."""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

from tracekit import conventions
from tracekit.conventions import pipeline_schedules
from tracekit.conventions.pipeline_schedules import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from tracekit.conventions.strategies import PP
from tracekit.simulate import hybrid_layers, kernels, memory, program
from tracekit.simulate.hybrid_layers import (
    HEAD,
    ROOT,
    GatheredWeights,
    Item,
    Layers,
    Message,
    Part,
    Router,
    WeightGradient,
    parts_of,
    transferred_elements,
)
from tracekit.simulate.job import Job
from tracekit.simulate.program import MAIN_STREAM, Collective, Instruction
from tracekit.simulate.schedule import TrainingProgram
from tracekit.simulate.topology import WORLD, HybridWorld, channel

_ADD_GRADIENTS = (BACKWARD, WEIGHT_GRADIENT)
_STREAMS = {"tp": program.TENSOR_STREAM, "ep": program.EXPERT_STREAM, WORLD: program.WORLD_STREAM}


def programs(job: Job) -> dict[int, list[Instruction]]:
    """Return the program of each rank: one for all with the same stages, unless their experts get other tokens."""
    world, router = HybridWorld(job), Router(job)
    stages = {rank: job.mesh.stages_of(rank) for rank in job.simulated_ranks}
    written: dict[Hashable, list[Instruction]] = {}
    for rank, rank_stages in stages.items():
        key: Hashable = rank_stages if job.model.experts is None else rank
        if key not in written:
            written[key] = RankProgram(job, rank, world, router).write()
    return {rank: written[rank_stages if job.model.experts is None else rank] for rank, rank_stages in stages.items()}


class RankProgram(TrainingProgram):
    """Writes one rank's program."""

    def __init__(self, job: Job, rank: int, world: HybridWorld, router: Router) -> None:
        super().__init__(job)
        self.rank, self.hybrid = rank, job.mesh
        self._world, self._router = world, router
        self._layers = Layers(job, parts_of(job))
        self._received: dict[Action, int] = {}
        self._gradients: dict[tuple[int, int | None], int] = {}
        self._sends: dict[int, int] = {}
        place = self.hybrid.layout.coordinate(rank)[PP]
        self._weights = GatheredWeights(job, self.host, self._issue)
        self._actions = pipeline_schedules.order(self.hybrid.schedule, self.hybrid.shape(job.micro_batches), place)
        self._last_of_stage = {action.stage: action for action in self._actions if action.kind in _ADD_GRADIENTS}

    def write(self) -> list[Instruction]:
        """Return the program of all steps."""
        for number in range(self.job.steps):
            self._step(number)
        return self.host.program

    # A step ----------------------------------------------------------------------------------------------------------
    def _step(self, number: int) -> None:
        host = self.host
        with host.span(f"ProfilerStep#{number}"):
            host.add(program.Step(number))
            host.begin(f"{number} data")
            self.load_batch(self.job.tokens * self.job.micro_batches)
            self._gather(number)
            for index, action in enumerate(self._actions):
                if not index:
                    self._receive(number, action)
                if index + 1 < len(self._actions):  # posted one action ahead, so that a transfer can be overlapped
                    self._receive(number, self._actions[index + 1])
                self._run_action(number, action)
                self._send(number, action)
                self._read_result(number, action)
                if self._completes_gradients(action):
                    self._reduce(number, action.stage)
            self._finish(number)

    def _read_result(self, number: int, action: Action) -> None:
        """Read the result of an action on the host, and process it before the next action is launched."""
        read_ns = self.job.impairments.action_read_ns
        if read_ns is None:
            return
        self.host.begin(f"{number} {action.name} read")
        self.host.read_item()
        self.host.add(program.PassTime(read_ns))

    def _completes_gradients(self, action: Action) -> bool:
        is_last = action == self._last_of_stage[action.stage]
        return action.kind in _ADD_GRADIENTS and (is_last or hybrid_layers.reduces_each_micro_batch(self.job))

    def _gather(self, number: int) -> None:
        """Gather the sharded weights of all stages, where they are gathered once per step."""
        if not self._weights.are_gathered_once:
            return
        for stage in self.hybrid.stages_of(self.rank):
            with self._span(f"PP:{stage}UNSHARD"):
                for part in self._parts(stage):
                    self._weights.gather(str(number), stage, part)

    def _parts(self, stage: int) -> list[Part]:
        """Return the parts of a stage in the order of its forward pass."""
        first = [ROOT] if stage == 0 else []
        last = [HEAD] if stage == self.hybrid.stages - 1 else []
        return [*first, *self.hybrid.layers_of(stage), *last]

    def _finish(self, number: int) -> None:
        """Wait for reductions and sends, add the norms of all ranks' gradients up, and let the optimizer step."""
        host = self.host
        host.begin(f"{number} optimizer")
        for event in self._sends.values():
            host.wait(MAIN_STREAM, event)
        self._sends = {}
        host.follow(MAIN_STREAM, program.REDUCE_STREAM)
        with host.span(conventions.span_name(conventions.CLIP)):
            norm = kernels.collective(
                "all_reduce", WORLD, program.WORLD_STREAM, elements=1, ranks=self.job.gpus, dtype="Float"
            )
            self._collective(norm)
        self.step_optimizer(hybrid_layers.optimizer(self.job, self.rank))
        for kernel in hybrid_layers.after_optimizer(self.job, self.rank):
            self._collective(kernel)

    # Actions ---------------------------------------------------------------------------------------------------------
    def _run_action(self, number: int, action: Action) -> None:
        host = self.host
        if action in self._received:
            host.wait(MAIN_STREAM, self._received.pop(action))
        host.add(program.Act(action))
        with self._span(action.name):
            if action.kind == FORWARD:
                with host.span(conventions.span_name(conventions.FORWARD)):
                    self._forward(number, action)
            else:
                with host.span(conventions.span_name(conventions.BACKWARD)), host.on(program.AUTOGRAD_THREAD):
                    self._backward(number, action)
        host.add(program.Act(None))

    def _forward(self, number: int, action: Action) -> None:
        stage = action.stage
        self.host.add(program.Allocate(_activations(action), memory.activation_bytes(self.job, stage)))
        for part in self._each_part(number, action):
            if isinstance(part, str):
                self._run(self._layers.embedding(backward=False) if part == ROOT else self._layers.head(backward=False))
                continue
            self.host.add(program.PassTime(self.job.impairments.launch_delay_ns))
            self._run(self._layers.forward(self._router.routing(number, action.micro_batch, part, self.rank)))

    def _backward(self, number: int, action: Action) -> None:
        for part in self._each_part(number, action):
            if isinstance(part, str):
                items = self._layers.embedding(backward=True) if part == ROOT else self._layers.head(backward=True)
            else:
                items = self._layers.backward(self._router.routing(number, action.micro_batch, part, self.rank))
            self._run_part(items, action)
            self._note(action, part if isinstance(part, int) else None)
        if action.kind != INPUT_GRADIENT:
            self.host.add(program.Free(_activations(action)))

    def _each_part(self, number: int, action: Action) -> Iterator[Part]:
        """Yield the parts of an action's stage in order, each once its weights are whole."""
        parts = self._parts(action.stage)
        if action.kind != FORWARD:
            parts.reverse()
        place = f"{number} {action.micro_batch} {action.stage} {action.kind}"
        for part, following in zip(parts, (*parts[1:], None), strict=True):
            self.host.add(program.Act(None))  # what gathers weights is not part of the action
            self._weights.enter(place, action.stage, part, following)
            self.host.add(program.Act(action))
            self.host.begin(f"{place} {part}")
            yield part
            self._weights.leave(action.stage, part)

    def _note(self, action: Action, layer: int | None) -> None:
        """Record the event that a layer's gradients of all micro-batches are added up; None: embedding or head."""
        if self._completes_gradients(action) and hybrid_layers.reduces(self.job):
            self._gradients[action.stage, layer] = self.host.record(MAIN_STREAM)

    def _run_part(self, items: Iterable[Item], action: Action) -> None:
        """Run a backward pass, or only what gives the input's gradient, or only what gives the weights'."""
        accepted = {BACKWARD: (True, False), INPUT_GRADIENT: (False,), WEIGHT_GRADIENT: (True,)}[action.kind]
        self._run(item for item in items if isinstance(item, WeightGradient) in accepted)

    def _run(self, items: Iterable[Item]) -> None:
        for item in items:
            if isinstance(item, Message):
                self._exchange(item)
            else:
                self.run(item.op if isinstance(item, WeightGradient) else item)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        """Surround what is written meanwhile by the span of an action, in a pipeline."""
        if self.hybrid.layout.pp == 1:
            yield
            return
        with self.host.span(name):
            yield

    # Communication ---------------------------------------------------------------------------------------------------
    def _exchange(self, message: Message) -> None:
        """Run a collective on which the main stream waits."""
        stream = _STREAMS[message.axis]
        if message.splits is None:
            ranks = len(self._world.group(message.axis, self.rank).ranks)
            kernel = kernels.collective(
                message.op, message.axis, stream, elements=message.elements, ranks=ranks, dtype="BFloat16"
            )
        else:
            sent, received = (sum(rows) * self.job.model.width for rows in message.splits)
            exchange = Collective(message.op, message.axis, "BFloat16", sent, received, message.splits, message.slowest)
            kernel = kernels.send_receive(exchange, stream)
        self._collective(kernel)

    def _collective(self, kernel: program.Kernel) -> None:
        self.host.follow(kernel.stream, MAIN_STREAM)
        self._issue(kernel)
        self.host.follow(MAIN_STREAM, kernel.stream)

    def _issue(self, kernel: program.Kernel) -> None:
        message = kernel.collective
        assert message is not None
        sent, received = message.splits or ((), ())
        args: dict[str, object] = {"In split size": str(list(sent)), "Out split size": str(list(received))}
        place = 0
        if message.peer is not None:
            args["Dst Rank" if message.op == "send" else "Src Rank"] = message.peer
            place = self._world.group(PP, self.rank).ranks.index(self.rank)
        self.communicate(kernel, place=place, further_args=args)

    def _receive(self, number: int, action: Action) -> None:
        """Post the receive of an action's input, if another rank sends it."""
        step = {FORWARD: -1, BACKWARD: 1, INPUT_GRADIENT: 1}.get(action.kind, 0)
        source = action.stage + step
        if not step or not 0 <= source < self.hybrid.stages or self.hybrid.peer(self.rank, source) == self.rank:
            return
        kind = FORWARD if step < 0 else BACKWARD
        with self.host.span(f"PP:{action.stage}RECV_{kind}{action.micro_batch}"):
            self.host.begin(f"{number} {action.micro_batch} {source} transfer {kind}")
            stream = self._transfer("recv", action, kind, self.hybrid.peer(self.rank, source))
        self._received[action] = self.host.record(stream)

    def _send(self, number: int, action: Action) -> None:
        """Send an action's output to the stage that needs it."""
        step = {FORWARD: 1, BACKWARD: -1, INPUT_GRADIENT: -1}.get(action.kind, 0)
        target = action.stage + step
        if not step or not 0 <= target < self.hybrid.stages or self.hybrid.peer(self.rank, target) == self.rank:
            return
        kind = FORWARD if step > 0 else BACKWARD
        with self.host.span(f"PP:{action.stage}SEND_{kind}{action.micro_batch}"):
            self.host.begin(f"{number} {action.micro_batch} {action.stage} transfer {kind}")
            stream = self._transfer("send", action, kind, self.hybrid.peer(self.rank, target))
        self._sends[stream] = self.host.record(stream)

    def _transfer(self, op: str, action: Action, kind: str, peer: int) -> int:
        """Send an action's result to a rank, or receive its input; return the stream."""
        sends = op == "send"
        is_second = self.hybrid.schedule in pipeline_schedules.V_SHAPED and action.stage >= self.hybrid.layout.pp
        stream = (program.SEND_STREAMS if sends else program.RECEIVE_STREAMS)[kind]
        stream += program.SECOND_CHUNK if is_second else 0
        rank_place, place = (self._world.group(PP, self.rank).ranks.index(rank) for rank in (self.rank, peer))
        between = channel(rank_place, place, kind) if sends else channel(place, rank_place, kind)
        elements = transferred_elements(self.job)
        self.host.follow(stream, MAIN_STREAM)
        message = Collective(op, between, "BFloat16", elements, elements, peer=place)
        self._issue(kernels.send_receive(message, stream))
        return stream

    def _reduce(self, number: int, stage: int) -> None:
        """Reduce a stage's gradients, each layer's once they are whole."""
        if not hybrid_layers.reduces(self.job):
            return
        with self._span(f"PP:{stage}REDUCE_GRAD"):
            for layer in (*reversed(self.hybrid.layers_of(stage)), None):
                self.host.begin(f"{number} reduce {stage} {layer}")
                if (event := self._gradients.pop((stage, layer), None)) is None:
                    continue
                self.host.wait(program.REDUCE_STREAM, event)
                for kernel in hybrid_layers.of_layer(self.job, layer):
                    self._issue(kernel)


def _activations(action: Action) -> str:
    return f"activations {action.stage} {action.micro_batch}"
