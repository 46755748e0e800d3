"""What all tests share: golden files, rewritten by ``pytest --update-golden`` and then reviewed as code, and long lists
of cases, of which a run takes a tenth and ``pytest --thorough`` all."""

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import pytest

from tests.support import rotation

hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")  # how long an example takes tells of the machine, not of the code

# What jsonschema checks the format "iri" with, which no schema here uses: half a hundred parsers, seconds a process.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

GOLDEN = Path(__file__).parent / "golden"
TAKEN = 10
Case = TypeVar("Case")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files with what is found now")
    parser.addoption(
        "--thorough", action="store_true", help="run all tests and all cases of long lists, not those whose turn it is"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    from tests.support import xdist_scheduling

    return xdist_scheduling.count()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None  # xdist's own
    from tests.support import xdist_scheduling

    return xdist_scheduling.ByFile(config, log)


def pytest_configure(config: pytest.Config) -> None:
    for interrupt in (signal.SIGINT, signal.SIGQUIT):  # ignored where a shell started the tests in the background
        if signal.getsignal(interrupt) is signal.SIG_IGN:
            signal.signal(interrupt, signal.default_int_handler if interrupt == signal.SIGINT else signal.SIG_DFL)
    if config.getoption("--thorough"):
        os.environ[rotation.THOROUGH] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:], left = rotation.of_this_run(items)
    if left:
        config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported: each collection of the oldest would go over 700,000 objects of it, half a second


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return what compares a text with the golden file of a name."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path}: missing; write it with --update-golden and read it"
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture
def some(request: pytest.FixtureRequest) -> Callable[[Sequence[Case]], Sequence[Case]]:
    """Return what takes one in ten of fixed cases, other ones in each run; all with --thorough."""

    def take(cases: Sequence[Case]) -> Sequence[Case]:
        if request.config.getoption("--thorough"):
            return cases
        return cases[random.SystemRandom().randrange(TAKEN) :: TAKEN]

    return take


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests, and the commands that they run, a cache that starts empty and is not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACEKIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
