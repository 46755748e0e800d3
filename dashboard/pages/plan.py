"""Plan: calculators for checkpoint intervals, memory per rank and pipeline bubbles before a training run."""

from collections.abc import Callable, Sequence

import streamlit as st

from dashboard import opening, widgets
from dashboard.pages.page import TOOLS, Needs, Page
from dashboard.run_entry import RunEntry
from dashboard.run_store import tables
from dashboard.url_state import bind, bind_flag
from tracekit.errors import TracekitError
from tracekit.model import units
from tracekit.model.units import long_duration
from tracekit.plan import checkpoint, memory, models, pipeline
from tracekit.plan.checkpoint import CheckpointPlan, Layout, Storage
from tracekit.plan.models import Model
from tracekit.report import charts, checkpoint_plan
from tracekit.report.headlines import Headline

HOUR_S = 3600
INTERVALS_S = (60, 120, 300, 600, 900, 1800, HOUR_S, 2 * HOUR_S, 4 * HOUR_S, 8 * HOUR_S, 24 * HOUR_S)
FAILURES_S = tuple(hours * HOUR_S for hours in (0.5, 1, 2, 3.093, 6, 12, 24, 72, 168, 720))
RATES = sorted((*(base * 10.0**power for power in range(8, 13) for base in (1, 2, 5)), 273e9))
POWERS = tuple(2**power for power in range(13))
CURVE_S = tuple(30 * 1.12**n for n in range(72))
TOKENS = (*POWERS[9:], 8192, 16_384, 32_768)
CHUNKS, COUNTS = (2, 3, 4, 6, 8), POWERS[:11]
STRATEGIES = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FSDP (ZeRO-3)": 3}
NOT_SYNCED = "Not all of their files were synced, so this is the rate of the page cache; the storage may be slower."
DEVICE_GIB = (16, 24, 40, 48, 80, 96, 141, 192, 288)


def show(entry: RunEntry) -> None:
    """Let a person choose model and layout, and show the cost of checkpoints, memory and pipeline."""
    widgets.title("Plan", "computed by formulas before anything runs; docs/plan.md lists them")
    try:
        headline = st.container()
        model, layout = _choose()
        widgets.subheader("Checkpoints")
        plan, interval_s, mtbf_s = _checkpoints(model, layout, entry)
        with headline:
            about = f"A checkpoint of {model.name} takes {units.size(plan.checkpoint_bytes)}; "
            about += f"a save blocks training for {long_duration(plan.blocked_seconds)}"
            widgets.headline(Headline(checkpoint_plan.advice(plan, interval_s, mtbf_s), about))
        widgets.subheader("Memory per rank")
        _memory(model, layout)
        widgets.subheader("Pipeline")
        _pipeline(layout.pp)
    except TracekitError as error:
        widgets.problem(str(error))


def _choose() -> tuple[Model, Layout]:
    cells = st.columns(6)
    names, strategies = list(models.MODELS), list(STRATEGIES)
    model = models.find(cells[0].selectbox("Model", names, key=bind("plan-model", names, "70b")))
    tp = cells[1].select_slider("Tensor parallel", POWERS[:5], key=bind("plan-tp", POWERS[:5], 8))
    pp = cells[2].select_slider("Pipeline stages", POWERS[:8], key=bind("plan-pp", POWERS[:8], 4))
    dp = cells[3].select_slider("Data parallel", POWERS, key=bind("plan-dp", POWERS, 8))
    zero = STRATEGIES[cells[4].selectbox("Sharding", strategies, key=bind("plan-zero", strategies, "ZeRO-1"))]
    cells[5].metric("GPUs", f"{tp * pp * dp:,}")
    return model, Layout(tp, pp, dp, zero)


def _checkpoints(model: Model, layout: Layout, entry: RunEntry) -> tuple[CheckpointPlan, float, float]:
    """Return the plan, the interval between checkpoints and the mean time between failures in s."""
    inputs, results = st.columns([1, 2])
    with inputs:
        measured = _measured_rates(entry)
        write = _slider("Storage writes", RATES, 273e9, units.rate, key="plan-write", disabled=measured is not None)
        read = _slider("Storage reads", RATES, 1e12, units.rate, key="plan-read")
        with_buffer = st.toggle("Burst buffer before storage", key=bind_flag("plan-buffered"))
        burst = _slider("Burst buffer writes", RATES, 2e12, units.rate, key="plan-burst") if with_buffer else None
        interval_s = _slider("Checkpoint interval", INTERVALS_S, HOUR_S, long_duration, key="plan-interval")
        failures_s = _slider(
            "Mean time between failures", FAILURES_S, 3.093 * HOUR_S, long_duration, key="plan-failures"
        )
    plan = checkpoint.checkpoint(
        model.parameters,
        layout,
        Storage(measured[0] if measured else write, read, None, burst),
        interval_s=interval_s,
        mtbf_s=failures_s,
        bytes_per_param=(measured and measured[1]) or checkpoint.ADAM_BYTES_PER_PARAM,
    )
    with results:
        _numbers(plan)
        saving = [plan.blocked_seconds / interval for interval in CURVE_S]
        total = [1 - checkpoint.goodput_ratio(plan.blocked_seconds, at_s, failures_s) for at_s in CURVE_S]
        repeated = [lost - saved for lost, saved in zip(total, saving, strict=True)]
        lost = {charts.SAVING: saving, charts.REPEATED: repeated, charts.LOST: total}
        marks = {"chosen": interval_s, "best": plan.best_interval_seconds or interval_s}
        widgets.chart(charts.lost_time(CURVE_S, lost, marks=marks), key="plan-lost")
    return plan, interval_s, failures_s


