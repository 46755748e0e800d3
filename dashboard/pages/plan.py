"""Plan: checkpoints, memory and pipelines of a training that has not run yet, by sliders."""

from dataclasses import dataclass

import streamlit as st

from dashboard import widgets
from dashboard.run_catalog import RunEntry
from tracekit.analysis.checkpoint.planning_inputs import PlanningInputs, planning_inputs
from tracekit.errors import TracekitError
from tracekit.model import units
from tracekit.plan import checkpoint, memory, models, pipeline
from tracekit.plan.checkpoint import CheckpointPlan, Layout, Storage
from tracekit.plan.models import Model
from tracekit.report import charts

MINUTE_S, HOUR_S = 60, 3600
INTERVALS_S = (60, 120, 300, 600, 900, 1800, HOUR_S, 2 * HOUR_S, 4 * HOUR_S, 8 * HOUR_S, 24 * HOUR_S)
FAILURES_S = tuple(hours * HOUR_S for hours in (0.5, 1, 2, 3.093, 6, 12, 24, 72, 168, 720))
RATES = sorted((*(base * 10.0**power for power in range(8, 13) for base in (1, 2, 5)), 273e9))
POWERS = tuple(2**power for power in range(13))
CURVE_S = tuple(30 * 1.12**n for n in range(72))
TOKENS = (*POWERS[9:], 8192, 16_384, 32_768)
CHUNKS = (2, 3, 4, 6, 8)
STRATEGIES = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FSDP (ZeRO-3)": 3}
NOT_SYNCED = (
    "Not all of their files were synced: this is the rate at which the system took the bytes, storage may be slower."
)
DEVICE_GIB = (16, 24, 40, 48, 80, 96, 141, 192, 288)


@dataclass(frozen=True)
class Chosen:
    """The model and layout that all three parts are about."""

    model: Model
    layout: Layout


def page(entry: RunEntry) -> None:
    """Let a person choose model and layout, and show what checkpoints, memory and pipeline then cost."""
    st.html(
        '<div class="tk-title"><b>Plan</b><span>by formulas, before anything runs; docs/plan.md says which</span></div>'
    )
    try:
        chosen = _choose()
        st.subheader("Checkpoints")
        _checkpoints(chosen, entry)
        st.subheader("Memory of one rank")
        _memory(chosen)
        st.subheader("Pipeline")
        _pipeline(chosen)
    except TracekitError as error:
        widgets.problem(str(error))


def _choose() -> Chosen:
    columns = st.columns(6)
    names = list(models.MODELS)
    with columns[0]:
        model = models.find(st.selectbox("Model", names, key=widgets.bind("plan-model", names, "70b")))
    with columns[1]:
        tp = st.select_slider("Tensor parallel", POWERS[:5], key=widgets.bind("plan-tp", POWERS[:5], 8))
    with columns[2]:
        pp = st.select_slider("Pipeline stages", POWERS[:8], key=widgets.bind("plan-pp", POWERS[:8], 4))
    with columns[3]:
        dp = st.select_slider("Data parallel", POWERS, key=widgets.bind("plan-dp", POWERS, 8))
    with columns[4]:
        strategies = list(STRATEGIES)
        zero = STRATEGIES[st.selectbox("Sharding", strategies, key=widgets.bind("plan-zero", strategies, "ZeRO-1"))]
    with columns[5]:
        st.metric("GPUs", f"{tp * pp * dp:,}")
    return Chosen(model, Layout(tp, pp, dp, zero))


def _checkpoints(chosen: Chosen, entry: RunEntry) -> None:
    left, right = st.columns([1, 2])
    with left:
        measured = _measured(entry)
        write = _rate("Storage writes", 273e9, key="plan-write", disabled=measured is not None)
        read = _rate("Storage reads", 1e12, key="plan-read")
        with_buffer = st.toggle("Burst buffer before storage", key=widgets.bind_flag("plan-buffered"))
        burst = _rate("Burst buffer writes", 2e12, key="plan-burst") if with_buffer else None
        interval_s = _time("A checkpoint every", INTERVALS_S, HOUR_S, key="plan-interval")
        failures_s = _time("A failure every", FAILURES_S, 3.093 * HOUR_S, key="plan-failures")
    told = checkpoint.checkpoint(
        chosen.model.parameters,
        chosen.layout,
        Storage(measured.write_bytes_per_second if measured else write, read, None, burst),
        interval_s=interval_s,
        mtbf_s=failures_s,
        bytes_per_param=(measured and measured.bytes_per_param) or checkpoint.ADAM_BYTES_PER_PARAM,
    )
    with right:
        _numbers(told)
        saving = [told.blocked_seconds / interval for interval in CURVE_S]
        repeated = [interval / (2 * failures_s) for interval in CURVE_S]
        lost = {
            charts.SAVING: saving,
            charts.REPEATED: repeated,
            charts.LOST: [one + other for one, other in zip(saving, repeated, strict=True)],
        }
        marks = {"chosen": interval_s, "best (Daly)": told.daly_interval_seconds or interval_s}
        widgets.chart(charts.lost_time(CURVE_S, lost, marks=marks), key="plan-lost")


def _measured(entry: RunEntry) -> PlanningInputs | None:
    if not st.toggle("As the chosen run measured it", key=widgets.bind_flag("plan-measured")):
        return None
    held = widgets.open_or_say(entry)
    if held is None:
        return None
    try:
        with held.lock:
            found = planning_inputs(held.run)
    except TracekitError as error:
        widgets.problem(str(error))
        return None
    per_param = "" if found.bytes_per_param is None else f", {found.bytes_per_param:.3g} bytes per parameter"
    cached = "" if found.is_durable else f". {NOT_SYNCED}"
    st.caption(
        f"{widgets.plain(entry.name)}: {units.rate(found.write_bytes_per_second)} by {found.ranks} ranks{per_param}, "
        f"medians of {found.saves} saves, each blocking for {found.blocked_seconds:.3g} s{cached}"
    )
    return found


