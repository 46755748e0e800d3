"""For each rule a drawn run in which it reports a finding and one in which it does not; the tests require both."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import polars as pl

from tests.support import drawn_cpu_ops, drawn_hosts, drawn_kernels, drawn_traces, pipeline_examples
from tests.support.drawn_cpu_ops import Op
from tests.support.sample_snapshots import MIB, Simulation, write
from tracekit.model import schema
from tracekit.model.run import RUN_DATA_QUALITY, Run
from tracekit.model.trace import Trace

HOST_LANE = 99
GIB = 1 << 30
MS = 1_000_000


@dataclass(frozen=True)
class Example:
    fires: Callable[[], Run]
    silent: Callable[[], Run]
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Thresholds without which the rule does not judge."""


def ops(*rows: tuple[str, str, int, int], step: int | None = 0, phase: str | None = None) -> pl.DataFrame:
    """Return host slices of one thread from (name, kind, start, end)."""
    made = [
        {"id": number, "lane": HOST_LANE, "name": name, "kind": kind, "start_ns": start, "dur_ns": end - start}
        for number, (name, kind, start, end) in enumerate(rows)
    ]
    frame = pl.DataFrame(made).with_columns(step=pl.lit(step, pl.Int64), phase=pl.lit(phase, pl.String))
    return schema.OPS.conform(frame)


def save_log(**stages_ns: int) -> pl.DataFrame:
    """Return the log of one save of a rank after step 2, from the duration of each stage."""
    rows = [
        {"checkpoint": "step-2", "operation": "save", "step": 2, "stage": stage, "start_ns": 0, "dur_ns": dur_ns}
        for stage, dur_ns in stages_ns.items()
    ]
    return pl.DataFrame(rows).with_columns(blocking=pl.lit(value=True))


def metrics(name: str, *values: float) -> pl.DataFrame:
    """Return a metric of steps 0, 1, …"""
    return pl.DataFrame({"step": range(len(values)), "name": [name] * len(values), "value": [float(v) for v in values]})


EXPOSED = """
    step     0000000000
    compute  aaaaaa....
    comm     .....xxxx.
"""
HIDDEN = """
    step     0000000000
    compute  aaaaaaaaaa
    comm     .xxxxxxxx.
"""
# p takes 2 alone and 6 during a; x starts 4 late, and compute waits for the last 4 of x.
GIVE_WAY = """
    step     0000000000000000000000000
    compute  aaaaaaaa....aaaa......aaa
    comm     ppppppxxxxxx....ppxxxx...
"""
# The same work, prepared before compute starts.
PREPARED = """
    step     0000000000000000000000000
    compute  ..aaaaaa....aaaa......aaa
    comm     ppxxxxxx........ppxxxx...
"""
# The device is idle from 10 to 16, from 30 to 36 and from 50 to 56 ns.
CHURNING = """
    step     000000000000000000001111111111111111111122222222222222222222
    compute  aaaaaaaaaa......aaaaaaaaaaaaaa......aaaaaaaaaaaaaa......aaaa
"""


def give_way_run(picture: str, **more: object) -> Run:
    return drawn_traces.run(
        drawn_traces.trace(picture, scale_ns=drawn_hosts.UNIT_NS, columns={"p": {"kind": "compute"}}, **more)
    )


def device_malloc_run(picture: str, *calls: tuple[int, int, int]) -> Run:
    """Return a drawn run with device mallocs at (step, start, end)."""
    rows = [ops(("cudaMalloc", "runtime", start, end), step=step) for step, start, end in calls]
    return drawn_traces.run(drawn_traces.trace(picture, ops=pl.concat(rows)) if rows else drawn_traces.trace(picture))


def unit_buffer_run(span: str) -> Run:
    """Return a run in which each step allocates a block of 8 MiB inside an FSDP span."""
    rows = pl.DataFrame({"step": [0, 1, 2], "at_ns": [0, 1, 2], "delta_bytes": [8 * MIB] * 3})
    taken = rows.with_columns(span=pl.lit(span), unit=pl.lit("layers.0"))
    return drawn_traces.run(drawn_traces.trace("step 000111222\ncompute aaabbbccc", allocations=taken))


def blocking_save_run(**stages_ns: int) -> Run:
    trace = drawn_traces.trace(
        "step 01\ncompute ab", checkpoints=save_log(**stages_ns), metrics=metrics("step_time_ns", 100, 100, 100)
    )
    return drawn_traces.run(trace, strategy="ddp")


def trainer_run(rollout: str) -> Run:
    """Return the run of a trainer that pauses for 8 of 11 ms beside a rollout worker that is drawn in ms."""
    drawn = {"trainer": "step 00000000000\ncompute ab........c", "rollout": rollout}
    runs = {name: drawn_traces.run(drawn_traces.trace(picture, scale_ns=MS)) for name, picture in drawn.items()}
    for name, run in runs.items():
        run.role, run.roles = name, runs
    return runs["trainer"]


