"""A table -> a Plotly figure. The one place for figures: dashboard, HTML report and notebooks show these.

Names from traces are not trusted: every string that reaches a figure goes through `escaping.escape`,
because Plotly reads a subset of HTML in labels and hovers. Backgrounds are transparent and text has no colour of its
own, so that a figure fits a light page and a dark one.
"""

from tracekit.report.charts.bars import breakdown, comparison, difference_icicle, icicle, step_times, top_bars
from tracekit.report.charts.checkpoints import save_bandwidth, save_clocks, save_stages
from tracekit.report.charts.communication import (
    ALGORITHM,
    BUS,
    MAX_MATRIX_RANKS,
    bandwidth,
    communication_parts,
    stall_causes,
    wait_matrix,
)
from tracekit.report.charts.contention import (
    MAX_SLOWED_RANKS,
    WITHOUT_PRODUCTS,
    concurrent_time,
    delayed_preparation,
    roofline,
    slowdowns,
)
from tracekit.report.charts.goodput import goodput_over_time
from tracekit.report.charts.many_runs import (
    MAX_VALUES,
    Axis,
    ChartedRun,
    in_groups,
    metric_of_runs,
    parallel_coordinates,
    sorted_values,
)
from tracekit.report.charts.memory import (
    block_lifetimes,
    memory_categories,
    memory_over_time,
    reserved_memory,
    segment_map,
)
from tracekit.report.charts.parallelism import (
    axis_communication,
    expert_heatmap,
    expert_pair_heatmap,
    mesh_map,
    pipeline_step,
    stage_balance,
)
from tracekit.report.charts.ranks import OTHERS_LOSE, SLOWER, measures, rank_activity, step_heatmap
from tracekit.report.charts.scaling import scaling
from tracekit.report.charts.style import CAUSES, COLOURS, CONFIG, KIND_LABELS, LIGHT_KINDS, PARTS, with_title
from tracekit.report.charts.trace_slices import MAX_SLICES, timeline
from tracekit.report.charts.what_if import (
    LOST,
    PATH_COLOURS,
    REPEATED,
    SAVING,
    bubbles,
    critical_path,
    lost_time,
    memory_by_strategy,
    path_parts,
    potential_savings,
    savings_by_rank,
)

__all__ = [
    "ALGORITHM",
    "BUS",
    "CAUSES",
    "COLOURS",
    "CONFIG",
    "KIND_LABELS",
    "LIGHT_KINDS",
    "LOST",
    "MAX_MATRIX_RANKS",
    "MAX_SLICES",
    "MAX_SLOWED_RANKS",
    "MAX_VALUES",
    "OTHERS_LOSE",
    "PARTS",
    "PATH_COLOURS",
    "REPEATED",
    "SAVING",
    "SLOWER",
    "WITHOUT_PRODUCTS",
    "Axis",
    "ChartedRun",
    "axis_communication",
    "bandwidth",
    "block_lifetimes",
    "breakdown",
    "bubbles",
    "communication_parts",
    "comparison",
    "concurrent_time",
    "critical_path",
    "delayed_preparation",
    "difference_icicle",
    "expert_heatmap",
    "expert_pair_heatmap",
    "goodput_over_time",
    "icicle",
    "in_groups",
    "lost_time",
    "measures",
    "memory_by_strategy",
    "memory_categories",
    "memory_over_time",
    "mesh_map",
    "metric_of_runs",
    "parallel_coordinates",
    "path_parts",
    "pipeline_step",
    "potential_savings",
    "rank_activity",
    "reserved_memory",
    "roofline",
    "save_bandwidth",
    "save_clocks",
    "save_stages",
    "savings_by_rank",
    "scaling",
    "segment_map",
    "slowdowns",
    "sorted_values",
    "stage_balance",
    "stall_causes",
    "step_heatmap",
    "step_times",
    "timeline",
    "top_bars",
    "wait_matrix",
    "with_title",
]
