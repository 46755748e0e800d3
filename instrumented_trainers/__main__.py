"""``python -m instrumented_trainers``: train and record. Also the program to give to torchrun."""

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instrumented_trainers.config import TrainingConfig

_UNUSABLE = 2


def main() -> int:
    """Run the training that the command line asks for and return the exit code."""
    if importlib.util.find_spec("torch") is None:
        sys.stderr.write("instrumented_trainers: needs PyTorch: pip install 'torch-tracekit[train]'\n")
        return _UNUSABLE
    from instrumented_trainers import config, launch

    command = ["python", "-m", "instrumented_trainers", *sys.argv[1:]]
    return launch.run(config.parse(dry_run=_dry_run), command)


def _dry_run(settings: "TrainingConfig") -> list[str]:
    from instrumented_trainers import dry_run  # it imports the whole trainer

    return dry_run.report(settings)


if __name__ == "__main__":
    code = main()
    if code == 0 and "RANK" in os.environ:
        from instrumented_trainers.launch import leave

        leave(code)
    sys.exit(code)
