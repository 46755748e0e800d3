"""``python -m instrumented_trainers``: train and record. Also the program to give to torchrun."""

import sys

from instrumented_trainers import config, launch


def main() -> int:
    """Run the training that the command line asks for and return the exit code."""
    command = ["python", "-m", "instrumented_trainers", *sys.argv[1:]]
    return launch.run(config.parse(), command)


if __name__ == "__main__":
    sys.exit(main())
