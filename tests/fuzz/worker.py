"""A process that runs one command after the other and states how each ended. Not a test.

Each input is `KIND SEED` on a line of stdin; each result is a JSON object on a line of stdout. A process that a command
ends is started again by `runner`.
"""

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import inputs
from tests.support import cli_runner

_MAX_ERROR = 400


def main() -> None:
    """Run the inputs that stdin names."""
    limit_s, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    results = os.fdopen(os.dup(1), "w")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cli_runner.tracekit("check", "--sample", "--format", "json")  # imports do not count
    own_bytes = _address_space_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (own_bytes + memory_bytes, resource.RLIM_INFINITY))
    for line in sys.stdin:
        kind, _, seed = line.strip().rpartition(" ")
        results.write(json.dumps(run(inputs.drawn(kind, int(seed)), limit_s)) + "\n")
        results.flush()


def run(made: inputs.Input, limit_s: int) -> dict[str, object]:
    """Run the command of an input, and return how it ended."""
    with tempfile.TemporaryDirectory(prefix="tracekit-fuzz-") as folder:
        for name, content in made.files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        command = [part.replace(inputs.FOLDER, folder) for part in made.command]
        began_s, before_kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # The process is ended by a signal when the limit is reached: a loop in C handles no other.
        resource.setrlimit(resource.RLIMIT_CPU, (int(began_s) + limit_s + 1, resource.RLIM_INFINITY))
        raised = ""
        try:
            done = cli_runner.tracekit(*command)
        except BaseException as error:  # noqa: BLE001  whatever a command raises is a result
            raised, done = f"{type(error).__name__}: {error}"[:_MAX_ERROR], None
        return {
            "kind": made.kind,
            "seed": made.seed,
            "code": None if done is None else done.returncode,
            "raised": raised,
            "stderr": "" if done is None else done.stderr.replace(folder, "DIR")[-_MAX_ERROR:],
            "is_json": done is None or done.returncode not in (0, 1) or _is_json(done.stdout, made.command),
            "cpu_s": round(time.process_time() - began_s, 2),
            "grown_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) // 1024,
        }


def _is_json(text: str, command: tuple[str, ...]) -> bool:
    if "json" not in command:
        return True
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
