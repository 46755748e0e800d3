"""What all tests of pages share."""

import sys

import pytest


@pytest.fixture(autouse=True)
def keep_main(monkeypatch):
    """Streamlit replaces __main__ by the page it runs, which processes that later tests start would import in vain."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
