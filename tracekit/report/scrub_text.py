"""What scrubbing removed -> text."""

from tracekit.ingest.scrub import ScrubResult
from tracekit.ingest.scrub.secrets import KINDS


def as_text(result: ScrubResult) -> str:
    """Kinds and counts of the text removed (never the text itself), and files not copied, with reasons."""
    lines = [f"{result.out}: {_count(len(result.files), 'file')}, checked again: no removed text is left in them"]
    lines += [
        f"  removed  {_count(distinct, KINDS[kind])} in {_count(places, 'place')}"
        for kind, (distinct, places) in result.removed.items()
    ]
    lines += [] if result.removed else ["  removed  nothing: no host, user or path found"]
    lines += [f"  left out {name}: {reason}" for name, reason in result.left_out]
    return "\n".join(lines) + "\n"


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
