"""Bar charts made of characters, for comments on pull requests, logs and mails.

GitHub and GitLab show images only by URL, not as data, and a comment cannot carry a file. Both draw Mermaid, but its
`xychart-beta` draws the bars of two series over each other, and a mail shows its source. Text is the same everywhere.
"""

from collections.abc import Sequence

import polars as pl

from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.regression.comparison import Comparison
from tracekit.regression.metrics import metric_of
from tracekit.regression.thresholds import Change
from tracekit.report import rank_rows

WIDTH = 36
MAX_RANKS = 8
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_PARTS = {"compute_ns": "█", "exposed_communication_ns": "▓", "exposed_copy_ns": "▒", "idle_ns": "░"}
_LABELS = dict(zip(_PARTS, ("compute", "exposed communication", "copy", "idle"), strict=True))


def before_and_now(compared: Comparison) -> str:
    """Return two bars per time, before and now, on one scale; '' where no time is compared."""
    changes = [change for change in compared.changes if metric_of(change.metric).is_drawn]
    longest_ns = max((max(change.reference, change.candidate) for change in changes), default=0.0)
    if longest_ns <= 0:
        return ""
    width = max(len(metric_of(change.metric).label) for change in changes)
    return "\n".join(line for change in changes for line in _pair(change, longest_ns, width))


def by_rank(run: Run) -> str:
    """Return a bar per rank: its steps, divided into compute, exposed communication, copy and idle; '' without work.

    Where no trace marks steps, a bar is the profiled window.
    """
    ranks = breakdown.slowest_device_in_steps(run)
    ranks = ranks.filter(ranks["duration_ns"] > 0)
    if ranks.is_empty():
        return ""
    labels = dict.fromkeys(ranks["rank"], "") if ranks.height <= MAX_RANKS else rank_rows.notable(rank_rows.shares(run))
    rows = ranks.filter(pl.col("rank").is_in(list(labels))).to_dicts()
    names = [f"rank {row['rank']} {labels[row['rank']]}".rstrip() for row in rows]
    width = max(map(len, names))
    lines = [
        f"{name:<{width}} {_stacked_bar([row[part] / row['duration_ns'] for part in _PARTS])}"
        for name, row in zip(names, rows, strict=True)
    ]
    totals_ns = ranks.select(pl.col("duration_ns", *_PARTS).sum()).row(0, named=True)
    shares = {part: totals_ns[part] / totals_ns["duration_ns"] for part in _PARTS if totals_ns[part]}
    legend = "  ".join(f"{_PARTS[part]} {_LABELS[part]} {units.share(shares[part])}" for part in shares)
    more = [f"of {ranks.height:,} ranks"] if ranks.height > MAX_RANKS else []
    return "\n".join([*lines, *more, legend])


def _pair(change: Change, longest_ns: float, width: int) -> Sequence[str]:
    metric, before, now = metric_of(change.metric), change.reference, change.candidate
    return (
        f"{metric.label:<{width}}  before {_bar(before / longest_ns)} {metric.text(before)}",
        f"{'':<{width}}  now    {_bar(now / longest_ns)} {metric.text(now)}",
    )


def _bar(ratio: float) -> str:
    """Return a bar with a resolution of an eighth of a character.

    >>> _bar(0.5)
    '██████████████████'
    """
    full, eighths = divmod(round(8 * WIDTH * ratio), 8)
    return "█" * full + _EIGHTHS[eighths].strip() or "▏"


def _stacked_bar(ratios: Sequence[float]) -> str:
    """Return a bar in parts; each end is rounded separately, so that errors don't add up."""
    ends = [round(WIDTH * sum(ratios[: number + 1])) for number in range(len(ratios))]
    starts = [0, *ends[:-1]]
    letters = zip(_PARTS.values(), starts, ends, strict=True)
    return "".join(letter * max(end - start, 0) for letter, start, end in letters).ljust(WIDTH)
