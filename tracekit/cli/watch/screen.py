"""The state of a training as a live display for a terminal, lines for a log, or JSON for programs."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from rich.console import Group, RenderableType

from tracekit.cli.watch.training_state import EventKind, OutlierStep, StepEvent, Symptom, TrainingState
from tracekit.model import escaping, units
from tracekit.report.document import Definitions, Document, Emphasis, Line, Section, Words, faint, heading, line
from tracekit.report.render import text as render_text
from tracekit.report.render.cells import sparkline
from tracekit.report.render.json import to_json_value

SCHEMA = "tracekit.watch/2"
MAX_EVENTS = 10
_SPARK_WIDTH = 40
_MAX_RANKS_NAMED = 6
_MAX_LINE = 1000
_TABLE_WIDTH = 60
"""Tables are laid out for this width: the terminal may be narrower, and then cuts them."""
_QUIET_S = 10.0


# For a terminal ------------------------------------------------------------------------------------------------------


def screen(state: TrainingState, *, height: int) -> RenderableType:
    """Return the state for a terminal, at most `height` lines if no line wraps."""
    return Group(*render_text.renderables(_document(state, height), _TABLE_WIDTH))


def as_text(state: TrainingState, *, width: int, color: bool = False) -> str:
    """Return the state as text at most `width` columns wide."""
    return render_text.render(_document(state, 1000), width=width, color=color)


def loss_curve(values: Sequence[float]) -> str:
    """A series as a line of at most _SPARK_WIDTH bars, each the mean of its part; '' for fewer than two values."""
    if len(values) < 2:
        return ""
    count = min(_SPARK_WIDTH, len(values))
    ends = [round(place * len(values) / count) for place in range(count + 1)]
    return sparkline([math.fsum(values[a:b]) / (b - a) for a, b in pairwise(ends)])


def _document(state: TrainingState, height: int) -> Document:
    parts = [state.strategy or "", _count(state.world_size, "rank", "ranks") if state.world_size else ""]
    about = " · ".join(part for part in parts if part)
    step = f"{state.steps_done:,} steps done" if state.steps_done else ""
    first = line((state.name, Emphasis.STRONG), f"  {about}  ", _state(state), f"  {step}")
    facts = tuple((faint(label), content) for label, content in _facts(state))
    room = max(1, min(MAX_EVENTS, height - len(facts) - 5))
    return Document(([first], [Definitions(facts)], _outlier_parts(state, room)))


def _state(state: TrainingState) -> tuple[str, Emphasis]:
    if state.is_over:
        return "ended", Emphasis.STRONG
    if not state.steps_done:
        return "waiting for the first step", Emphasis.STRONG
    quiet_s = state.quiet_s or 0.0
    if len(state.stalled_ranks) == state.ranks_logging - state.ranks_closed and quiet_s > _QUIET_S:
        return f"no rank has logged for {_age(quiet_s)}", Emphasis.WORSE
    return "running", Emphasis.BETTER


def _facts(state: TrainingState) -> Iterator[tuple[str, Line]]:
    yield "step time", line(" · ".join(_times(state)) or "—")
    if state.loss is not None:
        curve = loss_curve(state.loss_curve)
        text, bad = f"{state.loss:.4g}", not math.isfinite(state.loss)
        yield "loss", line((text, Emphasis.WORSE) if bad else text, f"  {curve}" if curve else "")
    if memory := list(_memory(state)):
        yield "memory", line(" · ".join(memory))
    if state.custom_metrics:
        yield ("custom", line(" · ".join(f"{name} {value:.4g}" for name, value in state.custom_metrics.items())))
    yield "ranks", line(*_ranks(state))
    yield "saves", line(_saves(state))
    yield "profiled", line(_windows(state))
    if state.bad_lines:
        yield "logs", line((f"{state.bad_lines:,} damaged lines were skipped", Emphasis.WARNING))


def _times(state: TrainingState) -> Iterator[str]:
    if state.step_time_ns is not None:
        yield f"last {units.duration(state.step_time_ns)}"
    if state.median_step_ns is not None:
        spread = state.spread_ratio or 0.0
        yield f"median {units.duration(state.median_step_ns)} ± {100 * spread:.0f}%"
    if state.tokens_per_s is not None:
        yield f"{state.tokens_per_s:,.0f} tokens/s"
    if state.data_wait_ratio is not None:
        yield f"{units.share(state.data_wait_ratio)} waiting for data"
    if state.skipped_updates:
        yield f"{state.skipped_updates:,} updates skipped"


def _memory(state: TrainingState) -> Iterator[str]:
    if state.allocated_bytes is not None:
        yield f"allocated {units.size(state.allocated_bytes)}"
    if state.reserved_bytes is not None:
        yield f"reserved {units.size(state.reserved_bytes)}"
    if state.retries is not None:
        yield _count(state.retries, "retry", "retries")
    if state.device_allocs is not None:
        yield _count(state.device_allocs, "device allocation", "device allocations")


def _ranks(state: TrainingState) -> Iterator[Words]:
    if not state.ranks_logging:
        yield "no metrics log yet"
        return
    rank_count = max(state.world_size or 0, state.ranks_logging)
    yield f"{state.ranks_logging:,} of {rank_count:,}{'' if state.is_over else ' logging'}"
    if 0 < state.ranks_closed < state.ranks_logging:
        yield f" · {state.ranks_closed} ended"
    if state.slowest_rank is not None:
        yield f" · rank {state.slowest_rank} is {_count(state.lag_steps, 'step', 'steps')} behind"
    if state.stalled_ranks and len(state.stalled_ranks) < state.ranks_logging:
        longest = _age(max(state.stalled_ranks.values()))
        yield f" · log of {_rank_names(sorted(state.stalled_ranks))} stalled for {longest}", Emphasis.WARNING
    if state.missing_ranks:
        yield f" · no log of {_rank_names(state.missing_ranks)}"  # perhaps the recorder does not record them


def _saves(state: TrainingState) -> str:
    save = state.last_save
    if save is None:
        return "none"
    parts = [f"{units.duration(save.blocked_ns)} blocked"] if save.blocked_ns else []
    parts += [f"{units.duration(save.background_ns)} in the background"] if save.background_ns else []
    parts += [units.size(save.bytes)] if save.bytes else []
    return f"{state.saves:,} · last {save.checkpoint}, {', '.join(parts)}"


def _windows(state: TrainingState) -> str:
    if not state.windows:
        return "no window yet"
    last = state.windows[-1]
    end = last.first_step + max(0, last.steps - 1)
    steps = f"step {end:,}" if last.steps <= 1 else f"steps {last.first_step:,}–{end:,}"
    reason = f", {last.outlier.in_words}" if last.outlier is not None else ""
    return f"{_count(len(state.windows), 'window', 'windows')} · last: {steps}{reason}"


def _outlier_parts(state: TrainingState, room: int) -> Section:
    count = state.outlier_count
    since = f" since step {state.first_step_read:,}" if state.first_step_read else ""
    if not count:
        return [faint(f"No outlier steps{since}")]
    latest = state.outliers[-room:]
    more = f", last {len(latest)} shown" if count > len(latest) else ""
    rows = []
    for outlier in latest:
        value, ratio = _value_and_ratio(outlier)
        place = _ranks_affected(outlier).removeprefix("on ")
        rows.append((heading(_steps(outlier)), *map(line, (value, ratio, place, _reasons(outlier)))))
    return [heading(f"{_count(count, 'outlier', 'outliers')}{since}{more}"), Definitions(tuple(rows), indent=2)]


# In words ------------------------------------------------------------------------------------------------------------


def state_line(state: TrainingState) -> str:
    """Return the state as one line of a log."""
    parts = [f"step {state.steps_done - 1:,}" if state.steps_done else "no step yet", *_times(state)]
    parts += [f"loss {state.loss:.4g}"] if state.loss is not None else []
    parts += _memory(state)
    status, _ = _state(state)
    parts += [status] if status not in ("running", "waiting for the first step") else []
    ranks = "".join(part if isinstance(part, str) else part[0] for part in _ranks(state))
    parts += [ranks] if state.stalled_ranks else []
    return escaping.inert(" · ".join(parts), _MAX_LINE)


def outlier_line(outlier: OutlierStep) -> str:
    """Return an outlier step as one line of a log."""
    text = f"outlier: {_steps(outlier)}: {_measure(outlier)}"
    text += f" {_ranks_affected(outlier)}" if _ranks_affected(outlier) else ""
    return escaping.inert(f"{text}: {_reasons(outlier)}", _MAX_LINE)


def _steps(outlier: OutlierStep) -> str:
    return (
        f"step {outlier.step:,}"
        if outlier.step == outlier.last_step
        else f"steps {outlier.step:,}–{outlier.last_step:,}"
    )


def _measure(outlier: OutlierStep) -> str:
    value, ratio = _value_and_ratio(outlier)
    if outlier.symptom is not Symptom.SLOW:
        return f"{value}, {ratio}" if ratio else value
    longest = "" if outlier.step == outlier.last_step else "up to "
    return f"{longest}{value}, {ratio} the median {units.duration(outlier.median_ns or 0)}"


def _value_and_ratio(outlier: OutlierStep) -> tuple[str, str]:
    """Return the outlier value, and its ratio to the median or the median itself."""
    if outlier.symptom is Symptom.LOSS_NOT_FINITE:
        return "loss is not finite", ""
    if outlier.symptom is Symptom.LOSS_SPIKE:
        return f"loss {outlier.loss:.4g}", f"median {outlier.median_loss:.4g}"
    time_ns = outlier.step_time_ns or 0
    return units.duration(time_ns), f"{time_ns / (outlier.median_ns or time_ns or 1):.1f}x"


def _ranks_affected(outlier: OutlierStep) -> str:
    if outlier.rank_count <= 1 or not outlier.ranks:
        return ""
    if len(outlier.ranks) >= outlier.rank_count:
        return f"on all {outlier.rank_count} ranks"
    return f"on {_rank_names(outlier.ranks)} of {outlier.rank_count}"


def _reasons(outlier: OutlierStep) -> str:
    return "; ".join(map(_reason, outlier.events)) or "no event recorded"


def _reason(step_event: StepEvent) -> str:
    dur = units.duration(step_event.dur_ns or 0)
    count = step_event.count or 0
    match step_event.kind:
        case EventKind.SAVE:
            return f"checkpoint {step_event.name} blocked {dur}"
        case EventKind.BACKGROUND_SAVE:
            return f"checkpoint {step_event.name} saved in the background, {dur}"
        case EventKind.PROFILED:
            return f"profiled, window {count}"
        case EventKind.TRACE_WRITTEN:
            return f"the trace of window {count} is being written"
        case EventKind.DATA_WAIT:
            return f"rank {step_event.rank} waited {dur} for data"
        case EventKind.LATE_RANK:
            return f"the others waited {dur} for rank {step_event.rank}"
        case EventKind.RETRIES:
            return _count(count, "allocator retry", "allocator retries")
        case EventKind.DEVICE_ALLOCS:
            return _count(count, "device allocation", "device allocations")
        case EventKind.SKIPPED:
            return "GradScaler skipped the update"
        case other:
            return other.value


def _rank_names(ranks: Sequence[int]) -> str:
    """Return the names of ranks: "rank 3", "ranks 0–2, 5"; for a long list, how many and the first ones."""
    text = units.ranges(ranks)
    if text.count(",") >= _MAX_RANKS_NAMED:
        text = ", ".join(text.split(", ")[:_MAX_RANKS_NAMED])
        return f"{len(ranks):,} ranks ({text}, …)"
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number:,} {singular if number == 1 else plural}"


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# For programs --------------------------------------------------------------------------------------------------------


def state_json(state: TrainingState) -> str:
    """Return the state as a line of JSON. Values that are not finite are null."""
    document = {"schema": SCHEMA, "kind": "state", **msgspec.to_builtins(state)}
    del document["loss_curve"]
    return _json(document)


def outlier_json(outlier: OutlierStep) -> str:
    """Return an outlier step as a line of JSON."""
    return _json({"schema": SCHEMA, "kind": "outlier", **msgspec.to_builtins(outlier)})


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(to_json_value(document), allow_nan=False) + "\n"
