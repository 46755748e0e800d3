"""Numbers with their names, read from what a person sees: pages of the dashboard, the HTML report, commands' JSON.

A surface is read as text, so that a number which it computes by itself is seen, too. Not a test.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import unescape
from typing import Any, NamedTuple

from tracekit.model import units

DURATION, SHARE, SIZE = r"[\d.,]+ (?:ns|µs|ms|s)\b", r"[\d.]+%", r"[\d.,]+ (?:B|KiB|MiB|GiB)\b"
SENTENCES = {
    "mean step": (
        rf"(?<=of )({DURATION}) a step(?!, )",
        rf"mean step (?:of )?({DURATION})",
        rf"({DURATION}) a step, median",
    ),
    "median step": (rf"median (?:step |step time )?({DURATION})", rf"A step takes ({DURATION}) \(median, slowest rank"),
    "exposed share of step": (
        rf"({SHARE}) of the step is exposed communication \(",
        rf"({SHARE}) exposed communication",
    ),
    "compute share of step": (rf"({SHARE}) compute\b",),
    "idle share of step": (rf"({SHARE}) idle\b",),
    "blocked per save, median": (
        rf"blocks training for ({DURATION}) \(median\)",
        rf"blocks training for ({DURATION})[^(]* \(median of",
    ),
    "blocked share of training, median": (
        rf"\(median\), ({SHARE}) of training time",
        rf"({SHARE}) of training time \(median of",
    ),
    "peak allocated": (rf"allocates(?: most)?: ({SIZE}) at its peak",),
    "pipeline bubble": (rf"bubble is ({SHARE}) of a step",),
    "clock error": (rf"clock error, ({DURATION})",),
}
"""What a name's number stands next to, wherever it is written."""
METRICS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "step_time_ns": ("median step", units.duration),
    "checkpoint_blocked_ns": ("blocked per save, median", units.duration),
    "checkpoint_overhead_ratio": ("blocked share of training, median", units.share),
}
"""The metrics of `compare` by their names here, with how a value is written."""
_TAG = re.compile(r"<(?:style|script)\b.*?</(?:style|script)>|<[^>]*>", re.DOTALL)
_LARGE = re.compile(r"<div><b>([^<]*)</b>(?:<i[^>]*></i>)?<span>([^<]*)</span></div>")
_CARD = re.compile(
    r'<div class="tk-finding"><h3>.*?<span>(?P<sentence>[^<]*)</span></h3>.*?<span class="tk-code">(?P<id>[^<]*)</span>'
)
_LABELS = {
    "step time, median": "median step",
    "compute": "compute share of step",
    "exposed communication": "exposed share of step",
    "idle": "idle share of step",
}
_UNITS = {"ns": 1.0, "µs": 1e3, "ms": 1e6, "s": 1e9, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_FORMAT = re.compile(r"%\.?\d*[fdg]\s?(?P<unit>\S*)")
_COLUMNS_OF_TABLES = {"start_ns"}
"""Columns whose zero a table chooses, such as the begin of the run."""


class ShownNumber(NamedTuple):
    """A number with its name and the place where it is written."""

    name: str
    text: str
    place: str


def of_html(html: str, place: str) -> Iterator[ShownNumber]:
    """Numbers of a page: large ones by their labels, findings by their ids, in sentences by the words next to them."""
    for text, label in _LARGE.findall(html):
        yield ShownNumber(_LABELS.get(unescape(label), unescape(label)), unescape(text), place)
    for card in _CARD.finditer(html):
        yield ShownNumber(f"finding {card['id']}", unescape(card["sentence"]), place)
    yield from of_text(unescape(_TAG.sub("\n", html)), place)


def of_text(text: str, place: str) -> Iterator[ShownNumber]:
    """Numbers in sentences, by the words next to them."""
    words = re.sub(r"\s+", " ", text)
    for name, patterns in SENTENCES.items():
        for pattern in patterns:
            yield from (ShownNumber(name, match[1], place) for match in re.finditer(pattern, words))


def of_report(document: dict[str, Any], place: str) -> Iterator[ShownNumber]:
    """Numbers of the JSON of `check`: of findings and of the table of steps."""
    for finding in document["findings"]:
        yield ShownNumber(f"finding {finding['id']}", finding["sentence"], place)
        yield from of_text(finding["message"], place)
    for row in document["summary"]:
        yield from _of_row(row, row, place)


def of_metric(change: dict[str, Any], place: str) -> Iterator[ShownNumber]:
    """Median of a metric of the JSON of `compare`, where other surfaces have it in words."""
    name, text = METRICS.get(change["metric"], ("", units.duration))
    if name:
        yield ShownNumber(name, text(change["reference"]), place)


def of_frame(frame: Any, place: str) -> Iterator[ShownNumber]:
    """Numbers of a table of a page (an element of AppTest), each named by its column and the row's rank and step."""
    formats = {
        name: column.get("type_config", {}).get("format") or ""
        for name, column in json.loads(frame.proto.columns or "{}").items()
    }
    for row in frame.value.to_dict("records"):
        values = {}
        for name, value in row.items():
            unit = _FORMAT.search(formats.get(name, ""))
            scale = _UNITS.get(unit["unit"], 1.0) if unit else 1.0
            is_number = isinstance(value, int | float) and value == value
            values[name] = value * scale if is_number else value
        yield from _of_row(row, values, place)


def values_by_name(shown: Iterable[ShownNumber]) -> dict[str, dict[str, set[str]]]:
    """Values by the name of the number, and the places that have each."""
    names: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for number in shown:
        names[number.name][number.text].add(number.place)
    return names


def _of_row(row: dict[str, Any], values: dict[str, Any], place: str) -> Iterator[ShownNumber]:
    """Numbers of a row of the breakdown by rank or step: its parts mean the same in every table."""
    if "duration_ns" not in row or "compute_ns" not in row:
        return
    step = row.get("step")
    key = f"rank {row['rank']}, " + (f"step {step:.0f}" if step is not None and step == step else "all steps")
    for column, value in values.items():
        if column.endswith("_ns") and column not in _COLUMNS_OF_TABLES and isinstance(value, int | float):
            yield ShownNumber(f"{column} of {key}", units.duration(value), place)