def save_run(
    *ranks: dict[str, int],
    steps_ms: tuple[int, ...] = (1000, 1000, 1000),
    columns: dict[str, dict[str, object]] | None = None,
    every: dict[str, object] | None = None,
    **manifest: object,
) -> Run:
    """Return ranks that save after step 2; each rank is given as the duration in ms of its stages.

    `columns` sets columns of one stage, such as {"write": {"bytes": 5}}, and `every` those of all stages.
    """
    traces = []
    for rank, stages_ms in enumerate(ranks):
        table = schema.CHECKPOINTS.conform(save_log(**{stage: ms * MS for stage, ms in stages_ms.items()}))
        table = table.with_columns(pl.lit(value).alias(name) for name, value in (every or {}).items())
        for stage, more in (columns or {}).items():
            table = table.with_columns(
                pl.when(pl.col("stage") == stage).then(pl.lit(value)).otherwise(name).alias(name)
                for name, value in more.items()
            )
        times = metrics("step_time_ns", *(ms * MS for ms in steps_ms))
        traces.append(drawn_traces.trace("step 01\ncompute ab", rank=rank, checkpoints=table, metrics=times))
    return drawn_traces.run(*traces, **manifest)


def writer_run(*ranks: tuple[int, int]) -> Run:
    """Return ranks that write (bytes, ms) and then wait for the slowest rank."""
    longest = max(ms for _, ms in ranks)
    parts = [
        save_run({"write": ms, "wait": longest - ms, "total": longest}, columns={"write": {"bytes": size}})
        for size, ms in ranks
    ]
    return drawn_traces.run(*(replace(part.trace(0), rank=rank) for rank, part in enumerate(parts)))


def background_save_run(
    *, python_ms: int = 1500, worker: str = "thread", after_ms: int = 150, **counters_ms: int
) -> Run:
    """Return a rank that saves for 2 s in the background, after 20 steps of 100 ms and during steps of `after_ms`."""
    counted: dict[str, object] = {"blocking": False} | {name: ms * MS for name, ms in counters_ms.items()}
    stages = {"serialize": python_ms, "write": 2000 - python_ms, "total": 2000}
    run = save_run(
        stages | ({"complete": 2000} if counters_ms else {}),
        every={"blocking": False, "worker": worker, "step": 20},
        columns={"complete": counted},
        steps_ms=(*[100] * 20, *[after_ms] * 10),
    )
    return drawn_traces.run(*run.traces(), strategy="ddp")


def repeated_background_saves(*, uploads_ms: int) -> Run:
    """Return a rank that starts a background save of `uploads_ms` every 3 s."""
    one = schema.CHECKPOINTS.conform(save_log(write=uploads_ms * MS, total=uploads_ms * MS)).with_columns(
        blocking=pl.lit(value=False)
    )
    both = [
        one.with_columns(checkpoint=pl.lit(f"step-{step}"), step=pl.lit(step), start_ns=pl.lit(start_ms * MS, pl.Int64))
        for step, start_ms in ((20, 0), (40, 3000))
    ]
    times = metrics("step_time_ns", *[100.0 * MS] * 42)
    trace = drawn_traces.trace("step 01\ncompute ab", checkpoints=pl.concat(both), metrics=times)
    return drawn_traces.run(trace, strategy="ddp")


def load_run(*read_bytes: int, whole_bytes: int, call: str = "dcp.load") -> Run:
    """Return ranks that load one checkpoint, given the bytes that each rank reads."""
    traces = []
    for rank, size_bytes in enumerate(read_bytes):
        rows = [
            {"stage": "read", "dur_ns": 5 * MS, "bytes": size_bytes},
            {"stage": "total", "dur_ns": 9 * MS, "bytes": size_bytes, "whole_bytes": whole_bytes},
        ]
        table = pl.DataFrame(rows, infer_schema_length=None).with_columns(
            checkpoint=pl.lit("step-2"), operation=pl.lit("load"), path=pl.lit("a/step-2"), call=pl.lit(call),
            start_ns=pl.lit(0), blocking=pl.lit(value=True),
        )  # fmt: skip
        traces.append(drawn_traces.trace("step 01\ncompute ab", rank=rank, checkpoints=table))
    return drawn_traces.run(*traces)


def data_quality_issues(*issues: tuple[str, float]) -> Run:
    """Return a run with data-quality issues of these kinds and affected ratios."""
    run = drawn_traces.run(drawn_traces.trace(HIDDEN))
    rows = [(0, None, kind, f"Something is {kind}.", ratio) for kind, ratio in issues]
    return Run(run.path, run.sources, data_quality=pl.DataFrame(rows, schema=RUN_DATA_QUALITY.schema, orient="row"))


def late_launch_run(*, late_by: int = 0, reads: bool = False, loads: bool = False) -> Run:
    """Return a run of three steps of 20 in which the device is idle from 8 to 16 because the host launches late."""
    picture = """
        step     000000000000000000001111111111111111111122222222222222222222
        compute  aaaaaaaa........bbbbcccccccc........ddddeeeeeeee........ffff
    """
    starts = (8, 28, 48)
    doing: list[tuple[str, str, int, int]] = []
    if reads:
        doing += [("cudaStreamSynchronize", "runtime", start - 4, start) for start in starts]
    if loads:
        doing += [("enumerate(DataLoader)#it.__next__", "annotation", start, start + 8) for start in starts]
    launched = {letter: start + late_by for letter, start in zip("bdf", starts, strict=True)}
    return drawn_traces.run(drawn_hosts.trace(picture, dict.fromkeys("ace", 0) | launched, tuple(doing)))


