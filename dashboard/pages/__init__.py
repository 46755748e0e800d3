"""The pages of the dashboard, one module each. A page is added by its module and one entry in `PAGES`."""

import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint

from dashboard.pages import compare, diagnosis, kernels, memory, plan, ranks, runs, sql, timeline
from dashboard.pages.page import TAB, TOOLS, Needs, Page
from tracekit.model import plugins

# In the order of the sidebar.
_MODULES = (runs, diagnosis, timeline, ranks, kernels, memory, compare, sql, plan)
PAGES: tuple[Page, ...] = tuple(module.PAGE for module in _MODULES)
DEFAULT = diagnosis.PAGE
MOVED: Mapping[str, tuple[str, Mapping[str, list[str]]]] = {
    "overview": (DEFAULT.address, {}),
    DEFAULT.address: (DEFAULT.address, {}),
    "quality": (DEFAULT.address, {diagnosis.TRUST: ["True"]}),
    "whatif": (DEFAULT.address, {diagnosis.SAVINGS: ["True"]}),
    "critical_path": (timeline.PAGE.address, {timeline.PATH: ["True"]}),
    "criticalpath": (timeline.PAGE.address, {timeline.PATH: ["True"]}),
    "communication": (ranks.PAGE.address, {TAB: ["exposed communication"]}),
    "contention": (ranks.PAGE.address, {TAB: ["contention"]}),
    "parallelism": (ranks.PAGE.address, {TAB: ["pipeline", "mesh", "experts"]}),
    "checkpoints": (memory.PAGE.address, {TAB: ["checkpoints"]}),
    "history": (runs.PAGE.address, {runs.VIEW: [runs.TRENDS]}),
}
"""Addresses of pages that are parts of others now, and of the root: the page, and its parameters that show the part."""


def all_pages() -> tuple[Page, ...]:
    """Return our pages and those that other distributions add by the entry point group ``tracekit.pages``.

    In the place of one that cannot be imported is a page that raises its error.
    """
    return PAGES + tuple(map(_load, plugins.entry_points(group="tracekit.pages")))


def _load(point: EntryPoint) -> Page:
    try:
        page: Page = point.load()
    except Exception as error:  # noqa: BLE001 whatever the module of another distribution raises
        reason = error

        def show(_: object) -> None:
            raise reason

        show.__module__ = point.module
        address = re.sub("[^a-z]", "", point.name.lower()) or "plugin"
        return Page(point.name, address, "a page that cannot be imported", show, Needs.CATALOG, TOOLS)
    return page
