"""What the documentation site is built from: its navigation, the links out of docs/, the docstrings' examples."""

import doctest
import tomllib
from pathlib import Path

import pytest

from website import build

ROOT = Path(__file__).parents[3]
NAVIGATION = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
ADDRESS = "https://git.example/team/project"


def test_the_navigation_has_every_guide_once() -> None:
    entries = [
        entry
        for section in NAVIGATION
        for value in section.values()
        for entry in ([value] if isinstance(value, str) else value)
    ]
    guides = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert sorted(entries) == sorted([*guides, "lab/README.md"])


def test_links_out_of_the_documentation_lead_to_the_repository() -> None:
    page = "[a](../examples/lightning_trainer.py), [b](../sample_traces#gpu), [c](record.md#files), [d](#here), [e](https://x.example/)"
    assert build.point_to_repository(page, "frameworks.md", ADDRESS) == (
        f"[a]({ADDRESS}/blob/main/examples/lightning_trainer.py), [b]({ADDRESS}/tree/main/sample_traces#gpu), "
        "[c](record.md#files), [d](#here), [e](https://x.example/)"
    )


def test_blocks_of_code_stay_as_they_are() -> None:
    page = "[a](../README.md)\n\n```text\n[b](../README.md)\n```\n\n[c](../README.md)\n"
    text = build.point_to_repository(page, "frameworks.md", ADDRESS)
    assert text == page.replace("[a](..", f"[a]({ADDRESS}/blob/main").replace("[c](..", f"[c]({ADDRESS}/blob/main")


def test_a_link_to_no_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"docs/lab/a\.md: the link \.\./\.\./gone\.py"):
        build.point_to_repository("[a](../../gone.py)", "lab/a.md", ADDRESS)


def test_the_examples_of_the_sources_are_right() -> None:
    assert doctest.testmod(build) == (0, 2)


def test_the_examples_of_docstrings_are_fenced() -> None:
    pytest.importorskip("griffe", reason="needs the extra [docs]")
    from website import docstring_examples

    assert doctest.testmod(docstring_examples) == (0, 1)
    assert docstring_examples.fence_doctests("Sum.\n\nMore.\n\n>>> 1 + 1\n2\n>>> 3\n3\n\nEnd.") == (
        "Sum.\n\nMore.\n\n```pycon\n>>> 1 + 1\n2\n>>> 3\n3\n```\n\nEnd."
    )