def copying_run(**columns: object) -> Run:
    """Return a run of two steps of 20 in which the device only copies from 8 to 16."""
    picture = """
        step     0000000000000000000011111111111111111111
        compute  aaaaaaaa........bbbbcccccccc........dddd
        copy     ........hhhhhhhh............hhhhhhhh....
    """
    pageable = {"name": "Memcpy HtoD (Pageable -> Device)", "bytes": 1 << 20}
    return drawn_traces.run(drawn_hosts.trace(picture, columns={"h": pageable | columns}))


def stalled_run(
    *ranks: str, doing: tuple[tuple[str, str, int, int], ...] = (), step: int = 1, late_by: int = 40
) -> Run:
    """Return ranks with three steps of 40 characters, 20 of compute and then an all-reduce.

    In step `step` the host of each rank that is called "late" launches the second half `late_by` characters later (50
    µs each); `doing` is what it does, from the start of that stall. The all-reduce of the others waits.
    """
    groups = pl.DataFrame({"group": ["0"], "ranks": [list(range(len(ranks)))]})
    traces = []
    for rank, state in enumerate(ranks):
        rows = {"step": "", "compute": "", "comm": ""}
        launched: dict[str, int] = {}
        for number in range(3):
            late = late_by * (number == step)
            half = late if state == "late" else 0
            begin, letter = len(rows["step"]), "abc"[number]
            rows["step"] += str(number) * (40 + late)
            rows["compute"] += letter * 10 + "." * half + letter.upper() * 10 + "." * (20 + late - half)
            rows["comm"] += "." * (20 + half) + "y" * (19 + late - half) + "."
            launched |= {letter: 0, letter.upper(): begin + 10 + half - 1 if half else 0}
        start = 40 * step + 10
        slices = tuple((name, kind, start + first, start + past) for name, kind, first, past in doing)
        picture = "\n".join(f"{name} {cells}" for name, cells in rows.items())
        made = drawn_hosts.trace(
            picture, launched, slices if state == "late" else (), rank=rank, groups=groups, ops={"y": "all_reduce"}
        )
        traces.append(made)
    return drawn_traces.run(*traces)


COMPILES = ("entire_frame_compile", "cpu_op")
COLLECTS = ("<built-in function collect>", "python")
PHASE_LENGTH = 40


def phase_run(*ranks: tuple[int, ...], steps: int, phase: tuple[str, str]) -> Run:
    """Return ranks with `steps` steps of 20 units, in some of which (by rank) the host is in a phase for 40 more.

    The all-reduce at the end of a step begins on all ranks when the last one arrives.
    """
    groups = pl.DataFrame({"group": ["0"], "ranks": [list(range(len(ranks)))]})
    late = {step for affected in ranks for step in affected}
    traces = []
    for rank, affected in enumerate(ranks):
        rows, launched = {"step": "", "compute": "", "comm": ""}, {}
        slices = []
        for step in range(steps):
            begin = len(rows["step"])
            more = PHASE_LENGTH * (step in late)
            pause = PHASE_LENGTH * (step in affected)
            first, second = "abcdefgh"[step], "ABCDEFGH"[step]
            rows["step"] += str(step) * (20 + more)
            rows["compute"] += first * 5 + "." * pause + second * 5 + "." * (20 - 10 + more - pause)
            rows["comm"] += "." * (10 + pause) + "y" * (8 + more - pause) + ".."
            launched |= {first: max(begin - 5, 0), second: begin + 5 + pause - 1 if pause else begin + 5}
            if pause:
                slices.append((*phase, begin + 5, begin + 5 + pause - 1))
        picture = "\n".join(f"{name} {cells}" for name, cells in rows.items())
        traces.append(
            drawn_hosts.trace(picture, launched, tuple(slices), rank=rank, groups=groups, ops={"y": "all_reduce"})
        )
    return drawn_traces.run(*traces)


def queued_run(picture: str) -> Run:
    """Return a run whose work was launched in advance, in order of start; of two at one time the collective first."""
    plain = drawn_traces.trace(picture, scale_ns=drawn_hosts.UNIT_NS)
    order = plain.activities.sort("start_ns", pl.col("kind") == "compute")["id"].to_list()
    calls = [
        {"id": made, "name": "cudaLaunchKernel", "kind": "runtime", "start_ns": -9999 + i, "dur_ns": 0}
        for i, made in enumerate(order)
    ]
    launches = schema.OPS.conform(pl.DataFrame(calls).with_columns(lane=pl.lit(HOST_LANE)))
    return drawn_traces.run(drawn_traces.trace(picture, scale_ns=drawn_hosts.UNIT_NS, ops=launches))


def preparation_run(picture: str) -> Run:
    """Return a run in which p prepares the next collective on its stream."""
    return drawn_traces.run(drawn_hosts.trace(picture, dict.fromkeys("abpx", 0)))


def overlap_run(compute: str, communication: str) -> Run:
    """Return a run that repeats the drawn timeline eight times, with collectives of one size."""
    picture = f"step {'0' * 8 * len(compute)}\ncompute {compute * 8}\ncomm {communication * 8}"
    return drawn_traces.run(drawn_hosts.trace(picture, {"a": 0, "b": 0}))


