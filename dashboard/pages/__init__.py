"""The pages of the dashboard, one module each. A page is added by its module and one entry in `PAGES`."""

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
from dashboard.pages.page import Page
from tracekit.model import plugins

# In the order of the sidebar.
_MODULES = (
    runs, overview, timeline, ranks, parallelism, communication, contention, kernels, memory, checkpoints,
    critical_path, whatif, sql, quality, compare, plan, history,
)  # fmt: skip
PAGES: tuple[Page, ...] = tuple(module.PAGE for module in _MODULES)
DEFAULT = overview.PAGE


def all_pages() -> tuple[Page, ...]:
    """Return our pages and those that other distributions add by the entry point group ``tracekit.pages``."""
    return PAGES + tuple(point.load() for point in plugins.entry_points(group="tracekit.pages"))