def _measured_rates(entry: RunEntry) -> tuple[float, float | None] | None:
    """Return the write rate in bytes per second, and the bytes per parameter if known; None if nobody chose it."""
    if not st.toggle("As measured in the chosen run", key=bind_flag("plan-measured")):
        return None
    run = opening.open_run(entry)
    if run is None:
        return None
    try:
        measured = run.result_of(tables.planning_inputs)
    except TracekitError as error:
        widgets.problem(str(error))
        return None
    per_param = "" if measured.bytes_per_param is None else f", {measured.bytes_per_param:.3g} bytes per parameter"
    cached = "" if measured.is_durable else f". {NOT_SYNCED}"
    widgets.caption(
        f"{widgets.plain(entry.name)}: {units.rate(measured.write_bytes_per_second)} over {measured.ranks} ranks"
        f"{per_param}, medians of {measured.saves} saves, each blocking for {measured.blocked_seconds:.3g} s{cached}"
    )
    return measured.write_bytes_per_second, measured.bytes_per_param


def _numbers(plan: CheckpointPlan) -> None:
    restore = "" if plan.restore_seconds is None else long_duration(plan.restore_seconds)
    numbers = {
        "Size": units.size(plan.checkpoint_bytes),
        "Training blocked": long_duration(plan.blocked_seconds),
        "Overhead": f"{plan.overhead_ratio:.2%}",
        "Write rate per GPU": units.rate(plan.write_bytes_per_second_per_gpu),
        "Write rate per node": units.rate(plan.write_bytes_per_second_per_node),
        "Restore": restore,
        "Goodput": "" if plan.goodput_ratio is None else units.share(plan.goodput_ratio),
    }
    cells = [*st.columns(4), *st.columns(4)]
    for cell, (label, value) in zip(cells, numbers.items(), strict=False):
        cell.metric(label, value)
    drained = ""
    if plan.drain_seconds is not None:
        fits = "before the next save" if plan.drain_fits_interval else "NOT before the next save begins"
        drained = f" The burst buffer drains in {long_duration(plan.drain_seconds)}, {fits}."
    widgets.caption(
        f"{plan.writers:,} GPUs write; a restore reads {plan.restore_amplification:.3g} times the checkpoint size. "
        f"Overhead is at most 5% with an interval of {long_duration(plan.guided_interval_seconds)} or more.{drained}"
    )


def _memory(model: Model, layout: Layout) -> None:
    inputs, results = st.columns([1, 2])
    with inputs:
        sequence = st.select_slider("Sequence length, tokens", TOKENS, key=bind("plan-seq", TOKENS, 4096))
        batch = st.select_slider("Micro-batch size, sequences", POWERS[:7], key=bind("plan-batch", POWERS[:7], 1))
        recomputed = memory.RECOMPUTATIONS
        recomputation = st.selectbox("Recomputation", recomputed, key=bind("plan-recomputed", recomputed))
        with_sequence = st.toggle("Sequence parallel", key=bind_flag("plan-sp", default=True))
        device_gib = st.select_slider("Device memory, GiB", DEVICE_GIB, key=bind("plan-device", DEVICE_GIB, 80))
    work = memory.Workload(sequence, batch, layout.pp, recomputation, with_sequence)
    layouts = {name: Layout(layout.tp, layout.pp, layout.dp, zero) for name, zero in STRATEGIES.items()}
    plans = {name: memory.plan(model.parameters, split, model=model, work=work) for name, split in layouts.items()}
    plans["YaFSDP"] = memory.plan(model.parameters, layout, model=model, work=work, with_yafsdp=True)
    with results:
        widgets.chart(charts.memory_by_strategy(plans, device_bytes=device_gib * 2**30), key="plan-memory")
        widgets.caption(
            "One rank of the first pipeline stage, with mixed-precision Adam and flash attention. Fragmentation and "
            "the buffers of strategies other than YaFSDP are not included."
        )


def _pipeline(stages: int) -> None:
    inputs, results = st.columns([1, 2])
    with inputs:
        micro_batches = st.select_slider("Micro-batches per step", COUNTS, key=bind("plan-micro", COUNTS, 32))
        chunks = st.select_slider("Chunks per rank, interleaved", CHUNKS, key=bind("plan-chunks", CHUNKS, 2))
    schedules = {
        "1F1B": (pipeline.PLAIN, 1),
        f"interleaved, {chunks} chunks": (pipeline.INTERLEAVED, chunks),
        "ZB-H1": (pipeline.ZB_H1, 1),
        "ZB-H2": (pipeline.ZB_H2, 1),
    }
    with inputs:
        for name, (schedule, v) in schedules.items():
            plan = pipeline.plan(stages, micro_batches, schedule=schedule, chunks=v)
            widgets.caption(f"{name}: idle {units.share(plan.bubble_ratio)}, activations × {plan.activation_ratio:.3g}")
    ratios = {
        name: [pipeline.plan(stages, count, schedule=schedule, chunks=v).bubble_ratio for count in COUNTS]
        for name, (schedule, v) in schedules.items()
    }
    with results:
        widgets.chart(charts.bubbles(COUNTS, ratios, selected=micro_batches), key="plan-bubbles")


def _slider(
    label: str, values: Sequence[float], value: float, text: Callable[[float], str], *, key: str, disabled: bool = False
) -> float:
    return float(st.select_slider(label, values, format_func=text, key=bind(key, values, value), disabled=disabled))


PAGE = Page.described_by(__doc__, "plan", show, Needs.ENTRY, TOOLS)
