"""Timelines: laid out once per run and window, then shared by everyone who looks at the run."""

import contextlib
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import streamlit as st

from dashboard import run_store
from dashboard.run_entry import RunEntry
from dashboard.run_store import LoadedRun
from tracekit.errors import TracekitError
from tracekit.model.intervals import Window
from tracekit.report import timeline
from tracekit.report.timeline_view import message, range_tables

MAX_SCENES = 6
MAX_PAIRS = 3
MAX_SEARCHES = 64
MAX_DETAILS = 512
MAX_RANGES = 32
MAX_RATED_RANKS = 16
"""Of more ranks no bandwidths and rates of ranges are read: that takes their traces."""
MAX_SEARCH_CHARACTERS = 200
DETAILS_TIMEOUT_S = 0.15


class LruCache:
    """The values used last, by key, each made once. Streamlit's cache would not let `make` report its progress."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._key_locks: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key, or make it; another thread that needs it waits meanwhile."""
        with self._lock:
            key_lock = self._key_locks.setdefault(key, threading.Lock())
        with key_lock:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
            value = make()
            with self._lock:
                self._values[key] = value
                while len(self._values) > self._max_entries:
                    oldest, _ = self._values.popitem(last=False)
                    self._key_locks.pop(oldest, None)
            return value


@dataclass(frozen=True, eq=False)
class OpenTimeline(LoadedRun):
    """A run, none of whose traces was read yet, and the scene of one window."""

    scene: timeline.Scene = field(kw_only=True)
    window: int = field(kw_only=True)
    about: Mapping[int, str] = field(default_factory=dict)
    """The ranks drawn if these are not all, each with what it is, such as "typical"."""
    _searches: LruCache = field(default_factory=lambda: LruCache(MAX_SEARCHES))
    _details: LruCache = field(default_factory=lambda: LruCache(MAX_DETAILS))
    _ranges: LruCache = field(default_factory=lambda: LruCache(MAX_RANGES))
    _rates: LruCache = field(default_factory=lambda: LruCache(MAX_RANGES))
    _paths: LruCache = field(default_factory=lambda: LruCache(MAX_RANGES))
    _reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "timeline-details"))

    def find(self, text: str) -> timeline.Matches:
        """Return the slices whose name contains `text`."""
        text = text[:MAX_SEARCH_CHARACTERS]
        matches: timeline.Matches = self._searches.get(text, lambda: timeline.find_by_name(self.scene, text))
        return matches

    prefix: ClassVar[str] = ""
    """What the names of the view, the range and the pins in the address begin with."""

    @property
    def zero_ns(self) -> int:
        """Moment at which displayed times are 0, in ns from the scene's start."""
        return 0

    def rank_name(self, rank: int) -> str:
        """Name of a rank of the scene."""
        return f"rank {rank}"

    def rank_of(self, rank: int) -> int:
        """Return the number of a rank of the scene in its run."""
        return rank

    @cached_property
    def header(self) -> dict[str, Any]:
        """Return the part of the browser's message that never changes: see `message.scene`."""
        return message.scene(self.scene)

    @property
    def initial_part(self) -> Window:
        """Return the part to show first, in ns from the scene's start: see `message.initial_part`."""
        return message.initial_part(self.scene)

    def details(self, track: int, slice_id: int) -> dict[str, Any] | None:
        """Return details and arrows of a slice for the browser, None while they are being read.

        Reading the tables of a rank can take seconds; the timeline keeps responding meanwhile. Raises what the read
        raised.
        """
        reading = self._details.get((track, slice_id), lambda: self._reader.submit(self._read, track, slice_id))
        try:
            details: dict[str, Any] = reading.result(DETAILS_TIMEOUT_S)
        except TimeoutError:
            return None
        return details

    def call_paths(self, rank: int, lane: int | None, window: Window) -> pl.DataFrame:
        """Return the host time of a rank in a window of the scene's clock: see `timeline.call_paths`."""

        def read() -> pl.DataFrame:
            with self.lock:
                return timeline.call_paths(self.run, self.scene, rank, window, lane)

        paths: pl.DataFrame = self._paths.get((rank, lane, window), read)
        return paths

    def place_of_op(self, rank: int, op_id: int) -> dict[str, Any] | None:
        """Place at which a host slice of a rank is drawn, as the browser selects it; None if it is not."""
        slices = timeline.slices_of(self.scene, rank, "ops", [op_id])
        return message.slice_place(self.scene, int(slices["track"][0]), op_id) if slices.height else None

    def range_tables(self, window: Window, timeout_s: float | None = DETAILS_TIMEOUT_S) -> dict[str, Any]:
        """Content of a range, for the browser; what is known of it after `timeout_s` (None: all of it)."""
        adding = self._ranges.get(window, lambda: self._reader.submit(timeline.range_totals, self.scene, window))
        reading = self._rates.get(window, lambda: self._reader.submit(self._read_rates, window))
        try:
            totals: timeline.RangeTotals = adding.result(timeout_s)
        except TimeoutError:
            return range_tables.unknown(self.scene, window)
        try:
            rates = reading.result(timeout_s)
        except TimeoutError:
            return self._tables_of(totals, None, is_reading=True)
        except TracekitError:
            rates = None
        return self._tables_of(totals, rates, is_reading=False)

    def _tables_of(
        self, totals: timeline.RangeTotals, rates: pl.DataFrame | None, *, is_reading: bool
    ) -> dict[str, Any]:
        return range_tables.tables(self.scene, totals, rates, is_reading=is_reading, rank_name=self.rank_name)

    def _read_rates(self, window: Window) -> pl.DataFrame | None:
        if self.scene.tracks["rank"].n_unique() > MAX_RATED_RANKS:
            return None
        with self.lock:
            return timeline.range_rates(self.run, self.scene, window)

    def _read(self, track: int, slice_id: int) -> dict[str, Any]:
        with self.lock:
            details = timeline.details(self.run, self.scene, track, slice_id)
            arrows = timeline.arrows(self.run, self.scene, track, slice_id)
        return {"details": message.details(self.scene, details), "arrows": message.arrows(self.scene, arrows)}