def straggler_run(*tardy: int, turns: bool = False, sent_bytes: int = 1024) -> Run:
    """Return ranks with four all-reduces in each of three steps; `tardy` is by how much each rank is late.

    With `turns`, another rank is late at each all-reduce.
    """
    groups = pl.DataFrame({"group": ["0"], "ranks": [list(range(len(tardy)))]})
    steps = "".join(str(step) * 32 for step in range(3))
    traces = []
    for rank in range(len(tardy)):
        late_by = [tardy[(rank + turns * call) % len(tardy)] for call in range(12)]
        compute = "".join("a" * (2 + after) + "." * (6 - after) for after in late_by)
        calls = "".join("." * (2 + after) + "y" * (5 - after) + "." for after in late_by)
        picture = f"step {steps}\ncompute {compute}\ncomm {calls}"
        more = {"groups": groups, "ops": {"y": "all_reduce"}, "sent_bytes": sent_bytes}
        traces.append(drawn_hosts.trace(picture, {"a": 0}, rank=rank, **more))
    return drawn_traces.run(*traces)


def occasional_straggler_run(*more_ops: int) -> Run:
    """Return two ranks with an all-reduce in each step, before which rank 0 runs so many more operators of 9 ns.

    The first has 10 of them in step 3 here:

        step    0         1         2         3
        rank 0  aaaay...  aaaay...  aaaay...  aaaabbbbbbbbby...
        rank 1  aaaay...  aaaay...  aaaay...  aaaay............
    """
    groups = pl.DataFrame({"group": ["0"], "ranks": [[0, 1]]})
    traces = []
    for rank in range(2):
        rows: dict[str, str] = {"step": "", "compute": "", "comm": ""}
        starts = []
        for step, more in enumerate(more_ops):
            own = more if rank == 0 else 0
            starts += [len(rows["step"]) + 9 * number for number in range(1 + own)]
            rows["step"] += str(step) * (9 * (1 + more) + 3)
            rows["compute"] += "a" * 9 * (1 + own) + "." * (9 * (more - own) + 3)
            rows["comm"] += "." * 9 * (1 + own) + "y" * (9 * (more - own) + 3)
        picture = "\n".join(f"{name} {cells}" for name, cells in rows.items())
        trace = drawn_hosts.trace(picture, {"a": 0}, rank=rank, groups=groups, ops={"y": "all_reduce"})
        steps = [int(rows["step"][at]) for at in starts]
        own_ops = ops(*(("aten::mm", "cpu_op", 1000 * at, 9000) for at in starts)).with_columns(
            pl.Series("step", steps)
        )
        traces.append(replace(trace, ops=schema.OPS.conform(own_ops)))
    return drawn_traces.run(*traces)


def allocated_run(*allocated_bytes: int, reserved_bytes: int = 10 << 30, memory_bytes: int = 100 << 30) -> Run:
    """Return a run on a device in which one op has allocated so many bytes at the end of each step."""
    steps = range(len(allocated_bytes))
    deltas = [after - before for before, after in zip((0, *allocated_bytes), allocated_bytes, strict=False)]
    events = pl.DataFrame(
        {"at_ns": steps, "step": steps, "address": steps, "delta_bytes": deltas, "allocated_bytes": allocated_bytes}
    ).with_columns(device=0, reserved_bytes=reserved_bytes, op_id=0)
    trace = drawn_traces.trace(HIDDEN, allocations=events, ops=ops(("aten::_softmax", "cpu_op", 0, 9)))
    header = {"deviceProperties": [{"id": 0, "totalGlobalMem": memory_bytes}]}
    return drawn_traces.run(replace(trace, header=header))


