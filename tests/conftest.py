"""Shared by all tests: golden files, rewritten by ``pytest --update-golden`` and then reviewed as code.

Every run executes the same tests on the same inputs: hypothesis is derandomized and random inputs have fixed seeds.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from _pytest import doctest
from hypothesis.internal.conjecture import providers

from tests.support.wording import Wording
from tracekit.conventions.gc_pause import gc_paused

# There are more workers than cores: further threads that wait for a core, or spin on it, cost more than they give.
os.environ.setdefault("OMP_NUM_THREADS", "1")
with pytest.MonkeyPatch.context() as only_here:  # commands that tests start have as many threads as a user's
    only_here.setenv("POLARS_MAX_THREADS", "1")
    import polars

    polars.thread_pool_size()  # starts them

_HAS_PASSED = pytest.StashKey[bool]()
# No deadline: the duration of an example depends on the load of the machine, not on the code.
hypothesis.settings.register_profile("deterministic", deadline=None, derandomize=True, database=None, max_examples=40)
hypothesis.settings.load_profile("deterministic")
# Hypothesis also draws constants of the modules that a process has imported, which depend on the tests before.
providers._get_local_constants = lambda: providers._local_constants  # of no module

# jsonschema imports this package for the format "iri", which no schema here uses; the import takes seconds.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files with the current output")
    parser.addoption("--examples-times", type=int, default=1, help="try so many times the examples of each property")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    from tests.support import xdist_scheduling

    return xdist_scheduling.worker_count()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None  # xdist's own
    from tests.support import xdist_scheduling

    return xdist_scheduling.ScheduleByFile(config, log)


def pytest_configure(config: pytest.Config) -> None:
    for interrupt in (signal.SIGINT, signal.SIGQUIT):  # a shell that starts the tests in the background ignores them
        if signal.getsignal(interrupt) is signal.SIG_IGN:
            signal.signal(interrupt, signal.default_int_handler if interrupt == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    times = config.getoption("--examples-times")
    for test in {getattr(item, "obj", None) for item in items if times > 1 and item.get_closest_marker("hypothesis")}:
        given = test._hypothesis_internal_use_settings
        test._hypothesis_internal_use_settings = hypothesis.settings(given, max_examples=times * given.max_examples)
    if hasattr(config, "workerinput"):
        from tests.support import xdist_scheduling

        items[:] = xdist_scheduling.long_files_first([(item.nodeid, item) for item in items])


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Iterator[None]:
    """Search doctests only in modules that have one: to import and to search the others takes each worker seconds."""
    collectors = yield
    if not any(isinstance(collector, doctest.DoctestModule) for collector in collectors):
        return collectors
    if not file_path.name.startswith("test_") and b">>>" in file_path.read_bytes():
        return collectors
    return [collector for collector in collectors if not isinstance(collector, doctest.DoctestModule)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    with gc_paused():  # what is imported stays
        return (yield)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # full collections would otherwise scan 700,000 objects of imported modules, half a second each
    # Tests make many objects and few cycles: with Python's thresholds, collections take 2 to 4% of the CPU time.
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares a text with a golden file."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path}: missing; write it with --update-golden and read it"
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture
def wording(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wording]:
    """Yield the function that compares messages with the golden file of the test's module."""
    module = request.path.relative_to(Path(__file__).parent).with_suffix(".txt")
    messages = Wording(
        GOLDEN / "wording" / module,
        request.node.nodeid.partition("::")[2],
        is_updated=request.config.getoption("--update-golden"),
        names={str(tmp_path): "TMP", str(Path(__file__).parents[1]): "REPOSITORY"},
    )
    yield messages
    if request.node.stash.get(_HAS_PASSED, False):  # else the test failed or was skipped before its end
        messages.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note whether a test itself has passed, for its fixtures."""
    report = yield
    if report.when == "call":
        item.stash[_HAS_PASSED] = report.passed
    return report


@pytest.fixture(autouse=True, scope="session")
def _separate_folders(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[None]:
    """Give the tests and the commands that they run an empty cache of their own instead of the user's.

    The workers of pytest-xdist share it, and the folder of tests/support/shared_findings.py, so that what one of them
    has read or judged costs the others nothing.
    """
    own = tmp_path_factory.getbasetemp()
    of_all_workers = own.parent if hasattr(request.config, "workerinput") else own
    with pytest.MonkeyPatch.context() as patch:
        for variable, name in (("TRACEKIT_CACHE_DIR", "cache"), ("TRACEKIT_TESTS_FOLDER", "shared-by-workers")):
            (of_all_workers / name).mkdir(exist_ok=True)
            patch.setenv(variable, str(of_all_workers / name))
        yield
