"""The timeline's data at any zoom: the slices of all ranks on one clock, laid out once and drawn from a file.

scene = tiles.open_scene(run)
tiles.view(scene, scene.span, pixels=1400)
"""

from tracekit.tiles.scene import KINDS, Scene, open_scene
from tracekit.tiles.viewing import VIEW, names, view

__all__ = ["KINDS", "VIEW", "Scene", "names", "open_scene", "view"]
