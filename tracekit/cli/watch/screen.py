"""A watched training -> the live picture for a terminal, plain lines for a log, JSON for programs."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tracekit.cli.watch.training_state import EventKind, OutlierStep, StepEvent, Symptom, TrainingState
from tracekit.model import escaping, units
from tracekit.report import text_layout

SCHEMA = "tracekit.watch/2"
MAX_EVENTS = 10
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_MAX_RANKS_NAMED = 6
_MAX_LINE = 1000
_QUIET_S = 10.0
_WARNING, _ERROR = text_layout.SEVERITY_STYLES["warning"], text_layout.SEVERITY_STYLES["error"]


# For a terminal ------------------------------------------------------------------------------------------------------


def screen(picture: TrainingState, *, height: int) -> RenderableType:
    """Return the picture as something to print on a terminal, at most `height` lines where each fits its line."""
    rows = [(text_layout.line((label, text_layout.DIM)), content) for label, content in _facts(picture)]
    parts: list[RenderableType] = [_heading(picture), "", text_layout.grid(rows), ""]
    room = max(1, min(MAX_EVENTS, height - len(rows) - 5))
    return Group(*parts, *_outlier_rows(picture, room))


def as_text(picture: TrainingState, *, width: int, color: bool = False) -> str:
    """Return the picture as text at most `width` columns wide."""
    return text_layout.print_to_string([screen(picture, height=1000)], width=width, color=color)


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """Return a series as a row of bars, the smallest value the lowest; '' of fewer than two values.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    """
    if len(values) < 2:
        return ""
    count = min(width, len(values))
    ends = [round(place * len(values) / count) for place in range(count + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(ends)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def _heading(picture: TrainingState) -> Text:
    told = [picture.strategy or "", _count(picture.world_size, "rank", "ranks") if picture.world_size else ""]
    about = " · ".join(part for part in told if part)
    step = f"{picture.steps_done:,} steps done" if picture.steps_done else ""
    return text_layout.line((picture.name, text_layout.BOLD), f"  {about}  ", _state(picture), f"  {step}")


def _state(picture: TrainingState) -> tuple[str, str]:
    if picture.is_over:
        return "ended", text_layout.BOLD
    if not picture.steps_done:
        return "waiting for the first step", text_layout.BOLD
    quiet_s = picture.quiet_s or 0.0
    if len(picture.stalled_ranks) == picture.ranks_logging - picture.ranks_closed and quiet_s > _QUIET_S:
        return f"no rank has logged for {_age(quiet_s)}", _ERROR
    return "running", f"{text_layout.BOLD} {text_layout.GOOD}"


def _facts(picture: TrainingState) -> Iterator[tuple[str, Text]]:
    yield "step time", text_layout.line(" · ".join(_times(picture)) or "—")
    if picture.loss is not None:
        curve = sparkline(picture.loss_curve)
        bad = not math.isfinite(picture.loss)
        yield "loss", text_layout.line((f"{picture.loss:.4g}", _ERROR if bad else ""), f"  {curve}" if curve else "")
    if memory := list(_memory(picture)):
        yield "memory", text_layout.line(" · ".join(memory))
    if picture.custom_metrics:
        yield (
            "also",
            text_layout.line(" · ".join(f"{name} {value:.4g}" for name, value in picture.custom_metrics.items())),
        )
    yield "ranks", text_layout.line(*_ranks(picture))
    yield "saves", text_layout.line(_saves(picture))
    yield "profiled", text_layout.line(_windows(picture))
    if picture.bad_lines:
        yield "logs", text_layout.line((f"{picture.bad_lines:,} lines cannot be read and were left out", _WARNING))


def _times(picture: TrainingState) -> Iterator[str]:
    if picture.step_time_ns is not None:
        yield f"last {units.duration(picture.step_time_ns)}"
    if picture.median_step_ns is not None:
        spread = picture.spread_ratio or 0.0
        yield f"median {units.duration(picture.median_step_ns)} ± {100 * spread:.0f}%"
    if picture.tokens_per_s is not None:
        yield f"{picture.tokens_per_s:,.0f} tokens/s"
    if picture.data_wait_ratio is not None:
        yield f"{units.share(picture.data_wait_ratio)} waiting for data"
    if picture.skipped_updates:
        yield f"{picture.skipped_updates:,} updates skipped"


def _memory(picture: TrainingState) -> Iterator[str]:
    if picture.allocated_bytes is not None:
        yield f"allocated {units.size(picture.allocated_bytes)}"
    if picture.reserved_bytes is not None:
        yield f"reserved {units.size(picture.reserved_bytes)}"
    if picture.retries is not None:
        yield _count(picture.retries, "retry", "retries")
    if picture.device_allocs is not None:
        yield _count(picture.device_allocs, "device allocation", "device allocations")


def _ranks(picture: TrainingState) -> Iterator[str | tuple[str, str]]:
    if not picture.ranks_logging:
        yield "no metrics log yet"
        return
    known = max(picture.world_size or 0, picture.ranks_logging)
    yield f"{picture.ranks_logging:,} of {known:,}{'' if picture.is_over else ' logging'}"
    if 0 < picture.ranks_closed < picture.ranks_logging:
        yield f" · {picture.ranks_closed} ended"
    if picture.slowest_rank is not None:
        yield f" · rank {picture.slowest_rank} is {_count(picture.lag_steps, 'step', 'steps')} behind"
    if picture.stalled_ranks and len(picture.stalled_ranks) < picture.ranks_logging:
        longest = _age(max(picture.stalled_ranks.values()))
        yield f" · log of {_rank_names(sorted(picture.stalled_ranks))} stands still, for {longest}", _WARNING
    if picture.missing_ranks:
        yield f" · no log of {_rank_names(picture.missing_ranks)}"  # perhaps not asked for


def _saves(picture: TrainingState) -> str:
    save = picture.last_save
    if save is None:
        return "none"
    parts = [f"{units.duration(save.blocked_ns)} blocked"] if save.blocked_ns else []
    parts += [f"{units.duration(save.background_ns)} in the background"] if save.background_ns else []
    parts += [units.size(save.bytes)] if save.bytes else []
    return f"{picture.saves:,} · last {save.checkpoint}, {', '.join(parts)}"


def _windows(picture: TrainingState) -> str:
    if not picture.windows:
        return "no window yet"
    last = picture.windows[-1]
    end = last.first_step + max(0, last.steps - 1)
    steps = f"step {end:,}" if last.steps <= 1 else f"steps {last.first_step:,}–{end:,}"
    return f"{_count(len(picture.windows), 'window', 'windows')} · last: {steps}"


def _outlier_rows(picture: TrainingState, room: int) -> Iterator[RenderableType]:
    count = picture.outlier_count
    since = f" since step {picture.first_step_read:,}" if picture.first_step_read else ""
    if not count:
        yield text_layout.line((f"No step out of line{since}", text_layout.DIM))
        return
    shown = picture.outliers[-room:]
    more = f", the last {len(shown)}" if count > len(shown) else ""
    yield text_layout.line((f"Out of line {_count(count, 'time', 'times')}{since}{more}", text_layout.BOLD))
    yield text_layout.indented(text_layout.grid([_cells(found) for found in shown]))


def _cells(found: OutlierStep) -> list[RenderableType]:
    worst, against = _value_and_ratio(found)
    place = _ranks_affected(found).removeprefix("on ")
    return [
        text_layout.line((_steps(found), text_layout.BOLD)),
        *map(text_layout.line, (worst, against, place, _reasons(found))),
    ]


# In words ------------------------------------------------------------------------------------------------------------


def state_line(picture: TrainingState) -> str:
    """Return the picture as one line of a log."""
    parts = [f"step {picture.steps_done - 1:,}" if picture.steps_done else "no step yet", *_times(picture)]
    parts += [f"loss {picture.loss:.4g}"] if picture.loss is not None else []
    parts += _memory(picture)
    state, _ = _state(picture)
    parts += [state] if state not in ("running", "waiting for the first step") else []
    ranks = "".join(part if isinstance(part, str) else part[0] for part in _ranks(picture))
    parts += [ranks] if picture.stalled_ranks else []
    return escaping.inert(" · ".join(parts), _MAX_LINE)


def outlier_line(found: OutlierStep) -> str:
    """Return a step out of line as one line of a log."""
    told = f"out of line: {_steps(found)}: {_measure(found)}"
    told += f" {_ranks_affected(found)}" if _ranks_affected(found) else ""
    return escaping.inert(f"{told}: {_reasons(found)}", _MAX_LINE)


def _steps(found: OutlierStep) -> str:
    return f"step {found.step:,}" if found.step == found.last_step else f"steps {found.step:,}–{found.last_step:,}"


def _measure(found: OutlierStep) -> str:
    worst, against = _value_and_ratio(found)
    if found.symptom is not Symptom.SLOW:
        return f"{worst}, {against}" if against else worst
    longest = "" if found.step == found.last_step else "up to "
    return f"{longest}{worst}, {against} the usual {units.duration(found.median_ns or 0)}"


def _value_and_ratio(found: OutlierStep) -> tuple[str, str]:
    """Return what was out of line, and against what."""
    if found.symptom is Symptom.LOSS_NOT_FINITE:
        return "loss is not finite", ""
    if found.symptom is Symptom.LOSS_SPIKE:
        return f"loss {found.loss:.4g}", f"usually {found.median_loss:.4g}"
    time_ns = found.step_time_ns or 0
    return units.duration(time_ns), f"{time_ns / (found.median_ns or time_ns or 1):.1f}x"


def _ranks_affected(found: OutlierStep) -> str:
    if found.rank_count <= 1 or not found.ranks:
        return ""
    if len(found.ranks) >= found.rank_count:
        return f"on all {found.rank_count} ranks"
    return f"on {_rank_names(found.ranks)} of {found.rank_count}"


def _reasons(found: OutlierStep) -> str:
    return "; ".join(map(_reason, found.events)) or "nothing that was recorded coincides"


def _reason(coincidence: StepEvent) -> str:
    dur = units.duration(coincidence.dur_ns or 0)
    count = coincidence.count or 0
    match coincidence.kind:
        case EventKind.SAVE:
            return f"checkpoint {coincidence.name} blocked {dur}"
        case EventKind.BACKGROUND_SAVE:
            return f"checkpoint {coincidence.name} saved in the background, {dur}"
        case EventKind.PROFILED:
            return f"profiled, window {count}"
        case EventKind.TRACE_WRITTEN:
            return f"the trace of window {count} is being written"
        case EventKind.DATA_WAIT:
            return f"rank {coincidence.rank} waited {dur} for data"
        case EventKind.RETRIES:
            return _count(count, "allocator retry", "allocator retries")
        case EventKind.DEVICE_ALLOCS:
            return _count(count, "device allocation", "device allocations")
        case EventKind.SKIPPED:
            return "GradScaler skipped the update"
        case other:
            return other.value


def _rank_names(ranks: Sequence[int]) -> str:
    """Return which ranks: "rank 3", "ranks 0–2, 5", or how many where naming them would take the line."""
    told = units.ranges(ranks)
    if told.count(",") >= _MAX_RANKS_NAMED:
        told = ", ".join(told.split(", ")[:_MAX_RANKS_NAMED])
        return f"{len(ranks):,} ranks ({told}, …)"
    return f"rank {told}" if len(ranks) == 1 else f"ranks {told}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# For programs --------------------------------------------------------------------------------------------------------


def state_json(picture: TrainingState) -> str:
    """Return the picture as a line of JSON. What is not finite is null."""
    told = {"schema": SCHEMA, "kind": "state", **asdict(picture)}
    del told["loss_curve"]
    return _json(told)


def outlier_json(found: OutlierStep) -> str:
    """Return a step out of line as a line of JSON."""
    return _json({"schema": SCHEMA, "kind": "outlier", **asdict(found)})


def _json(told: Mapping[str, Any]) -> str:
    return json.dumps(_finite(told), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
