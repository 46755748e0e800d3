"""Runs of one job of different size as a document: throughput, efficiency, and what the efficiency lacks."""

from collections.abc import Sequence

import polars as pl

from tracekit.model import escaping, units
from tracekit.regression.scaling import Contribution, ScaledRun, Scaling, ScalingComparison, ScalingStep, Work
from tracekit.report import query_rows
from tracekit.report.document import Cells, Document, Section, items, line
from tracekit.report.render.json import to_json_value

SCHEMA = "tracekit.scaling/1"
PART_LABELS = {
    "compute": "compute",
    "communication": "exposed communication",
    "wait": "waiting for ranks",
    "bubble": "pipeline bubbles",
    "launch": "launch gaps",
    "compile": "compilation",
    "garbage_collection": "garbage collection",
    "data": "waiting for data",
    "save": "saves",
    "copy": "exposed copies",
    "idle": "other idle time",
}
WARNING_RATIO = 0.1
"""Share of GPU time that is lost to scaling, from which on pages call it a warning: jobs rarely scale without any."""
_MAX_NAME = 40
_MAX_COLUMN = 14
_MIN_SHOWN_RATIO = 0.01
"""A sentence leaves out what adds less of the step; the table has it."""
_MOST_NAMED = 3
_MIN_ROW_RATIO = 0.0005
"""Parts that add less of the step to any run are one row."""
_REST, _WHOLE = "the rest", "step"
_DROP_ORDER = (8, 2, 3, 6, 9, 4)


def document(compared: ScalingComparison) -> Document:
    """A sentence per run and what it loses, the runs, the contributions of parts, and notes; for programs all in ns."""
    sentences = [part for step in compared.steps for part in (line(headline(step, compared)), *items([losses(step)]))]
    sections: tuple[Section, ...] = (sentences, [run_cells(compared)], [contribution_cells(compared)])
    return Document(sections, compared.notes, _values(compared))


def headline(step: ScalingStep, compared: ScalingComparison) -> str:
    """One sentence: throughput, GPUs and efficiency of a run against the reference."""
    reference, run = compared.reference, step.run
    name, reference_name = (escaping.inert(side.name, _MAX_NAME) for side in (run, reference))
    noun = device_noun(compared)
    verb, what = ("trains", "tokens") if compared.work is Work.TOKENS else ("computes", "FLOP")
    speed = f"{name} {verb} {step.throughput_ratio:.2f} times the {what} per second of {reference_name}"
    on = f"the same {noun}s" if step.gpus_ratio == 1 else f"{_times(step.gpus_ratio)} the {noun}s"
    interval = "" if step.low is None else f" ({_interval(step)})"
    return f"{speed} on {on}: efficiency {units.share(step.efficiency)}{interval}, {_kind(step, reference, noun)}"


def device_noun(compared: ScalingComparison) -> str:
    """What a rank trains on."""
    return "rank" if compared.is_on_host else "GPU"


def losses(step: ScalingStep) -> str:
    """One sentence: by how much the step is longer than under perfect scaling, and which parts grew."""
    lost_ns = step.run.step_ns - step.ideal_step_ns
    takes = f"Its step takes {units.duration(step.run.step_ns)}"
    more = "more" if lost_ns >= 0 else "less"
    amount = f"{units.duration(abs(lost_ns))} ({units.share(abs(lost_ns) / step.run.step_ns)})"
    whole = f"{takes}, {amount} {more} than with perfect scaling"
    by_size = sorted(step.contributions, key=lambda part: -abs(part.change_ns))
    named = [part for part in by_size if abs(part.lost_ratio) >= _MIN_SHOWN_RATIO][:_MOST_NAMED]
    if not named:
        return whole
    rest_ns = lost_ns - sum(part.change_ns for part in named)
    texts = [f"{PART_LABELS[part.part]} {_signed_duration(part.change_ns)}{_op(part)}" for part in named]
    if len(named) < len(by_size):
        texts.append(f"the rest {_signed_duration(rest_ns)}")
    return f"{whole}: {', '.join(texts)}"


