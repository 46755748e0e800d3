"""Runs of one job on other numbers of GPUs or nodes, or with other batches: throughput, efficiency and what grew.

What a token costs in GPU time, ranks x step time / tokens of a step, is the measure: it is the same under perfect
scaling, whether the batch of the job (strong scaling) or that of a GPU (weak scaling) stays. Efficiency is the
reference's GPU time per token over the candidate's, so what grew in GPU time per token is what the efficiency lacks.
Step times would not do: under strong scaling a perfect step is shorter, so that a part which stayed as long has grown.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.parallelism import pipeline_communication, rank_places, time_by_part
from tracekit.analysis.parallelism.time_by_part import COMMUNICATION, PARTS, WAIT
from tracekit.errors import NotComparableError
from tracekit.model import environment, schema, units
from tracekit.model.fact import trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact
from tracekit.regression import baseline, metric_sources, significance, step_weights
from tracekit.regression.metrics import STEP_TIME, metric_of
from tracekit.regression.samples import Values
from tracekit.regression.significance import MetricSides
from tracekit.regression.thresholds import Change, Thresholds

MAX_TOKEN_SPREAD = 0.05
"""Batches of tokens that differ by less are the same: sequences of a job need not be equally long."""
_TOKEN_COLUMNS = schema.columns("step tokens gpu_tokens", tokens=pl.Float64, gpu_tokens=pl.Float64)
_MUST_AGREE = ("device", "device_name")
_SIZES = (
    "world_size", "mesh", "arguments.batch", "arguments.batch_size", "arguments.micro_batch_size",
    "arguments.global_batch_size", "arguments.local_batch_size", "arguments.micro_batches",
    "arguments.gradient_accumulation_steps",
)  # fmt: skip
_IN_STEP = ("window", "step")
_MAX_OPERATIONS_RATIO = 2.0
"""Models differ where one takes more operations per token: recomputation of a whole model adds a third."""
_MOST_RATIO = 0.5
"""An op is named for a change of exposed communication from this share of it on."""


@trace_fact
def step_tokens(trace: Trace) -> pl.DataFrame:
    """Tokens of each step by the metrics log: its throughput times its time. Columns step, tokens, gpu_tokens.

    tokens are those of all ranks, gpu_tokens their share of one; null where the log does not state it.
    """
    names = {conventions.TOKENS_METRIC: "tokens", conventions.TOKENS_PER_GPU_METRIC: "gpu_tokens"}
    logged = trace.metrics.filter(pl.col("name").is_in([*names, STEP_TIME]))
    of_name = [pl.col("value").filter(pl.col("name") == name).first().alias(column) for name, column in names.items()]
    time_s = pl.col("value").filter(pl.col("name") == STEP_TIME).first() / 1e9
    by_step = logged.group_by("step", maintain_order=True).agg(*of_name, time_s.alias("time_s"))
    return by_step.with_columns(pl.col(*names.values()) * pl.col("time_s")).pipe(schema.select, _TOKEN_COLUMNS)


SIZE_FACTS: tuple[TraceFact, ...] = (step_tokens, environment.versions, *rank_places.FACTS)
"""The facts that `RunSize` reads."""
FACTS: tuple[TraceFact, ...] = (
    *SIZE_FACTS, *baseline.WORK_FACTS, *time_by_part.FACTS, metric_sources.flop_samples,
)  # fmt: skip
"""The facts that `ScalingSide` reads."""


@dataclass(frozen=True)
class RunSize:
    """How large a job is."""

    gpus: int | None
    """Its ranks; None where neither the manifest nor the traces state them: some may not be recorded."""
    nodes: int | None
    tokens: float | None
    """Those of a step, of all ranks; None where no log states them."""

    @classmethod
    def of(cls, run: Run) -> "RunSize":
        """Return the size of a run; of nodes and tokens what is known."""
        gpus = _world_size(run)
        tokens = _logged_tokens(run, gpus)
        is_stated = environment.stated_rank_count(run) is not None
        median = None if tokens.is_empty() else float(np.median(tokens["work"]))
        return cls(gpus if is_stated else None, _nodes(run, gpus), median)

    def differs(self, other: "RunSize") -> bool:
        """Whether two runs differ in GPUs; where the tokens of a step are known, also in these or in nodes."""
        if self.gpus is not None and other.gpus is not None and self.gpus != other.gpus:
            return True
        if self.tokens is None or other.tokens is None:
            return False
        is_moved = self.nodes is not None and other.nodes is not None and self.nodes != other.nodes
        return is_moved or not _is_same(self.tokens, other.tokens)


class Scaling(StrEnum):
    """What stays the same while a job grows."""

    STRONG = "strong"
    """The batch of the job."""
    WEAK = "weak"
    """The batch of a GPU."""
    MIXED = "mixed"
    """Neither."""
    BATCH = "batch"
    """The number of GPUs: only the batch grows."""
    PLACES = "places"
    """GPUs and batch: they are on another number of nodes."""


class Work(StrEnum):
    """What the work of a step is counted in."""

    TOKENS = "token"
    FLOPS = "FLOP"


@dataclass(frozen=True, eq=False)
class ScaledRun:
    """One of the runs: its size, its typical step, and what each GPU does in it."""

    name: str
    gpus: int
    nodes: int | None
    step_work: float
    """Tokens, or floating-point operations, of a step of all ranks."""
    step_ns: float
    """Step time, as `compare` has it: the median over steps of the slowest rank's."""
    parts_ns: Mapping[str, float]
    """Time of each of PARTS in that step, the mean over ranks; they sum to it."""
    recorded_ranks: int
    times_ns: Values
    """Time of each step."""
    exposed_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Exposed time of collectives by op, without waits, the mean over steps and ranks; concurrent ones all count."""

    @property
    def work_per_second(self) -> float:
        """Throughput of all GPUs together."""
        return self.step_work * 1e9 / self.step_ns

    @property
    def gpu_ns_per_work(self) -> float:
        """GPU time that one token, or operation, takes."""
        return self.gpus * self.step_ns / self.step_work


@dataclass(frozen=True, eq=False)
class ScalingSide:
    """One run to compare: what it measured, and what must agree."""

    name: str
    fingerprint: Mapping[str, baseline.Plain]
    world_size: int
    by_work: Mapping[Work, ScaledRun]
    """Its step by each unit in which its work is known."""
    operator_calls: pl.DataFrame
    """Shares of the calls of a step by operator, as `baseline.work_shares` has them."""

    @classmethod
    def of(cls, run: Run, name: str = "") -> "ScalingSide":
        """Return a run under its own name or another. Raises NotComparableError where it marks no steps."""
        name, gpus = name or run.name, _world_size(run)
        steps = _steps(run, name)
        amounts = {Work.TOKENS: _logged_tokens(run, gpus), Work.FLOPS: _operations(run, gpus)}
        known = {work: table for work, table in amounts.items() if not table.is_empty()}
        by_work = {work: _run_with_work(run, name, steps, table) for work, table in known.items()}
        # Shapes change with the batch, names of operators only with the model.
        operator_calls = baseline.work_shares(run).filter(pl.col("kind") == baseline.CALLS)
        return cls(name, baseline.fingerprint(run), gpus, by_work, operator_calls)


@dataclass(frozen=True)
class Contribution:
    """What one part of the step adds to the time that the step lacks for perfect scaling."""

    part: str
    ideal_ns: float
    """Time that the reference spends on it for as much work per GPU."""
    step_ns: float
    """Time of the candidate's step."""
    lost_ratio: float
    """Share of the candidate's step by which it is longer: these sum to 1 - efficiency."""
    op: str = ""
    """Of exposed communication: the collective that grew by most of it, if one did."""

    @property
    def change_ns(self) -> float:
        """By how much it is longer."""
        return self.step_ns - self.ideal_ns


