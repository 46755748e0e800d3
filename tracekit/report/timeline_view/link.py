"""What a link of the dashboard says about the timeline: the part in view, a range with a note, pins, a finding."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from tracekit.model.intervals import Window

MAX_NOTE = 200
_RANGE = re.compile(r"(\d{1,16})-(\d{1,16})\Z")
_PINS = re.compile(r"\d{1,6}(-\d{1,6})*\Z")


@dataclass(frozen=True)
class Link:
    """A link's parameters; times are in ns from the start of the scene. What makes no sense is left out."""

    part: Window | None = None
    range: Window | None = None
    note: str = ""
    pins: str = ""
    finding: str = ""
    prefix: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str], span_ns: int, prefix: str = "") -> "Link":
        """Return the link of the parameters of an address, to a scene of this length.

        The names of its parameters begin with `prefix`, except for the finding.
        """
        of_view = {name: parameters.get(prefix + name, "") for name in ("from", "to", "range", "note", "pins")}
        selected, pins = _RANGE.match(of_view["range"]), of_view["pins"]
        return cls(
            _window(of_view["from"], of_view["to"], span_ns),
            _window(selected[1], selected[2], span_ns) if selected else None,
            of_view["note"][:MAX_NOTE],
            pins if _PINS.match(pins) else "",
            parameters.get("finding", ""),
            prefix,
        )

    @property
    def address(self) -> str:
        """The parameters that the browser reads, as the query of an address."""
        parameters = {"range": f"{self.range[0]}-{self.range[1]}" if self.range else "", "note": self.note}
        return urlencode(
            {self.prefix + name: text for name, text in {**parameters, "pins": self.pins}.items() if text}, safe="-"
        )


def _window(start: str, end: str, span_ns: int) -> Window | None:
    if not (start.isascii() and start.isdigit() and end.isascii() and end.isdigit()):
        return None
    if max(len(start), len(end)) > 16:
        return None
    start_ns, end_ns = int(start), min(int(end), span_ns)
    return (start_ns, end_ns) if start_ns < end_ns else None
