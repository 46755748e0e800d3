"""What scrubbing removed -> text."""

from tracekit.ingest.scrub import ScrubResult
from tracekit.ingest.scrub.secrets import KINDS


def as_text(done: ScrubResult) -> str:
    """Return what was removed (kinds and counts, never the words themselves), and what was not copied and why."""
    lines = [f"{done.out}: {_count(len(done.files), 'file')}, read again: nothing that should be gone is left in them"]
    lines += [
        f"  removed  {_count(distinct, KINDS[kind])} in {_count(places, 'place')}"
        for kind, (distinct, places) in done.removed.items()
    ]
    lines += [] if done.removed else ["  removed  nothing: no host, user or path was found"]
    lines += [f"  left out {name}: {reason}" for name, reason in done.left_out]
    return "\n".join(lines) + "\n"


def _count(number: int, noun: str) -> str:
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"
