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

from tests.fuzz import contradictions, inputs, library, specified
from tests.support import cli_runner

_MAX_ERROR = 400
_DRAW_CPU_S = 60
"""To make an input, which does not count; some are made of large recordings."""
_QUERIES = 8
"""Of so many inputs one is also queried in SQL, which starts a process."""


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
        limit_cpu(_DRAW_CPU_S)
        drawn = specified.drawn if kind in specified.KINDS else inputs.drawn
        results.write(json.dumps(run(drawn(kind, int(seed)), limit_s)) + "\n")
        results.flush()


def run(made: inputs.Input, limit_s: int) -> dict[str, object]:
    """Run the command of an input, then the library on its trace, and return how both ended.

    What is lost without a finding and what the library raises are counted apart from the command's time and memory.
    """
    with tempfile.TemporaryDirectory(prefix="tracekit-fuzz-") as folder:
        for name, content in made.files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        command = [part.replace(inputs.FOLDER, folder) for part in made.command]
        began_s, before_kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        limit_cpu(limit_s)
        raised = ""
        try:
            stdin = made.files[inputs.QUERY].decode(errors="surrogateescape") if "-" in command else ""
            done = cli_runner.tracekit(*command, stdin=stdin)
        except BaseException as error:  # noqa: BLE001  whatever a command raises is a result
            raised, done = f"{type(error).__name__}: {error}"[:_MAX_ERROR], None
        ended_s, after_kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        is_json = done is None or done.returncode not in (0, 1) or _is_json(done.stdout, made.command)
        is_report = done is not None and done.returncode in (0, 1) and is_json and made.command[0] == "check"
        return {
            "kind": made.kind,
            "seed": made.seed,
            "code": None if done is None else done.returncode,
            "raised": raised,
            "stderr": "" if done is None else done.stderr.replace(folder, "DIR")[-_MAX_ERROR:],
            "is_json": is_json,
            "contradiction": contradictions.of_report(json.loads(done.stdout)) if done and is_report else "",
            "cpu_s": round(ended_s - began_s, 2),
            "grown_mib": (after_kib - before_kib) // 1024,
            "library": _library(made, folder, limit_s),
        }


def limit_cpu(limit_s: int) -> None:
    """End the process by a signal when it has used so much more CPU time: a loop in C handles no other limit."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + limit_s + 1, resource.RLIM_INFINITY))


def _library(made: inputs.Input, folder: str, limit_s: int) -> str:
    """Return what is wrong with what the library does with a trace: lost events, an exception; "" if nothing is."""
    if made.kind not in library.TRACES:
        return ""
    limit_cpu(3 * limit_s)  # several calls
    try:
        return library.problem(made.kind, Path(folder), is_queried=made.seed % _QUERIES == 0).replace(folder, "DIR")
    except BaseException as error:  # noqa: BLE001  as above
        return f"{type(error).__name__}: {error}"[:_MAX_ERROR]


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
