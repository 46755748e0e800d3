"""Deterministic modes of the recording process in run.json, and the finding on what the mode costs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import tracekit
from tracekit.model.manifest import Manifest
from tracekit.rules.cpu_ops import DeterministicFills
from tracekit.rules.engine import check
from tracekit.rules.rule import Finding

torch = pytest.importorskip("torch", reason="needs torch")

from tracekit.capture.recorder import Recorder  # noqa: E402


@pytest.fixture(autouse=True)
def modes() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = False


def record(out: Path, *, is_deterministic: bool) -> tuple[Finding, ...]:
    """Findings on a run that allocates in each step, and chooses the mode after it has made its recorder."""
    with Recorder(out, steps="1:3", warmup=1, device="cpu", memory=False) as recorder:
        torch.use_deterministic_algorithms(is_deterministic)
        torch.backends.cudnn.deterministic = is_deterministic
        for _ in range(4):
            for _ in range(20):
                torch.empty(1 << 16)
            recorder.step()
    return check(tracekit.load(out, cache=False), [DeterministicFills()]).findings


def test_the_mode_of_the_recording_is_stated_and_the_finding_rests_on_it(tmp_path: Path) -> None:
    torch.backends.cudnn.benchmark = True
    (finding,) = record(tmp_path, is_deterministic=True)
    assert finding.confidence == 1.0
    stated = Manifest.of(tracekit.load(tmp_path, cache=False).manifest).determinism
    assert (stated.deterministic_algorithms, stated.cudnn_deterministic, stated.cudnn_benchmark) == (True, True, True)


def test_without_the_mode_it_is_stated_as_off(tmp_path: Path) -> None:
    assert record(tmp_path, is_deterministic=False) == ()
    stated = Manifest.of(tracekit.load(tmp_path, cache=False).manifest).determinism
    assert (stated.deterministic_algorithms, stated.cudnn_deterministic) == (False, False)
