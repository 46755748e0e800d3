"""A table -> a Plotly figure. The one place for figures: dashboard, HTML report and notebooks show these.

Names come from traces and are not to be trusted: every string that reaches a figure goes through `markup.escape`,
because Plotly reads a subset of HTML in labels and hovers. Backgrounds are transparent and text has no colour of its
own, so that a figure fits a light page and a dark one.
"""

from tracekit.charts.bars import breakdown, comparison, step_times
from tracekit.charts.checkpoints import save_bandwidth, save_clocks, save_stages
from tracekit.charts.history import Level, Mark, Point, history
from tracekit.charts.memory import held, lifetimes, segment_map
from tracekit.charts.planning import LOST, REPEATED, SAVING, bubbles, lost_time, memory_by_strategy
from tracekit.charts.ranks import ranks
from tracekit.charts.style import COLOURS, CONFIG, KIND_LABELS, PALE, PARTS
from tracekit.charts.timeline import EVIDENCE_TRACK, MAX_SLICES, timeline

__all__ = [
    "COLOURS",
    "CONFIG",
    "EVIDENCE_TRACK",
    "KIND_LABELS",
    "LOST",
    "MAX_SLICES",
    "PALE",
    "PARTS",
    "REPEATED",
    "SAVING",
    "Level",
    "Mark",
    "Point",
    "breakdown",
    "bubbles",
    "comparison",
    "held",
    "history",
    "lifetimes",
    "lost_time",
    "memory_by_strategy",
    "ranks",
    "save_bandwidth",
    "save_clocks",
    "save_stages",
    "segment_map",
    "step_times",
    "timeline",
]
