"""Simulated programs that allocate and free memory: healthy ones, and ones with a known fault, as runs to be judged.

A program trains: it allocates weights, and activations layer by layer, frees them in backward, and runs on the model of
the caching allocator, which gives addresses, reserved memory and device calls. The benchmark checks what rules report
for such a run; the allocator model is checked against recorded snapshots.
"""

import random
from dataclasses import dataclass, field

import polars as pl

from tracekit import conventions
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.source import Source
from tracekit.model.trace import Trace
from tracekit.replay.allocator.blocks import Block
from tracekit.replay.allocator.model import Allocator, SegmentEvent
from tracekit.replay.allocator.settings import UNLIMITED

LEAK, CHURN, FRAGMENTATION, RETRY = FAULTS = ("leak", "churn", "fragmentation", "retry")
MIB = 1 << 20
_US, _MS = 1_000, 1_000_000
_KERNEL_NS, _EVENT_NS, _CALL_NS = _MS, 2 * _US, 400 * _US
_SIDE_STREAM = 7
_ALLOCATION = ["at_ns", "address", "delta_bytes", "allocated_bytes", "reserved_bytes", "step"]
_CUT_IN_STEP = 2
_MATTERS_BYTES = 100 * MIB


@dataclass
class Recording:
    """What a profiler would have seen of a program, as rows."""

    allocations: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    kernels: list[tuple[int, int, int]] = field(default_factory=list)
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    metrics: list[tuple[int, str, float]] = field(default_factory=list)


