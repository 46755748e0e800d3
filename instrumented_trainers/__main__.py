"""``python -m instrumented_trainers``: train and record. Also the program to give to torchrun."""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instrumented_trainers.config import TrainingConfig

_UNUSABLE = 2


def main() -> int:
    """Run the training that the command line asks for and return the exit code."""
    try:
        from instrumented_trainers import config, launch  # not at the top: without torch there is one line to say
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        sys.stderr.write("instrumented_trainers: needs PyTorch: pip install 'torch-tracekit[train]'\n")
        return _UNUSABLE
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
