"""Draw hostile inputs for a while, and state by kind how many tracekit did not handle."""

import argparse
import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection

from tests.fuzz import inputs, library, runner


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
    series = Series(kinds)
    with runner.worker() as worker, contextlib.suppress(KeyboardInterrupt):  # then the table is of what was drawn
        for number in range(options.inputs):
            if time.monotonic() > deadline:
                break
            series.draw(worker, options.seed + number)
    print(series.table())
    return bool(series.failures)


class Series:
    """Inputs drawn one after the other, each of the kind that has taken the least CPU time so far.

    Of kinds that the library reads, the command of one in COMMANDED inputs runs: it takes ten times as long.
    """

    COMMANDED = 10

    def __init__(self, kinds: list[str]) -> None:
        self.failures: list[runner.Failure] = []
        self.in_a_row = 0
        self._cpu_s = dict.fromkeys(kinds, 0.0)
        self._drawn: Counter[str] = Counter()
        self._commanded: Counter[str] = Counter()

    def draw(self, worker: runner.Worker, seed: int) -> None:
        """Draw an input, have it handled, and print what was wrong."""
        kind = min(self._cpu_s, key=self._cpu_s.__getitem__)
        is_read_only = kind in library.TRACES and self._drawn[kind] % self.COMMANDED > 0
        way = "read" if is_read_only else "command"
        outcome = worker.outcome(kind, seed, way=way)
        if outcome.failure is not None and outcome.failure.is_of_time:
            # A process that has grown, or shares its core, takes longer: what a new one repeats is of the input.
            worker.close()
            outcome = worker.outcome(kind, seed, way=way)
        self._cpu_s[kind] += outcome.cpu_s
        self._drawn[kind] += 1
        self._commanded[kind] += not is_read_only
        self.in_a_row += 1
        if outcome.failure is not None:
            self.failures.append(outcome.failure)
            self.in_a_row = 0
            failure = outcome.failure
            print(f"{kind} {seed}: {failure.reason}: {failure.detail.strip()[-300:]}", flush=True)

    def table(self) -> str:
        """How many inputs of each kind were drawn, had their command run, and were not handled."""
        of_kind = Counter(failure.kind for failure in self.failures)
        rows = [
            f"| {kind} | {self._drawn[kind]} | {self._commanded[kind]} | {of_kind[kind]} | {cpu_s:.0f} |"
            for kind, cpu_s in self._cpu_s.items()
        ]
        cpu_s = sum(self._cpu_s.values())
        total = f"| all | {self._drawn.total()} | {self._commanded.total()} | {len(self.failures)} | {cpu_s:.0f} |"
        head = ("| input | drawn | with its command | not handled | CPU s |", "|---|---|---|---|---|")
        return "\n".join((*head, *rows, total, f"Handled since the last failure: {self.in_a_row}"))


if __name__ == "__main__":
    sys.exit(main())
