"""Fuzzing that is guided by coverage: Atheris keeps and changes what reaches new lines of tracekit.

    python -m tests.fuzz.guided --seconds 600 --corpus corpus       # needs `pip install atheris`
    python -m tests.fuzz.guided --repeat corpus/failures/1a2b3c

The bytes that Atheris draws decide, one choice after the other, what `inputs` makes of them, so that they always lead
to an input with the structure of its kind. A failure is what it is for `python -m tests.fuzz`.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.fuzz import inputs, runner, worker
from tests.support import cli_runner

CURRENT, COUNT = "current", "count"
_MAX_BYTES = 4096
_MEMORY_MIB = 4096
_WARM_UP_S = 600
_CPU_S = 4 * runner.CPU_S
"""Instrumented code is slower."""


class BytesRandom(Random):
    """Random numbers from bytes, and when these end, from a generator that they seed."""

    def __init__(self, data: bytes) -> None:
        """Draw from the first byte on."""
        self._data, self._at = data, 0
        super().__init__(data)

    def getrandbits(self, k: int) -> int:
        """Return k bits, from the next bytes."""
        count = -(-k // 8)
        if self._at + count > len(self._data):
            return super().getrandbits(k)
        drawn = int.from_bytes(self._data[self._at : self._at + count], "little")
        self._at += count
        return drawn & ((1 << k) - 1)

    def random(self) -> float:
        """Return a number from 0 up to 1, from the next two bytes."""
        return self.getrandbits(16) / (1 << 16)


def input_of(data: bytes, kinds: Sequence[str] = tuple(inputs.KINDS)) -> inputs.Input:
    """Return the input that bytes lead to; the first of them chooses the kind."""
    random = BytesRandom(data)
    return inputs.made(random.choice(kinds), 0, random)


def main() -> int:
    """Run the command; return 1 if an input was not handled."""
    options = _parser().parse_args()
    kinds = options.kind or list(inputs.KINDS)
    if options.repeat is not None:
        failure = runner.judged(worker.run(input_of(options.repeat.read_bytes(), kinds), runner.CPU_S))
        print(failure or "handled")
        return int(failure is not None)
    if options.in_process:
        _fuzz(kinds, options.corpus)
    return _supervise(options.corpus, options.seconds, kinds)


def _supervise(corpus: Path, seconds: float, kinds: list[str]) -> int:
    """Start Atheris, again after an input that ended its process, and state what was not handled."""
    failures = corpus / "failures"
    failures.mkdir(parents=True, exist_ok=True)
    before = {path.name for path in failures.iterdir()}
    (corpus / COUNT).write_text("")
    deadline = time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 1:
        command = [sys.executable, "-m", "tests.fuzz.guided", "--in-process", "--corpus", str(corpus)]
        command += [word for kind in kinds for word in ("--kind", kind)]
        variables = {**os.environ, "POLARS_MAX_THREADS": "1", "TRACEKIT_FUZZ_SECONDS": str(int(left_s))}
        code = subprocess.run(
            command, env=variables, cwd=cli_runner.ROOT, check=False, stderr=subprocess.DEVNULL
        ).returncode
        if code and (corpus / CURRENT).exists():
            _note(corpus, (corpus / CURRENT).read_bytes(), kinds, runner.ended(code))
    found = [path for path in failures.iterdir() if path.name not in before]
    print(f"{(corpus / COUNT).stat().st_size:,} inputs, {len(found)} not handled")
    return int(bool(found))


def _fuzz(kinds: list[str], corpus: Path) -> None:
    """Let Atheris draw inputs until the time is over; it ends the process."""
    import atheris  # type: ignore[import-not-found, unused-ignore]  # no dependency: only this command needs it

    with atheris.instrument_imports(include=["tracekit"]):
        cli_runner.tracekit("check", "--sample", "--format", "json")  # modules are imported when they are needed first
        for kind in kinds:
            worker.run(inputs.drawn(kind, 0), _WARM_UP_S)

    def handle(data: bytes) -> None:
        (corpus / CURRENT).write_bytes(data)
        failure = runner.judged(worker.run(input_of(data, kinds), _CPU_S), _CPU_S)
        with (corpus / COUNT).open("a") as count:
            count.write(".")
        if failure is not None:
            _note(corpus, data, kinds, f"{failure.reason}: {failure.detail.strip()[-300:]}")
        (corpus / CURRENT).unlink()

    found = corpus / "found"
    found.mkdir(parents=True, exist_ok=True)
    limits = [f"-max_total_time={os.environ['TRACEKIT_FUZZ_SECONDS']}", f"-max_len={_MAX_BYTES}", "-timeout=120"]
    limits += [f"-rss_limit_mb={_MEMORY_MIB}", f"-artifact_prefix={corpus}/", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, str(found)], handle)
    atheris.Fuzz()


def _note(corpus: Path, data: bytes, kinds: Sequence[str], reason: str) -> None:
    """Write an input that was not handled, and say why."""
    path = corpus / "failures" / hashlib.sha256(data).hexdigest()[:12]
    if not path.exists():
        path.write_bytes(data)
        print(json.dumps({"input": str(path), "kind": input_of(data, kinds).kind, "reason": reason}), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so many (default: 60)")
    parser.add_argument(
        "--corpus", type=Path, default=Path("corpus"), help="folder of what was found (default: corpus)"
    )
    parser.add_argument("--kind", action="append", choices=inputs.KINDS, help="draw only this kind; repeatable")
    parser.add_argument("--repeat", type=Path, metavar="FILE", help="run this input instead, without Atheris")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
