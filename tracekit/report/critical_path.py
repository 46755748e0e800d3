"""The critical path of a step as a document: its owners, its parts, and the slack of everything else."""

from collections.abc import Iterator

from tracekit.model import units
from tracekit.replay.graph.critical_path.path import CriticalPath
from tracekit.report.document import Document, Line, Section, Table, faint, heading, line

_HEADINGS = {"step_ratio": "share", "count": "parts", "slack_ns": "least\nslack", "state": "host\nstate"}
_OWNERS_DROPPED = ("state", "count", "unit", "dur_ns")
_SLACK_DROPPED = ("count", "unit", "module")


def document(path: CriticalPath, *, run: str, top: int) -> Document:
    """Owners by rank and kind, the first `top` owners, and the work next to the path: see docs/critical_path.md."""
    values = {
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
    return Document(([line(summary(path, run))], *_sections(path, top)), notes=path.doubts, values=values)


def summary(path: CriticalPath, run: str) -> str:
    """Return one sentence: which step of which rank, how long, and what owns most of it."""
    what = "the window" if path.step is None else f"step {path.step}"
    main = path.shares_by("rank", "kind").row(0, named=True)
    return (
        f"{run}: {what} takes {units.duration(path.step_ns)} on rank {path.rank}; "
        f"{units.share(main['step_ratio'])} of its critical path is {main['kind']} on rank {main['rank']}."
    )


def _sections(path: CriticalPath, top: int) -> Iterator[Section]:
    order = ("step_ratio", "dur_ns", "rank", "kind")
    yield [heading("By rank and kind"), Table(path.shares_by("rank", "kind").select(order), _HEADINGS)]
    if path.has_modules:
        by_module = path.shares_by("module", "kind").head(top).select(*order[:2], "module", "kind")
        yield [heading("By module"), Table(by_module, _HEADINGS)]
    owners = path.shares.head(top).select("step_ratio", "dur_ns", "rank", "kind", "name", "unit", "state", "count")
    yield [heading("Owners of the path"), Table(owners, _HEADINGS, _OWNERS_DROPPED), *_other_owners(path, top)]
    if path.slack.height:
        modules = ["module"] if path.slack["module"].count() else []
        near = path.slack.head(top).select("slack_ns", "dur_ns", "rank", "kind", "name", *modules, "unit", "count")
        yield [heading("Not on the path, least slack first"), Table(near, _HEADINGS, _SLACK_DROPPED)]


def _other_owners(path: CriticalPath, top: int) -> list[Line]:
    rest = path.shares.slice(top)
    if rest.is_empty():
        return []
    share = units.share(float(rest["step_ratio"].sum()))
    return [faint(f"and {rest.height:,} more owners, {share} together: --top {path.shares.height}")]
