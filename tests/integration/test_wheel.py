"""The wheel that `make wheel` builds works in an empty environment."""

import subprocess
from pathlib import Path

import pytest

from tracekit import conventions

ROOT = Path(__file__).parents[2]


@pytest.mark.accuracy  # two minutes, and a registry of packages; what the wheel holds is in test_distribution.py
def test_the_wheel_is_installed_and_used_in_an_empty_environment(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
    done = subprocess.run(["make", "wheel"], cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"tracekit {conventions.VERSION}"
    wheels = [path.name for path in (clone / "dist").iterdir()]
    assert wheels == [f"torch_tracekit-{conventions.VERSION}-py3-none-any.whl"]