def status(step: ScalingStep) -> str:
    """Colour of a run's headline: a warning from the loss on that is worth acting on."""
    return "warning" if 1 - step.efficiency >= WARNING_RATIO else "good"


def run_cells(compared: ScalingComparison) -> Cells:
    """One row per run: its size, step time, throughput of all GPUs and of one, efficiency, GPU time per token."""
    steps = {id(step.run): step for step in compared.steps}
    what, unit, factor = ("tokens", "token", 1.0) if compared.work is Work.TOKENS else ("FLOP", "GFLOP", 1e9)
    noun = device_noun(compared)
    header: tuple[str, ...] = ("", f"{noun}s", "nodes", f"{what}/step", "step", f"{what}/s", f"per {noun}")
    header = (*header, "efficiency", "interval", f"{noun} time/{unit}")
    rows = []
    for run in compared.runs:
        step = steps.get(id(run))
        rows.append(
            (
                escaping.inert(run.name, _MAX_NAME),
                f"{run.gpus:,}",
                "—" if run.nodes is None else f"{run.nodes:,}",
                _amount(run.step_work, compared.work),
                units.duration(run.step_ns),
                _amount(run.work_per_second, compared.work),
                _amount(run.work_per_second / run.gpus, compared.work),
                "reference" if step is None else units.share(step.efficiency),
                "—" if step is None or step.low is None else _interval(step),
                units.duration(run.gpu_ns_per_work * factor),
            )
        )
    return Cells(header, tuple(rows), tuple(range(1, len(header))), (), _DROP_ORDER)


def contribution_cells(compared: ScalingComparison) -> Cells:
    """One row per part: its time under perfect scaling and now, and what it adds to the step; several runs: only that.

    The last row is the whole step.
    """
    return _of_one(compared.steps[0]) if len(compared.steps) == 1 else _of_several(compared)


def as_table(compared: ScalingComparison) -> pl.DataFrame:
    """One row per run: size, throughput, efficiency, and in ns each part of the step and what it grew by."""
    return pl.DataFrame([_row(run, compared) for run in compared.runs], infer_schema_length=None)


def as_csv(compared: ScalingComparison) -> str:
    """Return `as_table` as CSV with a header."""
    return query_rows.as_csv(as_table(compared))


def _values(compared: ScalingComparison) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "work": compared.work.value,
        "runs": [to_json_value(_row(run, compared)) for run in compared.runs],
        "contributions": [
            {
                "run": step.run.name,
                "part": part.part,
                "ideal_ns": part.ideal_ns,
                "step_ns": part.step_ns,
                "change_ns": part.change_ns,
                "lost_ratio": part.lost_ratio,
                "op": part.op or None,
            }
            for step in compared.steps
            for part in step.contributions
        ],
        "notes": list(compared.notes),
    }


def _row(run: ScaledRun, compared: ScalingComparison) -> dict[str, object]:
    step = next((step for step in compared.steps if step.run is run), None)
    return {
        "run": run.name,
        "gpus": run.gpus,
        "nodes": run.nodes,
        f"step_{compared.work.value.lower()}s": run.step_work,
        "step_time_ns": run.step_ns,
        "per_second": run.work_per_second,
        "per_second_per_gpu": run.work_per_second / run.gpus,
        f"gpu_ns_per_{compared.work.value.lower()}": run.gpu_ns_per_work,
        "scaling": None if step is None else step.kind.value,
        "gpus_ratio": 1.0 if step is None else step.gpus_ratio,
        "throughput_ratio": 1.0 if step is None else step.throughput_ratio,
        "efficiency": 1.0 if step is None else step.efficiency,
        "efficiency_low": None if step is None else step.low,
        "efficiency_high": None if step is None else step.high,
        "ideal_step_ns": run.step_ns if step is None else step.ideal_step_ns,
        **{f"{part}_ns": time_ns for part, time_ns in run.parts_ns.items()},
    }


