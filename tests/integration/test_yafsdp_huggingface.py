"""The example that trains a Hugging Face model does, started as it says."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tracekit import conventions

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install transformers"
)
REPOSITORY = Path(__file__).parents[2]


def test_the_example_learns_and_records_a_run(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = [str(REPOSITORY / "examples" / "huggingface.py"), "--out", str(tmp_path), "--steps", "12"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([*launcher, *example], env=environment, check=True, timeout=240)
    lines = (tmp_path / conventions.rank_file(0, conventions.METRICS_SUFFIX)).read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)[conventions.LOSS_METRIC] for line in lines]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1
    assert (tmp_path / conventions.rank_file(1, conventions.TRACE_SUFFIX)).is_file()