@dataclass(frozen=True, eq=False)
class ScalingStep:
    """A run compared with the reference run."""

    run: ScaledRun
    kind: Scaling
    gpus_ratio: float
    throughput_ratio: float
    efficiency: float
    """GPU time per token of the reference over that of this run: throughput ratio over that of GPUs."""
    low: float | None
    high: float | None
    """Its interval, at `CONFIDENCE`; None with too few steps."""
    ideal_step_ns: float
    """Step time at the reference's GPU time per token."""
    contributions: tuple[Contribution, ...]
    """Of each part that takes time in either run, the largest growth first; change_ns sums to what the step is longer
    than `ideal_step_ns`."""


@dataclass(frozen=True, eq=False)
class ScalingComparison:
    """Runs of one job of different size: the first is the reference of the others."""

    reference: ScaledRun
    steps: tuple[ScalingStep, ...]
    work: Work
    notes: tuple[str, ...]
    is_on_host: bool = False
    """Whether the ranks train on CPUs."""

    @property
    def runs(self) -> tuple[ScaledRun, ...]:
        """All runs, the reference first."""
        return (self.reference, *(step.run for step in self.steps))


def differ_in_size(runs: Sequence[Run]) -> bool:
    """Return whether runs differ in the number of GPUs or nodes, or in the tokens of a step, as far as is known."""
    first, *others = (RunSize.of(run) for run in runs)
    return any(size.differs(first) for size in others)


