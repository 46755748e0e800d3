"""A process that runs one command after the other and states how each ended. Not a test.

Each input is way, kind and seed, divided by tabs, on a line of stdin; each result is a JSON object on a line of stdout.
A process that a command ends is started again by `runner`.
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

COMMAND, READ = "command", "read"
"""Ways to handle an input: its command and the library, or the library only, which takes a tenth of the time."""
_NOTHING_RUN = {"code": None, "raised": "", "stderr": "", "is_json": True, "contradiction": ""}
_MAX_ERROR = 400
_DRAW_CPU_S = 60
"""To make an input, which does not count; some are made of large recordings."""
_QUERIES = 8
"""Of so many inputs one is also queried in SQL, which starts a process."""
MOST_RESIDENT_BYTES = 3 << 29
"""Of a process between two inputs; one that has grown more is replaced."""


def main() -> None:
    """Run the inputs that stdin names."""
    limit_s, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    results = os.fdopen(os.dup(1), "w")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cli_runner.tracekit("check", "--sample", "--format", "json")  # imports do not count
    own_bytes = _address_space_bytes()
    for line in sys.stdin:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # to draw the input
        limit_cpu(_DRAW_CPU_S)
        before_s = _cpu_s()
        way, kind, seed = line.strip().split("\t")
        drawn = specified.drawn if kind in specified.KINDS else inputs.drawn
        made = drawn(kind, int(seed))
        resource.setrlimit(resource.RLIMIT_AS, (own_bytes + memory_bytes, resource.RLIM_INFINITY))
        result = run(made, limit_s) if way == COMMAND else read(made, limit_s)
        # An input may take what the limit leaves: addresses that earlier inputs took count, whether resident or not.
        is_full = _resident_bytes() > MOST_RESIDENT_BYTES or _address_space_bytes() > own_bytes + memory_bytes // 2
        result |= {"all_cpu_s": _cpu_s() - before_s, "is_full": is_full}
        results.write(json.dumps(result) + "\n")
        results.flush()


def read(made: inputs.Input, limit_s: int) -> dict[str, object]:
    """Read an input with the library only, and return what was wrong and what it took."""
    with tempfile.TemporaryDirectory(prefix="tracekit-fuzz-") as folder:
        _write(made, folder)
        before_s, before_bytes = _cpu_s(), _reset_peak()
        problem = _library(made, folder, limit_s)
        return {
            **_NOTHING_RUN,
            "kind": made.kind,
            "seed": made.seed,
            "cpu_s": round(_cpu_s() - before_s, 2),
            "grown_mib": (_peak_bytes() - before_bytes) >> 20,
            "library": problem,
        }


def run(made: inputs.Input, limit_s: int) -> dict[str, object]:
    """Run the command of an input, then the library on its trace, and return how both ended.

    What is lost without a finding and what the library raises are counted apart from the command's time and memory.
    """
    with tempfile.TemporaryDirectory(prefix="tracekit-fuzz-") as folder:
        _write(made, folder)
        command = [part.replace(inputs.FOLDER, folder) for part in made.command]
        began_s, before_bytes = _cpu_s(), _reset_peak()
        limit_cpu(limit_s)
        raised = ""
        try:
            stdin = made.files[inputs.QUERY].decode(errors="surrogateescape") if "-" in command else ""
            done = cli_runner.tracekit(*command, stdin=stdin)
        except BaseException as error:  # noqa: BLE001  whatever a command raises is a result
            raised, done = f"{type(error).__name__}: {error}"[:_MAX_ERROR], None
        ended_s, peak_bytes = _cpu_s(), _peak_bytes()
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
            "grown_mib": (peak_bytes - before_bytes) >> 20,
            "library": _library(made, folder, limit_s),
        }


def _write(made: inputs.Input, folder: str) -> None:
    for name, content in made.files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


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


def _cpu_s() -> float:
    """CPU time of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _reset_peak() -> int:
    """Resident bytes, from which the peak is measured again."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _resident_bytes()


def _peak_bytes() -> int:
    """Largest resident size since `_reset_peak`."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
