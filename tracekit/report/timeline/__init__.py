"""The timeline's data at any zoom: the slices of all ranks on one clock, laid out once and drawn from a file.

scene = tiles.open_scene(run)
tiles.view(scene, scene.span, pixels=1400)
"""

from tracekit.report.timeline.arrow_search import ARROWS, HOWS, arrows
from tracekit.report.timeline.name_search import Matches, find
from tracekit.report.timeline.scene import KINDS, Scene, open_scene, scene_cache
from tracekit.report.timeline.slice_details import Details, Told, details
from tracekit.report.timeline.viewport import VIEW, names, view

__all__ = [
    "ARROWS",
    "HOWS",
    "KINDS",
    "VIEW",
    "Details",
    "Matches",
    "Scene",
    "Told",
    "arrows",
    "details",
    "find",
    "names",
    "open_scene",
    "scene_cache",
    "view",
]
