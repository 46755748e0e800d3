"""The documentation site: links lead somewhere, all pages can be reached, and the API page shows what is exported."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import tracekit
from tracekit import capture

pytest.importorskip("zensical", reason="needs the extra [docs]")

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://git.example/team/project"
SETTINGS = "zensical.toml"
NOT_LINKED = {".git", ".cache", ".venv", "build", SETTINGS}


class Targets(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [values[name] or "" for name in ("href", "src") if name in values]
        self.anchors |= {values["id"] or ""} if "id" in values else set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of the site, built beside links to what this checkout has."""
    folder = tmp_path_factory.mktemp("site")
    for entry in ROOT.iterdir():
        if entry.name not in NOT_LINKED:
            (folder / entry.name).symlink_to(entry)
    shutil.copy(ROOT / SETTINGS, folder)  # Zensical builds where the file of its settings is, links resolved
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    yield folder / "build" / "site"
    shutil.rmtree(folder / "build")


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Targets]:
    return {page: Targets(page) for page in site.rglob("*.html") if page.name != "404.html"}


def build(folder: Path) -> "subprocess.CompletedProcess[str]":
    server, _, name = REPOSITORY.partition("/team")
    environment = {**os.environ, "GITHUB_SERVER_URL": server, "GITHUB_REPOSITORY": f"team{name}", "PYTHONPATH": ""}
    return subprocess.run(
        [sys.executable, "-m", "website.build"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def target_file(page: Path, link: str) -> Path:
    path = (page.parent / unquote(urlsplit(link).path)).resolve() if urlsplit(link).path else page
    return path / "index.html" if path.is_dir() else path


def is_local(link: str) -> bool:
    return not urlsplit(link).scheme and not link.startswith("//")


def test_every_link_leads_to_a_file_and_an_anchor_of_the_site(pages: dict[Path, Targets]) -> None:
    broken = []
    for page, targets in pages.items():
        for link in filter(is_local, targets.links):
            file, anchor = target_file(page, link), unquote(urlsplit(link).fragment)
            if not file.is_file() or (anchor and file in pages and anchor not in pages[file].anchors):
                broken.append((page.parent.name, link))
    assert not broken


def test_every_page_can_be_reached_from_the_first(site: Path, pages: dict[Path, Targets]) -> None:
    reached, left = set(), [site / "index.html"]
    while left:
        page = left.pop()
        reached.add(page)
        targets = {target_file(page, link) for link in filter(is_local, pages[page].links)}
        left += [file for file in targets if file in pages and file not in reached]
    assert set(pages) == reached
    assert len(reached) >= len(list((ROOT / "docs").rglob("*.md")))


def test_links_that_leave_the_documentation_lead_to_files_of_the_repository(pages: dict[Path, Targets]) -> None:
    links = {link for targets in pages.values() for link in targets.links if link.startswith(f"{REPOSITORY}/")}
    files = {urlsplit(link).path.removeprefix("/team/project/").split("/", 2)[2] for link in links}
    assert "examples/lightning_trainer.py" in files
    assert not [file for file in files if not (ROOT / file).exists()]


def test_the_page_of_the_api_shows_what_is_exported(site: Path, pages: dict[Path, Targets]) -> None:
    anchors = pages[site / "api" / "index.html"].anchors
    names = [f"tracekit.{name}" for name in tracekit.__all__] + [f"tracekit.capture.{name}" for name in capture.__all__]
    assert not [name for name in names if name not in anchors]
    text = (site / "api" / "index.html").read_text(encoding="utf-8")
    assert "doctest:" not in text
    assert '<span class="gp">&gt;&gt;&gt; </span>' in text


def test_only_the_drawing_of_diagrams_is_fetched_from_another_server(pages: dict[Path, Targets]) -> None:
    loaded = {
        link for targets in pages.values() for link in targets.links if link.endswith((".js", ".css", ".svg", ".png"))
    }
    assert not [link for link in loaded if not is_local(link) and not link.startswith(REPOSITORY)]


def test_a_link_to_a_file_that_does_not_exist_fails_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "website", tmp_path / "website")
    shutil.copytree(ROOT / "dashboard" / "server", tmp_path / "dashboard" / "server")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").write_text("# Title\n\n[gone](../examples/gone.py)\n", encoding="utf-8")
    done = build(tmp_path)
    assert done.returncode == 1
    assert "docs/README.md" in done.stderr
    assert "../examples/gone.py" in done.stderr
