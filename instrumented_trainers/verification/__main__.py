"""``python -m instrumented_trainers.verification``: started by `tracekit verify-training`; writes JSON."""

import argparse
import json
import warnings
from pathlib import Path


def main() -> None:
    """Verify as the arguments say."""
    parser = argparse.ArgumentParser(prog="instrumented_trainers.verification")
    parser.add_argument("target")
    parser.add_argument("out", type=Path)
    parser.add_argument("--strategies", nargs="+", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    arguments = vars(parser.parse_args())
    out = arguments.pop("out")
    warnings.filterwarnings("ignore", module="torch")

    from instrumented_trainers.verification.run import Settings, verify

    out.write_text(json.dumps(verify(Settings(**arguments))), encoding="utf-8")


if __name__ == "__main__":
    main()