def block_sizes_run(*steps: dict[int, int], reserved: tuple[int, ...] = ()) -> Run:
    """Return a run on a device whose steps allocate and free blocks, given as a count by size for each step.

    `reserved` is the reserved memory in each step.
    """
    rows, at = [], 0
    for step, sizes in enumerate(steps):
        for size, count in sizes.items():
            for delta in (size, -size) * count:
                allocated = GIB + max(delta, 0)
                rows.append((at, step, at // 2, delta, allocated, reserved[step] if reserved else 4 * GIB))
                at += 1
    names = ["at_ns", "step", "address", "delta_bytes", "allocated_bytes", "reserved_bytes"]
    events = pl.DataFrame(rows, schema=names, orient="row").with_columns(device=0)
    return drawn_traces.run(drawn_traces.trace(HIDDEN, allocations=events))


def run_with_snapshots(*programs: Simulation) -> Run:
    """Return a drawn run in a new folder with one memory snapshot for each simulated program (one per rank)."""
    folder = tempfile.TemporaryDirectory(prefix="tracekit-test-")
    _FOLDERS.append(folder)
    for rank, program in enumerate(programs):
        write(Path(folder.name) / f"rank{rank:05d}.memory.pickle", program.document())
    return drawn_traces.run(drawn_traces.trace(HIDDEN), path=folder.name)


def program_on_streams(*allocated: tuple[int, int]) -> Simulation:
    """Return a simulated program that allocates and frees a block on each (stream, MiB)."""
    program = Simulation()
    for stream, size in allocated:
        program.free(program.malloc(size * MIB, stream=stream))
    return program


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # removed when the tests end


def leaking_run(step_bytes: int) -> Run:
    return allocated_run(*(GIB + step * step_bytes for step in range(8)))


def collectives_trace(picture: str, **columns: object) -> Trace:
    """Return a trace whose collectives belong to a group of 8 ranks, with these columns."""
    plain = drawn_hosts.trace(picture, dict.fromkeys("ab", 0))
    collectives = plain.collectives.with_columns(
        pl.lit(value).alias(name) for name, value in ({"group_size": 8, "group": "0"} | columns).items()
    )
    return replace(plain, collectives=schema.COLLECTIVES.conform(collectives))


def micro_batch_run(picture: str) -> Run:
    """Return a run with forward compute f and g, backward compute b and c, and gradient reductions x and y."""
    backward = dict.fromkeys("bcxy", "backward")
    return drawn_traces.run(
        drawn_hosts.trace(
            picture, phases=dict.fromkeys("fg", "forward") | backward, ops=dict.fromkeys("xy", "reduce_scatter")
        )
    )


def slow_link_run(*took: int) -> Run:
    """Return groups of two ranks with four all-gathers in each of three steps, given the duration in each group."""
    traces = []
    for rank in range(2 * len(took)):
        group, takes = rank // 2, took[rank // 2]
        steps = "".join(str(step) * 40 for step in range(3))
        picture = f"step {steps}\ncompute {'aa........' * 12}\ncomm {('..' + 'x' * takes).ljust(10, '.') * 12}"
        ranks = [2 * group, 2 * group + 1]
        groups = pl.DataFrame({"group": [str(group)], "description": ["dp"], "ranks": [ranks]})
        plain = drawn_hosts.trace(picture, {"a": 0}, rank=rank, groups=groups)
        collectives = plain.collectives.with_columns(
            group=pl.lit(str(group)), group_size=pl.lit(2), dtype=pl.lit("Float")
        )
        traces.append(replace(plain, collectives=schema.COLLECTIVES.conform(collectives)))
    return drawn_traces.run(*traces)


def all_reduce_run(
    *took: int,
    late: dict[tuple[int, int], int] | None = None,
    doing: dict[int, tuple[tuple[str, str, int, int], ...]] | None = None,
    ranks: tuple[int, ...] = (0, 1),
    hidden: bool = False,
) -> Run:
    """Return ranks with one all-reduce in each step, given its duration in each step; the group has ranks 0 and 1.

    `late` is by how much a rank comes later, by rank and step, `doing` what a rank's host does. Compute overlaps the
    all-reduces if they are `hidden`.
    """
    groups = pl.DataFrame({"group": ["0"], "ranks": [[0, 1]]})
    waits = [max((late or {}).get((rank, step), 0) for rank in (0, 1)) for step in range(len(took))]
    traces = []
    for rank in ranks:
        own = [(late or {}).get((rank, step), 0) for step in range(len(took))]
        each = list(zip(took, waits, own, strict=True))
        steps = "".join(str(step) * (3 + wait + n) for step, (n, wait, _) in enumerate(each))
        comm = "".join("." * (2 + after) + "x" * (wait - after + n) + "." for n, wait, after in each)
        compute = "".join("aa" + "." * (wait) + ("b" if hidden else ".") * n + "." for n, wait, _ in each)
        picture = f"step {steps}\ncompute {compute}\ncomm {comm}"
        happening = (doing or {}).get(rank, ())
        traces.append(
            drawn_hosts.trace(picture, {"a": 0}, happening, rank=rank, groups=groups, ops={"x": "all_reduce"})
        )
    return drawn_traces.run(*traces)


def recomputation_run(free_bytes: int, *, step: str = "0" * 20) -> Run:
    """Return a run that recomputes kernel r (1 GiB of activations) in backward, with `free_bytes` never reserved."""
    picture = f"step {step}\ncompute ffffffffrrrrbbbbbbbb"
    node = ("CheckpointFunctionBackward", "cpu_op", 8, 12)
    plain = drawn_hosts.trace(picture, phases={"f": "forward", "r": "backward", "b": "backward"}, doing=(node,))
    inside = (pl.col("start_ns") >= 8 * drawn_hosts.UNIT_NS) & (pl.col("start_ns") < 12 * drawn_hosts.UNIT_NS)
    of_node = pl.when(inside & (pl.col("kind") == "runtime")).then(plain.ops.height - 1).alias("parent_id")
    events = pl.DataFrame(
        {
            "at_ns": [8 * drawn_hosts.UNIT_NS, 14 * drawn_hosts.UNIT_NS],
            "delta_bytes": [GIB, -GIB],
            "allocated_bytes": [2 * GIB, GIB],
        }
    ).with_columns(device=0, reserved_bytes=100 * GIB - free_bytes, address=1, step=0)
    header = {"deviceProperties": [{"id": 0, "totalGlobalMem": 100 * GIB}]}
    allocated = schema.ALLOCATIONS.conform(events)
    return drawn_traces.run(replace(plain, ops=plain.ops.with_columns(of_node), allocations=allocated, header=header))


def crowded_run(picture: str, **processors: int) -> Run:
    """Return a drawn run of the CPU, by default of two ranks with 16 threads each on two cores."""
    stated = {"cores": 2, "threads": 16, "ranks": 2} | processors
    return drawn_traces.run(drawn_traces.trace(picture, on_device=False), processors=stated)


def interrupted_run(every: int = 10) -> Run:
    """A CPU run in which Python pauses for 5 ms before some ops, other ones in each step, and one step has fewer."""
    ops = [Op(f"aten::op{number}", 100) for number in range(50)]
    return drawn_cpu_ops.run(ops, 8, lambda step, number: 5000 if (number + 3 * step) % every == 0 else 5)


TRAINING_OPS = [
    Op("aten::mm", 1000, is_needed=True), Op("aten::mm", 1000, phase="backward"),
    Op("aten::add_", 100, phase="optimizer"),
]  # fmt: skip
FAST_OPS = [Op("aten::add", 13), Op("aten::mul_", 10), Op("aten::add_", 10), Op("aten::sub_", 10)] * 2
CAST = [Op("aten::to", 20, cast_to="double"), Op("aten::to", 30, dtype="double", cast_to="float")]
"""To 64 bits and back."""


EXAMPLES: dict[str, Example] = {
    "COMM001": Example(
        lambda: drawn_traces.run(drawn_traces.trace(EXPOSED)), lambda: drawn_traces.run(drawn_traces.trace(HIDDEN))
    ),
    # One of eight calls of a takes 1, the others 4; or one is interrupted for 7.
    "HOST007": Example(
        lambda: crowded_run(f"step {'0' * 20}{'1' * 20}\ncompute a....{'aaaa.' * 7}"),
        lambda: crowded_run(f"step {'0' * 8}{'1' * 15}\ncompute {'a.' * 7}aaaaaaaa."),
    ),
    "STREAM001": Example(lambda: give_way_run(GIVE_WAY), lambda: give_way_run(PREPARED)),
    # a is launched after x and could start before it.
    "STREAM002": Example(
        lambda: queued_run(f"step {'0' * 80}\ncompute {'..aaaa....' * 8}\ncomm {'..xx......' * 8}"),
        lambda: queued_run(f"step {'0' * 80}\ncompute {'aaaa......' * 8}\ncomm {'..xx......' * 8}"),
    ),
    # a takes 4 during x and 2 alone.
    "STREAM003": Example(
        lambda: drawn_traces.run(
            drawn_traces.trace(f"step {'0' * 64}\ncompute {'aaaa.aa.' * 8}\ncomm {'.xxx....' * 8}")
        ),
        lambda: drawn_traces.run(drawn_traces.trace(f"step {'0' * 48}\ncompute {'aa.aa.' * 8}\ncomm {'xx....' * 8}")),
    ),
    # x takes 4 during a, y of the same size 2 alone; the next compute waits for the end of x.
    "STREAM004": Example(lambda: overlap_run("aaa.b..", "xxxx.yy"), lambda: overlap_run("aaaab..", "xx...yy")),
    "STREAM005": Example(
        lambda: drawn_traces.run(drawn_hosts.time_sliced((5, 10, 15, 24, 31))),
        lambda: drawn_traces.run(drawn_hosts.time_sliced((5, 10, 15, 24, 31), launched_late=(5, 10, 15, 24, 31))),
    ),
    # a takes 4 during the copy x of another stream and 2 alone.
    "STREAM006": Example(
        lambda: drawn_traces.run(
            drawn_traces.trace(f"step {'0' * 64}\ncompute {'aaaa.aa.' * 8}\ncopy {'.xxx....' * 8}")
        ),
        lambda: drawn_traces.run(drawn_traces.trace(f"step {'0' * 48}\ncompute {'aa.aa.' * 8}\ncopy {'xx....' * 8}")),
    ),
    "COMM004": Example(
        lambda: preparation_run("""
            step     0000000000000000
            compute  aaaa........bbbb
            comm     ....ppppxxxx....
        """),
        lambda: preparation_run("""
            step     0000000000000000
            compute  aaaaaaaaaaaabbbb
            comm     ppppxxxxxxxx....
        """),
    ),
    "COMM002": Example(
        lambda: drawn_traces.run(
            collectives_trace("step 0000000000000000\ncompute aaaa........bbbb\ncomm ....xyxyxyxy....")
        ),
        lambda: drawn_traces.run(
            collectives_trace("step 0000000000000000\ncompute aaaa........bbbb\ncomm ....xxxxxxxx....")
        ),
    ),
    "COMM003": Example(
        lambda: micro_batch_run("step 00000000000000000000\ncompute ffffbbbb..ggggcccc..\ncomm ........xx........yy"),
        lambda: micro_batch_run("step 00000000000000000000\ncompute ffffbbbbggggcccc....\ncomm ................yy.."),
    ),
    "HOST001": Example(lambda: late_launch_run(late_by=7), late_launch_run),
    "HOST002": Example(lambda: late_launch_run(late_by=7, reads=True), lambda: late_launch_run(late_by=7)),
    "HOST003": Example(lambda: late_launch_run(late_by=8, loads=True), lambda: late_launch_run(late_by=8)),
    "HOST005": Example(
        lambda: phase_run((1, 3), steps=6, phase=COMPILES), lambda: phase_run((0,), steps=6, phase=COMPILES)
    ),
    "HOST006": Example(
        lambda: phase_run((1, 3), steps=6, phase=COLLECTS), lambda: phase_run((1,), steps=6, phase=COLLECTS)
    ),
    "COMP001": Example(
        lambda: drawn_kernels.product(1021, us=900, align=1), lambda: drawn_kernels.product(1024, us=900, align=8)
    ),
    "COMP002": Example(drawn_kernels.single, lambda: drawn_kernels.single(device=drawn_kernels.V100)),
    "COMP003": Example(
        lambda: drawn_kernels.adam(*drawn_kernels.FOREACH_ADAM), lambda: drawn_kernels.adam("_fused_adamw_")
    ),
    "COMP004": Example(lambda: drawn_kernels.chain("exp", "neg", "sigmoid"), lambda: drawn_kernels.chain("exp", "exp")),
    "COMP006": Example(
        lambda: drawn_cpu_ops.run([*FAST_OPS, Op("aten::mul", 260)]),
        lambda: drawn_cpu_ops.run([*FAST_OPS, Op("aten::mul", 26)]),
    ),
    "COMP007": Example(
        lambda: drawn_cpu_ops.run([*FAST_OPS, *CAST]), lambda: drawn_cpu_ops.run([Op("aten::mm", 5000), *CAST])
    ),
    "COMP009": Example(
        lambda: drawn_cpu_ops.run([*FAST_OPS, Op("aten::isnan", 20, node=drawn_cpu_ops.NODE)]),
        lambda: drawn_cpu_ops.run([*FAST_OPS, Op("aten::isnan", 20)]),
    ),
    "COMP010": Example(
        lambda: drawn_cpu_ops.run([*FAST_OPS, Op("aten::empty", 20, inner="aten::fill_")]),
        lambda: drawn_cpu_ops.run([*FAST_OPS, Op("aten::zeros", 20, inner="aten::fill_")]),
    ),
    "HOST008": Example(interrupted_run, lambda: interrupted_run(every=1)),
    "COMP011": Example(
        lambda: drawn_cpu_ops.run([*TRAINING_OPS, Op("aten::histc", 500)]),
        lambda: drawn_cpu_ops.run([Op("aten::histc", 500), *TRAINING_OPS]),
    ),
    "COMP008": Example(
        lambda: drawn_cpu_ops.run([Op("aten::mm", 1000), *[Op("aten::mul_", 3, (512,))] * 250]),
        lambda: drawn_cpu_ops.run([Op("aten::mm", 1000), *[Op("aten::mul_", 3, (512,))] * 50]),
    ),
    "COMP005": Example(lambda: drawn_kernels.waves(1024), lambda: drawn_kernels.waves(768)),
    "HOST004": Example(copying_run, lambda: copying_run(phase="checkpoint")),
    "STEP001": Example(lambda: stalled_run("late", "", ""), lambda: stalled_run("", "", "")),
    "STEP002": Example(
        lambda: stalled_run("late", "late", doing=(("cudaMalloc", "runtime", 0, 39),), step=0),
        lambda: stalled_run("late", "late", step=0),
    ),
    "STEP003": Example(
        lambda: drawn_traces.run(drawn_traces.slowing(dict.fromkeys("abcdefgh", 12))),
        lambda: drawn_traces.run(drawn_traces.slowing({"a": 12})),
    ),
    "STEP004": Example(lambda: all_reduce_run(*[2] * 6, 60, 2), lambda: all_reduce_run(*[2] * 6, 7, 2)),
    "RANK001": Example(lambda: straggler_run(0, 3), lambda: straggler_run(0, 0)),
    "RANK002": Example(lambda: slow_link_run(3, 6), lambda: slow_link_run(3, 3)),
    "MEM002": Example(lambda: recomputation_run(10 * GIB), lambda: recomputation_run(5 * GIB)),
    "RANK003": Example(lambda: straggler_run(0, 3, turns=True), lambda: straggler_run(0, 3)),
    "RANK004": Example(lambda: straggler_run(0, 0, 3, 3), lambda: straggler_run(0, 0, 0, 3)),
    "RANK005": Example(
        lambda: occasional_straggler_run(0, 0, 0, 10, 0, 0), lambda: occasional_straggler_run(0, 0, 0, 0, 0, 0)
    ),
    "MEM001": Example(
        lambda: device_malloc_run(CHURNING, (0, 10, 15), (1, 30, 35), (2, 50, 55)), lambda: device_malloc_run(CHURNING)
    ),
    "MEM003": Example(lambda: leaking_run(1 << 20), lambda: leaking_run(0)),
    "MEM004": Example(lambda: allocated_run(GIB, reserved_bytes=96 * GIB), lambda: allocated_run(GIB)),
    "MEM005": Example(lambda: allocated_run(GIB), lambda: allocated_run(9 * GIB)),
    "MEM006": Example(lambda: allocated_run(GIB), lambda: allocated_run(1 << 20)),
    "MEM007": Example(
        lambda: drawn_traces.run(drawn_traces.trace(HIDDEN, metrics=metrics("num_alloc_retries", 0, 0, 0, 2))),
        lambda: drawn_traces.run(drawn_traces.trace(HIDDEN, metrics=metrics("num_alloc_retries", 0, 2, 2, 2))),
    ),
    "MEM008": Example(
        lambda: block_sizes_run(*[{GIB: 2}] * 3, reserved=(4 * GIB, 5 * GIB, 6 * GIB)),
        lambda: block_sizes_run(*[{GIB: 2}] * 3, reserved=(4 * GIB, 4 * GIB, 4 * GIB)),
    ),
    "MEM009": Example(
        lambda: run_with_snapshots(program_on_streams((0, 900), (7, 500))),
        lambda: run_with_snapshots(program_on_streams((0, 900))),
    ),
    "MEM010": Example(
        lambda: block_sizes_run(*({GIB + step * 2 * MIB: 1, GIB: 1} for step in range(4))),
        lambda: block_sizes_run(*[{GIB: 2}] * 4),
    ),
    "MEM011": Example(lambda: unit_buffer_run("all_gather"), lambda: unit_buffer_run("forward")),
    "CKPT001": Example(
        lambda: blocking_save_run(plan=10, write=80, total=100),
        lambda: drawn_traces.run(drawn_traces.trace(HIDDEN), strategy="ddp"),
    ),
    # Most of the 500 ms is one stage; no other rank waits.
    "CKPT002": Example(
        lambda: save_run({"serialize": 400, "write": 50, "total": 500}),
        lambda: save_run({"serialize": 40, "write": 5, "total": 50}),
    ),
    "CKPT003": Example(
        lambda: save_run({"stage": 400, "write": 50, "total": 500}),
        lambda: save_run({"stage": 400, "write": 50, "total": 500}, steps_ms=(9000, 9000, 9000)),
    ),
    "CKPT004": Example(
        lambda: save_run({"serialize": 50, "write": 400, "total": 500}),
        lambda: save_run({"serialize": 400, "write": 50, "total": 500}),
    ),
    "CKPT005": Example(
        lambda: save_run({"write": 50, "fsync": 200, "finish": 200, "total": 500}),
        lambda: save_run({"write": 300, "fsync": 50, "finish": 50, "total": 500}),
    ),
    # Both ranks write 1 GB, rank 1 nine times as slowly. In the silent run it has ten times the bytes.
    "CKPT006": Example(lambda: writer_run((10**9, 50), (10**9, 450)), lambda: writer_run((10**8, 50), (10**9, 450))),
    "CKPT007": Example(
        lambda: save_run({"plan": 300, "write": 50, "wait": 150, "total": 500}),
        lambda: save_run({"plan": 100, "write": 300, "wait": 100, "total": 500}),
    ),
    "CKPT008": Example(
        lambda: save_run({"write": 50, "fsync": 400, "total": 500}, columns={"fsync": {"calls": 1}}),
        lambda: save_run({"write": 50, "fsync": 400, "total": 500}),
    ),
    "CKPT009": Example(background_save_run, lambda: background_save_run(worker="process")),
    "CKPT010": Example(
        lambda: background_save_run(cpu_ns=900, run_delay_ns=1000),
        lambda: background_save_run(cpu_ns=1500, run_delay_ns=100, python_ms=100),
    ),
    "CKPT011": Example(
        lambda: repeated_background_saves(uploads_ms=2990), lambda: repeated_background_saves(uploads_ms=2000)
    ),
    "CKPT012": Example(lambda: load_run(10, 10, whole_bytes=10), lambda: load_run(5, 5, whole_bytes=10)),
    # With 0.5 s per save and one failure per day, 294 s between saves is optimal.
    "CKPT013": Example(
        lambda: save_run({"write": 500, "total": 500}),
        lambda: save_run({"write": 500, "total": 500}, steps_ms=(147000,) * 3),
        {"mtbf_s": 86400},
    ),
    "CKPT014": Example(
        lambda: save_run({"write": 500, "total": 500}, columns={"total": {"durable": False, "bytes": 5}}),
        lambda: save_run({"write": 500, "total": 500}, columns={"total": {"durable": True, "bytes": 5}}),
    ),
    "CKPT015": Example(
        lambda: save_run({"write": 500, "total": 500}, every={"call": "dcp.save"}),
        lambda: save_run({"write": 500, "total": 500}, every={"call": "torch.save"}),
    ),
    "CKPT016": Example(
        lambda: save_run({"write": 100, "wait": 400, "total": 500}, columns={"total": {"run_delay_ns": 350 * MS}}),
        lambda: save_run({"write": 100, "wait": 400, "total": 500}, columns={"total": {"run_delay_ns": 50 * MS}}),
    ),
    "CKPT017": Example(
        lambda: save_run(*[{"total": 5}] * 2, every={"call": "torch.save", "path": "a/model.pt", "bytes": 8}),
        lambda: save_run({"total": 5}, every={"call": "torch.save", "path": "a/model.pt", "bytes": 8}),
    ),
    "ROLE001": Example(lambda: trainer_run("compute xxyyyyyyyyx"), lambda: trainer_run("compute x.........x")),
    "DATA001": Example(lambda: data_quality_issues(("truncated", 0.3)), data_quality_issues),
    **{code: Example(fires, silent) for code, (fires, silent) in pipeline_examples.EXAMPLES.items()},
}