def has_efficiency(sides: Sequence[ScalingSide]) -> bool:
    """Whether all runs train one model, and the work of their steps can be counted in the same unit."""
    return _common_work(sides) is not None and not _model_differences(sides)


def compare_sizes(
    sides: Sequence[ScalingSide], *, allow_different: bool = False, thresholds: Thresholds | None = None
) -> ScalingComparison:
    """Compare runs of one job that differ in GPUs, nodes or batch, with the first one.

    Raises NotComparableError where devices differ, unless allowed, where models differ, whose tokens are other work,
    or where the work of a step is not known: neither tokens in the metrics log nor operations in the traces.
    """
    if models := _model_differences(sides):
        raise NotComparableError(
            f"{'; '.join(models)}; runs of different models have no scaling efficiency: pass --allow-different to "
            "compare the metrics of two runs"
        )
    notes = _differences(sides, allow_different=allow_different)
    work = _common_work(sides)
    without_tokens = [side.name for side in sides if Work.TOKENS not in side.by_work]
    if work is None:
        ranks = ", ".join(f"{side.world_size} in {side.name}" for side in sides)
        raise NotComparableError(
            f"world_size differs: {ranks}, and no log of {', '.join(without_tokens)} states the tokens of a step: "
            "record with Recorder.step(tokens=…) or --tokens-per-step; or pass --allow-different to compare the "
            "metrics of two runs"
        )
    if work is Work.FLOPS:
        notes.append(
            f"no log of {', '.join(without_tokens)} states the tokens of a step, so work is counted in floating-point "
            "operations, which recomputation adds to"
        )
    reference, *others = (side.by_work[work] for side in sides)
    notes += [
        f"{run.name}: {run.recorded_ranks} of {run.gpus} ranks are recorded, and count for all"
        for run in (reference, *others)
        if run.recorded_ranks < run.gpus
    ]
    steps = tuple(scaling_step(reference, other, thresholds) for other in others)
    return ScalingComparison(
        reference, steps, work, tuple(notes), is_on_host=sides[0].fingerprint.get("device") == "cpu"
    )


def scaling_step(reference: ScaledRun, run: ScaledRun, thresholds: Thresholds | None = None) -> ScalingStep:
    """Compare a run with the reference run."""
    efficiency = reference.gpu_ns_per_work / run.gpu_ns_per_work
    ideal_step_ns = run.step_ns * efficiency
    stretch = ideal_step_ns / reference.step_ns
    contributions = []
    for part, before_ns in reference.parts_ns.items():
        ideal_ns, now_ns = before_ns * stretch, run.parts_ns[part]
        if ideal_ns or now_ns:
            op = _grown_op(reference, run, stretch, now_ns - ideal_ns) if part == COMMUNICATION else ""
            contributions.append(Contribution(part, ideal_ns, now_ns, (now_ns - ideal_ns) / run.step_ns, op))
    contributions.sort(key=lambda contribution: -contribution.change_ns)
    low, high = _interval(reference, run, efficiency, thresholds or Thresholds())
    return ScalingStep(
        run,
        _kind(reference, run),
        run.gpus / reference.gpus,
        run.work_per_second / reference.work_per_second,
        efficiency,
        low,
        high,
        ideal_step_ns,
        tuple(contributions),
    )


def _grown_op(reference: ScaledRun, run: ScaledRun, stretch: float, change_ns: float) -> str:
    """The op whose exposed time changed by most of a change in its direction; '' where none did."""
    changes = {
        op: run.exposed_ns.get(op, 0.0) - stretch * reference.exposed_ns.get(op, 0.0)
        for op in sorted(reference.exposed_ns.keys() | run.exposed_ns.keys())
    }
    largest = max(changes, key=lambda op: changes[op] * change_ns, default="")
    is_most = bool(largest) and change_ns != 0 and changes[largest] / change_ns >= _MOST_RATIO
    return largest if is_most else ""