class Program:
    """A training program drawn at random, with a fault or none."""

    def __init__(self, draw: random.Random, fault: str | None, *, capacity_bytes: int = UNLIMITED) -> None:
        """Draw the sizes; `fault` is one of FAULTS, and the device has `capacity_bytes`."""
        self.draw, self.fault = draw, fault
        self.layers = draw.randint(4, 10)
        self.steps = draw.randint(6, 12)
        # What a layer keeps for backward: large enough for segments of their own, and the same in every step.
        sizes = [draw.randint(12 * MIB, 60 * MIB) // 512 * 512 for _ in range(draw.randint(2, 4))]
        self.saved = [[draw.choice(sizes) for _ in range(draw.randint(1, 3))] for _ in range(self.layers)]
        self.passing = [draw.randint(1 * MIB, 30 * MIB) // 512 * 512 for _ in range(draw.randint(1, 3))]
        self.weights = [draw.randint(4 * MIB, 90 * MIB) // 512 * 512 for _ in range(self.layers)]
        self.longest = draw.randint(40 * MIB, 120 * MIB)
        self.batches = [draw.randint(64 << 10, MIB) for _ in range(3)]
        self.staying: dict[int, list[Block]] = {}
        self.leaked = draw.randint(2 * MIB, 10 * MIB)
        self.recording = Recording()
        self.now_ns = 1_700_000_000_000_000_000
        self.step = 0
        self.lasting: list[Block] = []
        self.allocator = Allocator(capacity_bytes=capacity_bytes)
        self._seen = 0

    def run(self) -> Trace:
        """Run all steps; return the recording of all but the first, which fills the cache."""
        for size in self.weights:
            self.lasting.append(self.take(size))
        for step in range(self.steps + 1):
            self.step = step
            begin_ns = self.now_ns
            self._train()
            if step == 0:
                self._forget()
            else:
                self.recording.steps.append((step, begin_ns, self.now_ns))
            self._log(step, self.now_ns - begin_ns)
        return self._trace()

    @property
    def took_effect(self) -> bool:
        """Return whether the device gave more after memory was cut up, or memory ran short after the second step."""
        if self.fault == RETRY:
            retries = [value for _, name, value in self.recording.metrics if name == conventions.ALLOC_RETRIES_METRIC]
            return retries[-1] > retries[1]
        events = pl.DataFrame(self.recording.allocations, schema=_ALLOCATION, orient="row")
        before = events.filter(pl.col("step") <= _CUT_IN_STEP)["reserved_bytes"].max()
        return int(str(events["reserved_bytes"].max())) - int(str(before)) >= _MATTERS_BYTES

    def take(self, size_bytes: int, stream: int = 0) -> Block:
        """Allocate a block, with the device calls of the allocator."""
        block = self.allocator.malloc(size_bytes, stream)
        for event in self.allocator.events[self._seen :]:
            self._call(event)
        self._seen = len(self.allocator.events)
        self._note(block, block.bytes)
        return block

    def give(self, block: Block) -> None:
        """Free a block."""
        size = block.bytes  # then it is joined with its neighbours
        self.allocator.free(block)
        self._note(block, -size)

    def _train(self) -> None:
        alive = [self._forward(layer) for layer in range(self.layers)]
        for layer in reversed(range(self.layers)):
            self._backward(layer, alive[layer])
        if self.fault == RETRY:
            self._on_the_side()
        if self.step == 0:  # as optimizers do
            self.lasting += [self.take(size) for size in self.weights]
        self._wander()
        if self.fault == LEAK:
            self.lasting.append(self.take(self.leaked))

    def _forward(self, layer: int) -> list[Block]:
        blocks = [self.take(size) for size in self.saved[layer]]
        for size in self.passing:
            self.give(self.take(size))
        for _ in range(self.draw.randint(0, 6)):  # masks, indices and scalars: small, and never twice alike
            self.give(self.take(self.draw.randint(1, 500_000)))
        if self.fault == CHURN:
            self.give(self.take(int(self.longest * (1 + 0.08 * self.step))))
        self._compute()
        return blocks

    def _backward(self, layer: int, blocks: list[Block]) -> None:
        gradient = self.take(self.weights[layer])
        self._compute()
        for block in blocks:
            size = block.bytes
            self.give(block)
            if (
                self.fault == FRAGMENTATION and self.step == _CUT_IN_STEP
            ):  # something that lasts comes to lie in what was free
                self.lasting.append(self.take(int(size * 0.6)))
        self.give(gradient)

    def _wander(self) -> None:
        """Keep some blocks for a few steps, as batches that are fetched ahead and statistics are: no leak."""
        for until in sorted(step for step in self.staying if step <= self.step):
            for block in self.staying.pop(until):
                self.give(block)
        for _ in range(self.draw.randint(0, 4)):
            until = self.step + self.draw.randint(1, 3)
            self.staying.setdefault(until, []).append(self.take(self.draw.choice(self.batches)))

    def _on_the_side(self) -> None:
        """Use memory on another stream, which keeps a cache of its own."""
        blocks = [self.take(size, _SIDE_STREAM) for sizes in self.saved for size in sizes]
        self._compute()
        for block in blocks:
            self.give(block)

    def _compute(self) -> None:
        self.recording.kernels.append((self.now_ns, _KERNEL_NS, self.step))
        self.now_ns += _KERNEL_NS

    def _call(self, event: SegmentEvent) -> None:
        name = "cudaMalloc" if event.action == "segment_alloc" else "cudaFree"
        self.recording.calls.append((name, self.now_ns, self.step))
        self.now_ns += _CALL_NS

    def _note(self, block: Block, delta_bytes: int) -> None:
        allocated, reserved = self.allocator.allocated_bytes, self.allocator.reserved_bytes
        self.recording.allocations.append((self.now_ns, block.address, delta_bytes, allocated, reserved, self.step))
        self.now_ns += _EVENT_NS

    def _forget(self) -> None:
        """Drop what was recorded so far: the profiler was not running yet."""
        self.recording.allocations.clear()
        self.recording.kernels.clear()
        self.recording.calls.clear()

    def _log(self, step: int, dur_ns: int) -> None:
        values = {
            conventions.STEP_TIME_METRIC: dur_ns,
            conventions.ALLOCATED_METRIC: self.allocator.allocated_bytes,
            conventions.RESERVED_METRIC: self.allocator.reserved_bytes,
            conventions.ALLOC_RETRIES_METRIC: self.allocator.retries,
        }
        self.recording.metrics += [(step, name, float(value)) for name, value in values.items()]

    def _trace(self) -> Trace:
        recording = self.recording
        allocated = pl.DataFrame(recording.allocations, schema=_ALLOCATION, orient="row").with_columns(device=0)
        work = pl.DataFrame(recording.kernels, schema=["start_ns", "dur_ns", "step"], orient="row").with_row_index("id")
        work = work.with_columns(lane=0, kind=pl.lit("compute"), name=pl.lit("simulated kernel"), launch_id="id")
        calls = pl.DataFrame(
            recording.calls, schema={"name": pl.String, "start_ns": pl.Int64, "step": pl.Int64}, orient="row"
        ).with_row_index("id")
        calls = calls.with_columns(lane=1, kind=pl.lit("runtime"), dur_ns=_CALL_NS)
        steps = pl.DataFrame(recording.steps, schema=["step", "start_ns", "end_ns"], orient="row").with_columns(
            host_start_ns="start_ns", host_end_ns="end_ns", device=0
        )
        lanes = [{"lane": 0, "device": 0, "stream": 0, "role": "compute"}, {"lane": 1, "role": "host"}]
        metrics = pl.DataFrame(recording.metrics, schema=["step", "name", "value"], orient="row")
        tables = {
            "lanes": pl.DataFrame(lanes), "steps": steps, "activities": work, "allocations": allocated,
            "metrics": metrics, "ops": calls,
        }  # fmt: skip
        conformed = {name: schema.TABLES[name].conform(table) for name, table in tables.items()}
        return Trace(0, 0, "simulated", **conformed)


def run_of(draw: random.Random, fault: str | None) -> Run:
    """Return the run of a program drawn at random, with a fault of FAULTS that takes effect, or none."""
    while True:
        program, trace = _draw_program(draw.random(), fault)
        if fault not in (FRAGMENTATION, RETRY) or program.took_effect:
            return Run("simulated", [Source(0, 0, trace.path, 0, lambda recorded=trace: recorded)])  # type: ignore[misc]


def _draw_program(seed: float, fault: str | None) -> tuple[Program, Trace]:
    program = Program(random.Random(seed), fault)
    trace = program.run()
    if fault == RETRY:  # the same program on a device that has room for one cache and half of the other
        aside_bytes = sum(sum(sizes) for sizes in program.saved)
        capacity_bytes = program.allocator.peak_reserved_bytes - aside_bytes // 2
        program = Program(random.Random(seed), fault, capacity_bytes=capacity_bytes)
        trace = program.run()
    return program, trace