def _numbers(told: CheckpointPlan) -> None:
    restore = "" if told.restore_seconds is None else _duration(told.restore_seconds)
    shown = {
        "Size": units.size(told.checkpoint_bytes),
        "Training blocked": _duration(told.blocked_seconds),
        "Overhead": f"{told.overhead_ratio:.2%}",
        "Each of the writers": units.rate(told.write_bytes_per_second_per_gpu),
        "Each node": units.rate(told.write_bytes_per_second_per_node),
        "Restore": restore,
        "Goodput": "" if told.goodput_ratio is None else units.share(told.goodput_ratio),
    }
    cells = [*st.columns(4), *st.columns(4)]
    for cell, (label, value) in zip(cells, shown.items(), strict=False):
        cell.metric(label, value)
    drained = ""
    if told.drain_seconds is not None:
        fits = "before the next save" if told.drain_fits_interval else "NOT before the next save begins"
        drained = f" The burst buffer is drained in {_duration(told.drain_seconds)}, {fits}."
    st.caption(
        f"{told.writers:,} GPUs write; a restore reads {told.restore_amplification:.3g} times what was saved. "
        f"At most 5% overhead: every {_duration(told.guided_interval_seconds)} or more.{drained}"
    )


def _memory(chosen: Chosen) -> None:
    left, right = st.columns([1, 2])
    with left:
        sequence = st.select_slider("Tokens of a sequence", TOKENS, key=widgets.bind("plan-seq", TOKENS, 4096))
        batch = st.select_slider(
            "Sequences of a micro-batch", POWERS[:7], key=widgets.bind("plan-batch", POWERS[:7], 1)
        )
        recomputed = memory.RECOMPUTATIONS
        recomputation = st.selectbox("Recomputed", recomputed, key=widgets.bind("plan-recomputed", recomputed))
        with_sequence = st.toggle("Sequence parallel", key=widgets.bind_flag("plan-sp", default=True))
        device_key = widgets.bind("plan-device", DEVICE_GIB, 80)
        device_gib = st.select_slider("Memory of a device, GiB", DEVICE_GIB, key=device_key)
    layout = chosen.layout
    work = memory.Workload(sequence, batch, layout.pp, recomputation, with_sequence)
    plans = {
        name: memory.plan(
            chosen.model.parameters, Layout(layout.tp, layout.pp, layout.dp, zero), model=chosen.model, work=work
        )
        for name, zero in STRATEGIES.items()
    }
    plans["YaFSDP"] = memory.plan(chosen.model.parameters, layout, model=chosen.model, work=work, with_yafsdp=True)
    with right:
        widgets.chart(charts.memory_by_strategy(plans, device_bytes=device_gib * 2**30), key="plan-memory")
        st.caption(
            "The first pipeline stage, mixed-precision Adam, flash attention. Buffers of strategies other than YaFSDP, "
            "and fragmentation, are not in it."
        )


def _pipeline(chosen: Chosen) -> None:
    left, right = st.columns([1, 2])
    stages = chosen.layout.pp
    with left:
        micro_key, chunks_key = widgets.bind("plan-micro", POWERS[:11], 32), widgets.bind("plan-chunks", CHUNKS, 2)
        micro_batches = st.select_slider("Micro-batches of a step", POWERS[:11], key=micro_key)
        chunks = st.select_slider("Chunks of a rank, interleaved", CHUNKS, key=chunks_key)
    schedules = {
        "1F1B": (pipeline.PLAIN, 1),
        f"interleaved, {chunks} chunks": (pipeline.INTERLEAVED, chunks),
        "ZB-H1": (pipeline.ZB_H1, 1),
        "ZB-H2": (pipeline.ZB_H2, 1),
    }
    plans = {name: pipeline.plan(stages, micro_batches, schedule=of, chunks=v) for name, (of, v) in schedules.items()}
    with left:
        rows = "  \n".join(
            f"{name}: idle {units.share(plan.bubble_ratio)}, activations × {plan.activation_ratio:.3g}"
            for name, plan in plans.items()
        )
        st.caption(rows)
    ratios = {
        name: [pipeline.plan(stages, count, schedule=of, chunks=v).bubble_ratio for count in POWERS[:11]]
        for name, (of, v) in schedules.items()
    }
    with right:
        widgets.chart(charts.bubbles(POWERS[:11], ratios, chosen=micro_batches), key="plan-bubbles")


def _rate(label: str, value: float, *, key: str, disabled: bool = False) -> float:
    bound = widgets.bind(key, RATES, value)
    return float(st.select_slider(label, RATES, format_func=units.rate, key=bound, disabled=disabled))


def _time(label: str, values: tuple[float, ...], value: float, *, key: str) -> float:
    return float(st.select_slider(label, values, format_func=_duration, key=widgets.bind(key, values, value)))


def _duration(seconds: float) -> str:
    """Return a time as people plan with it.

    >>> _duration(50.55), _duration(900), _duration(11134.8)
    ('50.5 s', '15 min', '3.09 h')
    """
    if seconds < 2 * MINUTE_S:
        return units.duration(seconds * 1e9)
    if seconds < HOUR_S:
        return f"{seconds / MINUTE_S:.3g} min"
    return f"{seconds / HOUR_S:.3g} h" if seconds < 48 * HOUR_S else f"{seconds / HOUR_S / 24:.3g} days"
