"""The critical path of a step -> text or JSON: its owners, its parts, and the slack of everything else."""

import json
from collections.abc import Iterator

import polars as pl
from rich.console import RenderableType

from tracekit.model import units
from tracekit.replay.graph.critical_path.path import CriticalPath
from tracekit.report import text_layout

_HEADINGS = {"step_ratio": "share", "count": "parts", "slack_ns": "least\nslack", "state": "host\nstate"}
_OWNERS_DROPPED = ("state", "count", "unit", "dur_ns")
_SLACK_DROPPED = ("count", "unit", "module")


def as_json(path: CriticalPath, *, run: str) -> str:
    """Return the path as one JSON object: see docs/critical_path.md."""
    document = {
        "run": run,
        "window": path.window,
        "step": path.step,
        "rank": path.rank,
        "start_ns": path.start_ns,
        "step_ns": path.step_ns,
        "parts": path.parts.to_dicts(),
        "compact": path.compact.to_dicts(),
        "owners": path.shares.to_dicts(),
        "by_kind": path.shares_by("kind").to_dicts(),
        "by_rank": path.shares_by("rank").to_dicts(),
        "by_module": path.shares_by("module").to_dicts() if path.has_modules else [],
        "slack": path.slack.to_dicts(),
        "doubts": list(path.doubts),
    }
    return json.dumps(document, indent=2) + "\n"


def as_text(path: CriticalPath, *, run: str, top: int, width: int, color: bool = False) -> str:
    """Return the path as text: by rank and kind, the first `top` owners, and the work next to the path."""
    parts: list[RenderableType] = [text_layout.line(summary(path, run))]
    between = text_layout.gap(width)
    for title, table, dropped in _tables(path, top):
        columns = text_layout.fit_columns(table, _HEADINGS, dropped, width=width)
        parts += ["", text_layout.title(title), text_layout.frame(columns, _HEADINGS, gap=between)]
    rest = path.shares.slice(top)
    if rest.height:
        share = units.share(float(rest["step_ratio"].sum()))
        parts.insert(
            -3, text_layout.dim(f"and {rest.height:,} more owners, {share} together: --top {path.shares.height}")
        )
    parts += ["", *text_layout.bullets(path.doubts)] if path.doubts else []
    return text_layout.print_to_string(parts, width=width, color=color)


def summary(path: CriticalPath, run: str) -> str:
    """Return one sentence: which step of which rank, how long, and what owns most of it."""
    what = "the window" if path.step is None else f"step {path.step}"
    main = path.shares_by("rank", "kind").row(0, named=True)
    return (
        f"{run}: {what} takes {units.duration(path.step_ns)} on rank {path.rank}; "
        f"{units.share(main['step_ratio'])} of its critical path is {main['kind']} on rank {main['rank']}."
    )


def _tables(path: CriticalPath, top: int) -> Iterator[tuple[str, pl.DataFrame, tuple[str, ...]]]:
    order = ("step_ratio", "dur_ns", "rank", "kind")
    yield "By rank and kind", path.shares_by("rank", "kind").select(order), ()
    if path.has_modules:
        yield "By module", path.shares_by("module", "kind").head(top).select(*order[:2], "module", "kind"), ()
    columns = ("step_ratio", "dur_ns", "rank", "kind", "name", "unit", "state", "count")
    yield "Owners of the path", path.shares.head(top).select(columns), _OWNERS_DROPPED
    if path.slack.height:
        modules = ["module"] if path.slack["module"].count() else []
        near = path.slack.head(top).select("slack_ns", "dur_ns", "rank", "kind", "name", *modules, "unit", "count")
        yield "Not on the path, least slack first", near, _SLACK_DROPPED
