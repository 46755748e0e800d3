"""What the wheel holds is enough to work with, and is no more than that.

The wheel is built by hatchling, which ships all files of the packages that git tracks. They are laid out here as an
installation lays them out, and used from there, with nothing of the checkout within reach.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
SHIPPED = {".py", ".typed", ".js", ".css", ".j2", ".html", ".svg", ".toml", ".json"}

USE = """
import json, sys
from pathlib import Path

import dashboard, instrumented_trainers, tracekit
from tracekit.cli import run_loading
from tracekit.cli.commands.dashboard import server_command
from tracekit.report import baseline_json, json as report

run = tracekit.load(run_loading.sample_run())
report.schema(), baseline_json.schema()
pages = next(Path(word).parent for word in server_command([], port=0, browser=False) if word.endswith("serve.py"))
told = {
    "packages": [str(Path(each.__file__).parent.parent) for each in (tracekit, dashboard, instrumented_trainers)],
    "ranks": [source.rank for source in run.sources],
    "beside the app": [
        name for name in ("app.py", "frame.py", ".streamlit/config.toml", "icon.svg") if (pages / name).is_file()
    ],
}
if "with pages" in sys.argv:
    from dashboard.components.perfetto import export
    from dashboard.components.timeline import timeline
print(json.dumps(told))
"""


def tracked(folder: str) -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no checkout of git's")
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with what the wheel holds, as it lies once installed."""
    folder = tmp_path_factory.mktemp("site-packages")
    for package in WHEEL["packages"]:
        for name in tracked(package):
            place(ROOT / name, folder / name)
    for source, target in WHEEL["force-include"].items():
        for name in tracked(source):
            place(ROOT / name, folder / target / Path(name).relative_to(source))
    yield folder
    shutil.rmtree(folder)


def place(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(source) if source.suffix == ".gz" else shutil.copyfile(source, target)


def test_what_is_installed_finds_every_file_that_it_reads(installed: Path, tmp_path: Path) -> None:
    pages = ["with pages"] if find_spec("streamlit") else []
    done = subprocess.run(
        [sys.executable, "-c", USE, *pages],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed), "TRACEKIT_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "packages": [str(installed)] * 3,
        "ranks": [0, 1],
        "beside the app": ["app.py", "frame.py", ".streamlit/config.toml", "icon.svg"],
    }


def test_nothing_else_is_shipped() -> None:
    shipped = [Path(name) for package in WHEEL["packages"] for name in tracked(package)]
    assert {path.suffix or path.name for path in shipped} <= SHIPPED
    assert not [path for path in shipped if path.name.startswith("test_") or "tests" in path.parts]


def test_the_package_says_that_it_is_typed() -> None:
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]
    assert "tracekit/py.typed" in tracked("tracekit")


def test_every_entry_point_leads_to_a_module_that_is_there() -> None:
    scripts = PROJECT["project"]["scripts"].values()
    plugins = [each for group in PROJECT["project"]["entry-points"].values() for each in group.values()]
    assert not [each for each in [*scripts, *plugins] if find_spec(each.partition(":")[0]) is None]


def test_the_container_gets_every_file_that_the_wheel_is_built_from() -> None:
    """The image is built from these files alone: what is not let through would be missing in its wheel."""
    lines = (ROOT / ".containerignore").read_text(encoding="utf-8").splitlines()
    let_through = {line.removeprefix("!") for line in lines if line.startswith("!")}
    needed = {
        *WHEEL["packages"],
        *WHEEL["force-include"],
        PROJECT["project"]["readme"],
        *PROJECT["project"]["license-files"],
    }
    assert needed | {"pyproject.toml", "constraints.txt"} == let_through
    assert "*" in lines
