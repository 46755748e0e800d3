"""Bytes that a coverage-guided fuzzer draws lead to inputs: the same each time, of every kind, however few they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import guided, inputs

KINDS = ("metrics log", "checkpoint log", "settings")


@given(st.binary(max_size=64))
def test_the_same_bytes_lead_to_the_same_input(data):
    assert guided.input_of(data, KINDS) == guided.input_of(data, KINDS)


def test_the_first_bytes_choose_the_kind():
    assert {guided.input_of(bytes([first]), KINDS).kind for first in range(4)} == set(KINDS)


def test_later_bytes_change_the_files():
    assert len({str(guided.input_of(bytes([0] + [after] * 60), KINDS).files) for after in range(64)}) > 16


@given(st.binary(max_size=32), st.integers(1, 1000))
def test_numbers_from_bytes_are_in_their_range(data, most):
    random = guided.BytesRandom(data)
    assert all(0 <= random.randrange(most) < most and 0 <= random.random() < 1 for _ in range(20))


def test_an_input_is_repeated(tmp_path, monkeypatch, capsys):
    (tmp_path / "input").write_bytes(b"\0" * 40)
    monkeypatch.setattr("sys.argv", ["guided", "--kind", "settings", "--repeat", str(tmp_path / "input")])
    monkeypatch.setattr(guided.worker, "run", lambda made, limit_s: _result(made))
    assert guided.main() == 1
    assert "exit code 3" in capsys.readouterr().out


def _result(made: inputs.Input) -> dict[str, object]:
    return {
        "kind": made.kind, "seed": made.seed, "code": 3, "raised": "", "stderr": "", "is_json": True, "cpu_s": 0.1,
        "grown_mib": 1, "library": "", "contradiction": "",
    }  # fmt: skip


@pytest.mark.timeout(300)
def test_atheris_draws_inputs(tmp_path, monkeypatch, capfd):
    pytest.importorskip("atheris")
    words = ["guided", "--seconds", "60", "--kind", "settings", "--corpus", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    assert guided.main() == 0
    assert " 0 not handled" in capfd.readouterr().out
