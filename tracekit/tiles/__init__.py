"""The timeline's data at any zoom: the slices of all ranks on one clock, laid out once and drawn from a file.

scene = tiles.open_scene(run)
tiles.view(scene, scene.span, pixels=1400)
"""

from tracekit.tiles.finding import Matches, find
from tracekit.tiles.pointing import ARROWS, HOWS, arrows
from tracekit.tiles.scene import KINDS, Scene, open_scene, shelf
from tracekit.tiles.telling import Details, Told, details
from tracekit.tiles.viewing import VIEW, names, view

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
    "shelf",
    "view",
]
