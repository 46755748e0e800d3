"""The pages of the dashboard, one module each. A page is added by its module and one entry in `PAGES`."""

import re
from importlib.metadata import EntryPoint

from dashboard.pages import (
    checkpoints,
    communication,
    compare,
    contention,
    critical_path,
    history,
    kernels,
    memory,
    overview,
    parallelism,
    plan,
    quality,
    ranks,
    runs,
    sql,
    timeline,
    whatif,
)
from dashboard.pages.page import TOOLS, Needs, Page
from tracekit.model import plugins

# In the order of the sidebar.
_MODULES = (
    runs, overview, timeline, ranks, parallelism, communication, contention, kernels, memory, checkpoints,
    critical_path, whatif, sql, quality, compare, plan, history,
)  # fmt: skip
PAGES: tuple[Page, ...] = tuple(module.PAGE for module in _MODULES)
DEFAULT = overview.PAGE


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
