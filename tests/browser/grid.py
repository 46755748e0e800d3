"""The list of runs as a person uses it: a table drawn on a canvas, with rows for screen readers."""

from dashboard.pages.runs import ROW_PX
from tests.browser.conftest import settle

HEADER_PX, BOX_PX = 35, 17
TABLE = "[data-testid=stDataFrame]"
ROWS = f"{TABLE} canvas table tbody tr"


def cells(page):
    """Return the table as its rows of text: as a screen reader gets them."""
    page.locator(ROWS).first.wait_for(state="attached")
    return page.evaluate(
        """(rows) => [...document.querySelectorAll(rows)].map(
             row => [...row.querySelectorAll('td')].map(cell => cell.textContent))""",
        ROWS,
    )


def row_of(page, name):
    """Return the number of the row that has a cell `name`."""
    page.locator(ROWS).filter(has_text=name).first.wait_for(state="attached")  # the list may be one of a moment before
    return next(number for number, row in enumerate(cells(page)) if name in row)


def select(page, *names):
    """Click on the boxes before the runs of these names."""
    grid = page.locator(TABLE).first
    for name in names:
        settle(page)
        grid.click(position={"x": BOX_PX, "y": HEADER_PX + ROW_PX * row_of(page, name) + ROW_PX / 2})


def select_first(page):
    """Click on the box before the first row of the first table."""
    page.locator(TABLE).filter(visible=True).first.click(position={"x": BOX_PX, "y": HEADER_PX + BOX_PX})
