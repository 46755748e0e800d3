"""Each run takes its share of the tests that take turns, and one that is asked for by itself."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import rotation

TESTS = """
import pytest
from tests.support.rotation import in_turns
@in_turns(3)
@pytest.mark.parametrize("number", range(9))
def test_a(number): pass
@in_turns(2, "together")
def test_b(): pass
@in_turns(2, "together")
def test_c(): pass
def test_always(): pass
"""


@pytest.fixture
def collected(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., list[pytest.Item]]:
    path = tmp_path / f"test_turns_of_{tmp_path.name}.py"  # imported by its name
    path.write_text(TESTS)
    module = pytest.Module.from_parent(request.session, path=path)
    return lambda *names: [
        item for item in request.session.genitems(module) if not names or item.name.startswith(names)
    ]


def test_a_run_takes_a_share_of_each_group_and_all_others(
    collected: Callable[..., list[pytest.Item]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(rotation.THOROUGH, raising=False)
    items = collected()
    taken, left = rotation.of_this_run(items)
    assert sorted(map(id, taken + left)) == sorted(map(id, items))
    names = [item.name.partition("[")[0] for item in taken]
    assert (names.count("test_a"), names.count("test_b") + names.count("test_c"), names[-1]) == (3, 1, "test_always")
    assert [item.name for item in rotation.of_this_run(items)[0]] == [item.name for item in taken]


def test_one_that_is_asked_for_by_itself_is_run(collected: Callable[..., list[pytest.Item]]) -> None:
    for item in collected():
        assert rotation.of_this_run([item]) == ([item], [])


def test_all_are_run_if_told_so(collected: Callable[..., list[pytest.Item]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rotation.THOROUGH, "1")
    assert rotation.of_this_run(collected())[1] == []


def test_modules_take_turns_whole(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(rotation.THOROUGH, raising=False)
    items = []
    for number in range(4):
        path = tmp_path / f"test_module_{number}_of_{tmp_path.name}.py"
        path.write_text(
            "from tests.support.rotation import modules_in_turns\npytestmark = modules_in_turns(2, 'all')\n"
            "def test_one(): pass\ndef test_two(): pass\n"
        )
        items += list(request.session.genitems(pytest.Module.from_parent(request.session, path=path)))
    taken, left = rotation.of_this_run(items)
    assert (len(taken), len(left)) == (4, 4)
    assert not {item.path for item in taken} & {item.path for item in left}
    assert rotation.of_this_run(items[:2]) == (items[:2], [])
