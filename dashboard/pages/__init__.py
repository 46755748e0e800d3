"""The pages of the dashboard, one module each. A page is added by its module and one entry in `PAGES`."""

from importlib.metadata import entry_points

from dashboard.pages import (
    checkpoints,
    communication,
    compare,
    contention,
    history,
    kernels,
    memory,
    overview,
    plan,
    quality,
    ranks,
    runs,
    sql,
    timeline,
    whatif,
)
from dashboard.pages.page import Page

PAGES: tuple[Page, ...] = (
    runs.PAGE,
    overview.PAGE,
    timeline.PAGE,
    ranks.PAGE,
    communication.PAGE,
    contention.PAGE,
    kernels.PAGE,
    memory.PAGE,
    checkpoints.PAGE,
    whatif.PAGE,
    sql.PAGE,
    quality.PAGE,
    compare.PAGE,
    plan.PAGE,
    history.PAGE,
)
DEFAULT = overview.PAGE


def all_pages() -> tuple[Page, ...]:
    """Return our pages and those that other distributions add by the entry point group ``tracekit.pages``."""
    return PAGES + tuple(point.load() for point in entry_points(group="tracekit.pages"))
