"""The process that checks runs in the background (`dashboard.background_checks`): a request and an answer are a line.

It ends when the server does, or when no line has come for the seconds that its argument says.
"""

import json
import os
import queue
import select
import sys
import threading
from typing import Any

from dashboard import run_store
from dashboard.run_entry import RunEntry
from tracekit.errors import RuleError, TracekitError

_NICENESS = 10  # pages come first


def main() -> None:
    """Check the runs of standard input one after the other; write to standard output why each failed, or ''."""
    os.nice(_NICENESS)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, float(sys.argv[1])), daemon=True).start()
    while True:
        request = requests.get()
        error = _check(RunEntry(request["path"], request["path"], roots=tuple(request["roots"])))
        answers.write(json.dumps(error) + "\n")
        answers.flush()


def _read_requests(requests: "queue.SimpleQueue[dict[str, Any]]", watched_s: float) -> None:
    """Put requests into the queue; end the process, with the check that runs, where nobody waits for its result."""
    received = b""
    while select.select([0], [], [], watched_s)[0]:
        part = os.read(0, 1 << 16)
        if not part:
            break
        *lines, received = (received + part).split(b"\n")
        for request in filter(None, map(json.loads, lines)):
            requests.put(request)
    os._exit(0)  # the stored report is renamed when it is whole


def _check(entry: RunEntry) -> str:
    try:
        run_store.check(entry)
    except (TracekitError, RuleError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  the page of the run shows what crashed
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
