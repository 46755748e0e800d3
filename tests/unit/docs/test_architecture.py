"""docs/architecture.md describes the code as it is: its picture of the rooms, its paths, its registries."""

import re
from pathlib import Path

import pytest

grimp = pytest.importorskip("grimp", reason="needs the extra [dev]")

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms -->\n", "<!-- end -->"
LEFT_OUT = {"tracekit", "conventions", "errors", "__main__"}


@pytest.fixture(scope="module")
def imports():
    """Return which room imports which: {importer: {imported}}."""
    graph = grimp.build_graph("tracekit", "dashboard", "instrumented_trainers", cache_dir=None)
    rooms = {}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            rooms.setdefault(room(module), set()).add(room(imported))
    return {name: others - {name} - LEFT_OUT for name, others in rooms.items() if name not in LEFT_OUT}


def room(module):
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] or package if package == "tracekit" else package


def reachable(imports, start):
    found, left = set(), [start]
    while left:
        new = imports.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def test_no_room_imports_a_room_above_it(imports):
    assert not [name for name in imports if name in reachable(imports, name)]


def test_the_picture_shows_the_imports(imports, request):
    implied = {name: set().union(*(reachable(imports, other) for other in others)) for name, others in imports.items()}
    arrows = sorted(f"    {name} --> {other}" for name, others in imports.items() for other in others - implied[name])
    picture = "\n".join(["```mermaid", "flowchart TD", *arrows, "```\n"])
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    shown, _, after = rest.partition(END)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(f"{before}{BEGIN}{picture}{END}{after}", encoding="utf-8")
        return
    assert shown == picture, "write it with --update-golden"


def test_every_room_has_a_paragraph():
    text = PAGE.read_text(encoding="utf-8")
    rooms = [path.name for path in (ROOT / "tracekit").iterdir() if (path / "__init__.py").exists()]
    missing = [name for name in rooms if f"**`{name}/`**" not in text and f"`{name}`" not in text]
    assert not missing


def test_every_module_belongs_to_a_room():
    loose = {path.stem for path in (ROOT / "tracekit").glob("*.py")}
    assert loose <= {"__init__", "__main__", "conventions", "errors"}


def test_every_path_on_the_page_exists():
    paths = re.findall(r"`((?:tracekit|dashboard|instrumented_trainers)/[\w/.]+)`", PAGE.read_text(encoding="utf-8"))
    assert len(paths) > 12
    assert not [path for path in paths if not (ROOT / path).exists()]