def _of_one(step: ScalingStep) -> Cells:
    rows = [
        (
            PART_LABELS.get(part.part, part.part),
            units.duration(part.ideal_ns),
            units.duration(part.step_ns),
            _signed_duration(part.change_ns),
            _signed_share(part.lost_ratio),
        )
        for part in (*_rows(step, _large_parts([step])), _whole(step))
    ]
    header = ("", "ideal", escaping.inert(step.run.name, _MAX_COLUMN), "change", "of step")
    return Cells(header, tuple(rows), (1, 2, 3, 4), drop_order=(1, 4, 2), cuts_first=False)


def _of_several(compared: ScalingComparison) -> Cells:
    large = _large_parts(compared.steps)
    by_run = [{part.part: part for part in (*_rows(step, large), _whole(step))} for step in compared.steps]
    names = [name for name in (*PART_LABELS, _REST, _WHOLE) if any(name in of_run for of_run in by_run)]
    rows = [(PART_LABELS.get(name, name), *(_change(of_run.get(name)) for of_run in by_run)) for name in names]
    header = ("above the ideal", *(escaping.inert(step.run.name, _MAX_COLUMN) for step in compared.steps))
    return Cells(
        header, tuple(rows), tuple(range(1, len(header))), drop_order=tuple(range(1, len(header) - 1)), cuts_first=False
    )


def _large_parts(steps: Sequence[ScalingStep]) -> set[str]:
    return {part.part for step in steps for part in step.contributions if abs(part.lost_ratio) >= _MIN_ROW_RATIO}


def _rows(step: ScalingStep, large: set[str]) -> list[Contribution]:
    """The contributions of large parts, and the sum of the others."""
    shown = [part for part in step.contributions if part.part in large]
    others = [part for part in step.contributions if part.part not in large]
    return [*shown, _sum(_REST, others)] if others else shown


def _whole(step: ScalingStep) -> Contribution:
    return _sum(_WHOLE, step.contributions)


def _sum(name: str, parts: Sequence[Contribution]) -> Contribution:
    return Contribution(
        name,
        sum(part.ideal_ns for part in parts),
        sum(part.step_ns for part in parts),
        sum(part.lost_ratio for part in parts),
    )


def _change(part: Contribution | None) -> str:
    return "—" if part is None else f"{_signed_duration(part.change_ns)} ({_signed_share(part.lost_ratio)})"


def _op(part: Contribution) -> str:
    return f" (mostly {part.op.replace('_', '-')})" if part.op else ""


def _interval(step: ScalingStep) -> str:
    return "—" if step.low is None or step.high is None else f"{100 * step.low:.0f} to {step.high:.0%}"


def _kind(step: ScalingStep, reference: ScaledRun, noun: str) -> str:
    run = step.run
    nodes = f"on {_nodes(run.nodes)} instead of {reference.nodes:,}" if run.nodes and reference.nodes else ""
    return {
        Scaling.STRONG: "strong scaling: the same batch for the job",
        Scaling.WEAK: f"weak scaling: the same batch per {noun}",
        Scaling.MIXED: f"{_times(run.step_work / reference.step_work)} the batch",
        Scaling.BATCH: f"{_times(run.step_work / reference.step_work)} the batch",
        Scaling.PLACES: f"the same batch {nodes}",
    }[step.kind]


def _nodes(count: int) -> str:
    return units.count(count, "node")


def _times(ratio: float) -> str:
    """A ratio in words.

    >>> _times(2.0), _times(0.375)
    ('2 times', '0.375 times')
    """
    return f"{float(f'{ratio:.3g}'):g} times"


def _amount(work: float, kind: Work) -> str:
    return f"{work:,.0f}" if kind is Work.TOKENS else units.operations(work)


def _signed_duration(change_ns: float) -> str:
    rounded = round(change_ns)
    return f"{'+' if rounded >= 0 else '-'}{units.duration(abs(rounded))}"


def _signed_share(ratio: float) -> str:
    # Adding 0 makes a share that rounds to nothing "+0.0", from whichever side it comes.
    return f"{round(100 * ratio, 1) + 0.0:+.1f}%"
