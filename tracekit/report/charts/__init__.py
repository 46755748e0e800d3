"""A table -> a Plotly figure. The one place for figures: dashboard, HTML report and notebooks show these.

Names come from traces and are not to be trusted: every string that reaches a figure goes through `markup.escape`,
because Plotly reads a subset of HTML in labels and hovers. Backgrounds are transparent and text has no colour of its
own, so that a figure fits a light page and a dark one.
"""

from tracekit.report.charts.allocator_replay import reserved
from tracekit.report.charts.bars import breakdown, comparison, step_times
from tracekit.report.charts.checkpoints import save_bandwidth, save_clocks, save_stages
from tracekit.report.charts.contention import give_way, shared, slowdowns
from tracekit.report.charts.memory import held, lifetimes, segment_map
from tracekit.report.charts.metric_history import Level, Mark, Point, history
from tracekit.report.charts.planning import LOST, REPEATED, SAVING, bubbles, lost_time, memory_by_strategy
from tracekit.report.charts.rank_heatmap import MEASURES, spread
from tracekit.report.charts.rank_timelines import ranks
from tracekit.report.charts.stalls import communication, standing, waits
from tracekit.report.charts.style import CAUSES, COLOURS, CONFIG, KIND_LABELS, PALE, PARTS
from tracekit.report.charts.top_work import tops
from tracekit.report.charts.trace_slices import EVIDENCE_TRACK, MAX_SLICES, timeline
from tracekit.report.charts.traffic import ALGORITHM, BUS, bandwidth
from tracekit.report.charts.what_if import saved_by_rank, savings

__all__ = [
    "ALGORITHM",
    "BUS",
    "CAUSES",
    "COLOURS",
    "CONFIG",
    "EVIDENCE_TRACK",
    "KIND_LABELS",
    "LOST",
    "MAX_SLICES",
    "MEASURES",
    "PALE",
    "PARTS",
    "REPEATED",
    "SAVING",
    "Level",
    "Mark",
    "Point",
    "bandwidth",
    "breakdown",
    "bubbles",
    "communication",
    "comparison",
    "give_way",
    "held",
    "history",
    "lifetimes",
    "lost_time",
    "memory_by_strategy",
    "ranks",
    "reserved",
    "save_bandwidth",
    "save_clocks",
    "save_stages",
    "saved_by_rank",
    "savings",
    "segment_map",
    "shared",
    "slowdowns",
    "spread",
    "standing",
    "step_times",
    "timeline",
    "tops",
    "waits",
]
