"""The timeline's data at any zoom: the slices of all ranks on one clock, laid out once and read from a mapped file.

scene = timeline.open_scene(run)
timeline.view(scene, scene.span, pixels=1400)
"""

from tracekit.analysis.host.call_trees import search as search_frames
from tracekit.report.timeline.job_roles import JoinedRoles, join_roles
from tracekit.report.timeline.lookup import (
    ARROW_KINDS,
    ARROWS,
    Detail,
    Details,
    Matches,
    arrows,
    details,
    find_by_name,
    slices_of,
)
from tracekit.report.timeline.range_totals import RangeTotals, call_paths, range_rates, range_totals
from tracekit.report.timeline.scene import KINDS, Scene, open_scene
from tracekit.report.timeline.side_by_side import Side, SideBySide, side_by_side
from tracekit.report.timeline.viewport import VIEW, names, view

__all__ = [
    "ARROWS",
    "ARROW_KINDS",
    "KINDS",
    "VIEW",
    "Detail",
    "Details",
    "JoinedRoles",
    "Matches",
    "RangeTotals",
    "Scene",
    "Side",
    "SideBySide",
    "arrows",
    "call_paths",
    "details",
    "find_by_name",
    "join_roles",
    "names",
    "open_scene",
    "range_rates",
    "range_totals",
    "search_frames",
    "side_by_side",
    "slices_of",
    "view",
]
