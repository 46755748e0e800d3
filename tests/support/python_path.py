"""Where processes that tests launch find tracekit. Not a test."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PYTHON_PATH = os.pathsep.join([str(Path(__file__).parent / "quick_start"), str(REPOSITORY)])
"""The value of PYTHONPATH; see `quick_start/sitecustomize.py`."""
