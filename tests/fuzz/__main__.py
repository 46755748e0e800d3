"""Draw hostile inputs for a while, and state by kind how many tracekit did not handle."""

import argparse
import contextlib
import itertools
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection

from tests.fuzz import inputs, runner


def main(all_kinds: Collection[str] = tuple(inputs.KINDS)) -> int:
    """Run the command; return 1 if an input was not handled."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so many (default: 60)")
    parser.add_argument("--inputs", type=int, default=10**9, help="or after so many inputs")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() // 10**9, help="of the first input (default: the time)"
    )
    parser.add_argument("--kind", action="append", choices=all_kinds, help="draw only this kind; repeatable")
    options = parser.parse_args()
    kinds = options.kind or list(all_kinds)
    deadline = time.monotonic() + options.seconds
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a shell's background job ignores SIGINT
    counts: Counter[str] = Counter()
    failed: list[runner.Failure] = []
    with runner.worker() as worker, contextlib.suppress(KeyboardInterrupt):  # then the table is of what was drawn
        for number, kind in zip(range(options.inputs), itertools.cycle(kinds), strict=False):
            if time.monotonic() > deadline:
                break
            failure = worker.failure(kind, options.seed + number)
            counts[kind] += 1
            if failure is not None:
                failed.append(failure)
                print(f"{failure.kind} {failure.seed}: {failure.reason}: {failure.detail.strip()[-300:]}", flush=True)
    print(_table(counts, failed))
    return bool(failed)


def _table(counts: Counter[str], failed: list[runner.Failure]) -> str:
    of_kind = Counter(failure.kind for failure in failed)
    rows = [f"| {kind} | {count} | {of_kind[kind]} |" for kind, count in counts.items()]
    total = f"| all | {counts.total()} | {len(failed)} |"
    return "\n".join(("| input | drawn | not handled |", "|---|---|---|", *rows, total))


if __name__ == "__main__":
    sys.exit(main())