def _world_size(run: Run) -> int:
    return environment.stated_rank_count(run) or len(run.ranks)


def _nodes(run: Run, gpus: int) -> int | None:
    """Number of nodes of a job; where not all ranks are recorded, by the ranks of a node. None where not known."""
    hardware = run.manifest.get("hardware")
    node_size = hardware.get("gpus_per_node") if isinstance(hardware, Mapping) else None
    by_node = run.table(rank_places.nodes).group_by("node").len()["len"]
    if len(run.ranks) == gpus and not by_node.is_empty():
        return len(by_node)
    if not isinstance(node_size, int) or node_size < 1:
        node_size = int(str(by_node.max() or 0))
    if node_size:
        return -(-gpus // node_size)
    return 1 if len(run.ranks) == gpus and rank_places.share_node(run, run.ranks) else None


def _logged_tokens(run: Run, gpus: int) -> pl.DataFrame:
    """Tokens of each step that a rank logged: columns step, work."""
    tokens = pl.coalesce("tokens", pl.col("gpu_tokens") * gpus)
    by_step = run.table(step_tokens).group_by("step").agg(tokens.median().alias("work"))
    return by_step.filter(pl.col("work") > 0).sort("step")


def _is_same(a: float, b: float) -> bool:
    return abs(a - b) <= MAX_TOKEN_SPREAD * min(a, b)


def _differences(sides: Sequence[ScalingSide], *, allow_different: bool) -> list[str]:
    """Notes on what differs between the jobs, other than their size; raise where that makes speed incomparable."""
    first, *others = sides
    refused: list[str] = []
    notes: list[str] = []
    for other in others:
        a, b = first.fingerprint, other.fingerprint
        for field in sorted(a.keys() | b.keys()):
            if a.get(field) == b.get(field) or any(_is_of(field, size) for size in _SIZES):
                continue
            is_refused = field in a and field in b and any(_is_of(field, part) for part in _MUST_AGREE)
            (refused if is_refused else notes).append(_field_difference(field, first, other))
    if refused and not allow_different:
        raise NotComparableError(f"{'; '.join(refused)}; pass --allow-different to compare anyway")
    return refused + notes


def _model_differences(sides: Sequence[ScalingSide]) -> list[str]:
    """What says that a run trains another model than the first: its manifest, or else the work of its steps."""
    first, *others = sides
    differences: list[str] = []
    for other in others:
        a, b = first.fingerprint, other.fingerprint
        if all(any(_is_of(field, "model") for field in fields) for fields in (a, b)):
            differences += [_field_difference(field, first, other) for field in baseline.differing_model_fields(a, b)]
        elif operators := baseline.work_difference(first.operator_calls, other.operator_calls):
            differences.append(f"{first.name}, {other.name}: {operators}")
        elif differing := _differing_operations(first, other):
            differences.append(differing)
    return differences


def _differing_operations(first: ScalingSide, other: ScalingSide) -> str:
    """What says that the operations per token of two runs differ by more than recomputation; '' where not known."""
    runs = [side.by_work.get(work) for work in (Work.FLOPS, Work.TOKENS) for side in (first, other)]
    amounts = [run.step_work for run in runs if run is not None]
    if len(amounts) < len(runs):
        return ""
    per_token = [amounts[0] / amounts[2], amounts[1] / amounts[3]]
    if max(per_token) <= _MAX_OPERATIONS_RATIO * min(per_token):
        return ""
    a, b = map(units.operations, per_token)
    return f"FLOP per token differ: {a} in {first.name}, {b} in {other.name}"


def _field_difference(field: str, first: ScalingSide, other: ScalingSide) -> str:
    """What two runs state of a field that differs."""
    values = [f"{baseline.shown(side.fingerprint, field)} in {side.name}" for side in (first, other)]
    return f"{field} differs: {', '.join(values)}"


def _common_work(sides: Sequence[ScalingSide]) -> Work | None:
    return next((work for work in Work if all(work in side.by_work for side in sides)), None)


def _is_of(field: str, group: str) -> bool:
    return field == group or field.startswith(f"{group}.")


def _operations(run: Run, gpus: int) -> pl.DataFrame:
    """Floating-point operations of each step of all ranks: columns step, work."""
    mean = pl.col("value").mean() * gpus
    return run.table(metric_sources.flop_samples).group_by("step").agg(mean.alias("work")).filter(pl.col("work") > 0)


def _steps(run: Run, name: str) -> pl.DataFrame:
    """Steps of a run: columns window, step, time_ns (of the slowest rank), and of each part the mean over ranks."""
    rows = run.table(time_by_part.time_by_part).drop_nulls("step").filter(pl.col("duration_ns") > 0)
    if rows.is_empty():
        raise NotComparableError(
            f"{name} marks no steps; call profiler.step() after each optimizer step when recording"
        )
    # A rank that drives several devices is as slow as the slowest of them.
    slowest = rows.sort("duration_ns").group_by("window", "rank", "step", maintain_order=True).last()
    by_step = slowest.group_by(_IN_STEP).agg(
        pl.col("duration_ns").max().alias("time_ns"), pl.col(*(f"{part}_ns" for part in PARTS)).mean()
    )
    return by_step.sort(_IN_STEP)


def _run_with_work(run: Run, name: str, steps: pl.DataFrame, amounts: pl.DataFrame) -> ScaledRun:
    times_ns = steps["time_ns"].to_numpy().astype(np.float64)
    step_ns = _median(times_ns)
    weights = _weights(times_ns, step_ns)
    parts_ns = {part: float(weights @ steps[f"{part}_ns"].to_numpy()) for part in PARTS}
    # The steps of ranks begin and end at different times: what the slowest rank's step is longer than the mean.
    parts_ns[WAIT] += max(0.0, step_ns - sum(parts_ns.values()))
    gpus = _world_size(run)
    work = _step_work(steps, weights, amounts)
    nodes, exposed_ns = _nodes(run, gpus), _exposed_by_op(run)
    return ScaledRun(name, gpus, nodes, work, step_ns, parts_ns, len(run.ranks), times_ns, exposed_ns)


def _exposed_by_op(run: Run) -> dict[str, float]:
    calls = run.table(pipeline_communication.exposed_transfers).drop_nulls(["step", "op"])
    steps = max(1, calls.select(pl.struct("window", "rank", "step").n_unique()).item())
    return dict(calls.group_by("op").agg(pl.col("exposed_ns").sum() / steps).iter_rows())


def _median(times_ns: Values) -> float:
    """Step time as `significance` has it, which compares logarithms; in whole ns."""
    return float(round(np.exp(np.median(np.log(times_ns)))))


def _weights(times_ns: Values, step_ns: float) -> Values:
    """Weights of steps that sum to 1: only of the middle half, so that their weighted mean is the step time."""
    middle = step_weights.middle_steps(times_ns)
    weights = np.zeros(len(times_ns))
    weights[middle] = step_weights.tilted_weights(times_ns[middle], step_ns)
    return weights


def _step_work(by_step: pl.DataFrame, weights: Values, amounts: pl.DataFrame) -> float:
    """Work of the typical step; by the median of all logged steps where those of the trace are not in the log."""
    work = by_step.join(amounts, on="step", how="left", maintain_order="left")["work"]
    if work.null_count():
        return float(round(np.median(amounts["work"])))
    return float(round(weights @ work.to_numpy()))


def _interval(
    reference: ScaledRun, run: ScaledRun, efficiency: float, thresholds: Thresholds
) -> tuple[float | None, float | None]:
    """Interval of the efficiency by that of the change of the step time."""
    sides = MetricSides(metric_of(STEP_TIME), reference=[reference.times_ns], candidate=[run.times_ns])
    change: Change = significance.compare_metrics([sides], thresholds)[0]
    if change.change is None or change.low is None or change.high is None or change.low <= -1:
        return None, None
    scale = efficiency * (1 + change.change)
    return scale / (1 + change.high), scale / (1 + change.low)


def _kind(reference: ScaledRun, run: ScaledRun) -> Scaling:
    is_same_work = _is_same(reference.step_work, run.step_work)
    if reference.gpus == run.gpus:
        return Scaling.PLACES if is_same_work else Scaling.BATCH
    if is_same_work:
        return Scaling.STRONG
    is_weak = _is_same(reference.step_work / reference.gpus, run.step_work / run.gpus)
    return Scaling.WEAK if is_weak else Scaling.MIXED