def open_timeline(
    entry: RunEntry,
    window: int,
    on_progress: Callable[[int, int], None],
    *,
    open_run: LoadedRun | None = None,
    ranks: tuple[int, ...] | None = None,
) -> OpenTimeline:
    """Return the timeline of a window: mapped if it was laid out before, else laid out now. Raises TracekitError.

    `on_progress(done, total)` is called for each trace that is laid out. `open_run` is the run if it is open
    already, `ranks` are those to draw.
    """

    def laid_out() -> OpenTimeline:
        loaded = open_run or run_store.load(entry)
        # The mapped file of a private run lasts as long as the scene, under no name that anyone could open.
        temporary = tempfile.TemporaryDirectory() if entry.is_private else contextlib.nullcontext()
        with loaded.lock, temporary as name:
            folder = Path(name) if name else None
            scene = timeline.open_scene(loaded.run, window, ranks=ranks, folder=folder, on_progress=on_progress)
        return OpenTimeline(loaded.run, loaded.lock, scene=scene, window=window)

    key = (entry.path, run_store.stamp_seen(entry), window, ranks)
    opened: OpenTimeline = scenes(is_private=entry.is_private).get(key, laid_out)
    return opened


def scenes(*, is_private: bool) -> LruCache:
    """Return the open timelines: those of everyone, or of private runs those of this session."""
    return _cache_of_session("own_scenes", MAX_SCENES) if is_private else _shared_scenes()


def pairs(*, is_private: bool) -> LruCache:
    """Return the open pairs of timelines likewise: each has the slices of a rank in memory."""
    return _cache_of_session("own_pairs", MAX_PAIRS) if is_private else _shared_pairs()


def _cache_of_session(name: str, max_entries: int) -> LruCache:
    cache: LruCache = st.session_state.setdefault(name, LruCache(max_entries))
    return cache


@st.cache_resource(show_spinner=False)
def _shared_scenes() -> LruCache:
    return LruCache(MAX_SCENES)


@st.cache_resource(show_spinner=False)
def _shared_pairs() -> LruCache:
    return LruCache(MAX_PAIRS)
