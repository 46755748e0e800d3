"""One rank each of two runs as one timeline, aligned by the start of a step of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import polars as pl

from dashboard.components.timeline import timeline_store
from dashboard.components.timeline.timeline_store import OpenTimeline
from tracekit.model import escaping
from tracekit.model.intervals import Window
from tracekit.report import timeline
from tracekit.report.timeline_view import message, range_tables
from tracekit.sync import alignment

LETTERS = ("A", "B")
MAX_RUN_NAME = 60


@dataclass(frozen=True)
class PairStep:
    """A step of one side: its run's name, its rank, its number, when it begins on its run's clock, and its length."""

    run: str
    rank: int
    step: int
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, eq=False)
class OpenPair(OpenTimeline):
    """Two open timelines side by side. `run` and `lock` are those of the first."""

    pair: timeline.SideBySide = field(kw_only=True)
    opened: tuple[OpenTimeline, OpenTimeline] = field(kw_only=True)
    steps: tuple[PairStep, PairStep] = field(kw_only=True)

    prefix: ClassVar[str] = "pair_"

    @property
    def zero_ns(self) -> int:
        """Start of both steps, in ns from the scene's start."""
        return self.steps[0].start_ns - self.scene.span[0]

    @property
    def compared_part(self) -> Window:
        """Return the time of the longer step, in ns from the scene's start."""
        return self.zero_ns, self.zero_ns + max(step.duration_ns for step in self.steps)

    @property
    def initial_part(self) -> Window:
        """Return the longer step with some context, in ns from the scene's start."""
        return message.around(self.scene, self.compared_part)

    @cached_property
    def header(self) -> dict[str, Any]:
        """Return the part of the browser's message that never changes, with the lanes of both in pairs."""
        scene = message.scene(self.scene)
        by_number = {track["track"]: track for track in scene["tracks"]}
        tracks = []
        for order, lane in enumerate(self.pair.lanes.iter_rows(named=True)):
            track, letter = by_number[lane["track"]], LETTERS[lane["side"]]
            group = escaping.inert(lane["group"], message.MAX_NAME)
            tracks.append(track | {"group": group, "label": f"{letter} · {track['label']}", "order": order})
        return scene | {
            "tracks": tracks,
            "steps": self.compared_part,
            "pair": {
                "zero": self.zero_ns,
                "names": [
                    f"{self.rank_name(side)} · {escaping.inert(step.run, MAX_RUN_NAME)}"
                    for side, step in enumerate(self.steps)
                ],
                "steps": [f"step {step.step}" for step in self.steps],
            },
        }

    def rank_name(self, rank: int) -> str:
        """Name of a rank of the scene, by its side and its rank in its run: "A · rank 3"."""
        return f"{LETTERS[rank]} · rank {self.steps[rank].rank}"

    def rank_of(self, rank: int) -> int:
        """Return the rank that a side draws of its run."""
        return self.steps[rank].rank

    def details(self, track: int, slice_id: int) -> dict[str, Any] | None:
        """Return details and arrows of a slice, as its own timeline does, where both ends of an arrow are drawn."""
        side = self.pair.side_of(track)
        details = self.opened[side].details(self.pair.own_track(track), slice_id)
        if details is None:
            return None
        rows = [row | {"slice": self._move_place(side, row["slice"])} for row in details["details"]]
        arrows = [self._moved_arrow(side, arrow) for arrow in details["arrows"]]
        return {"details": rows, "arrows": [arrow for arrow in arrows if arrow["from"] and arrow["to"]]}

    def call_paths(self, rank: int, lane: int | None, window: Window) -> pl.DataFrame:
        """Return the host time of a side in a window of the scene's clock."""
        return self.opened[rank].call_paths(self.steps[rank].rank, lane, self.pair.to_own_clock(rank, window))

    def place_of_op(self, rank: int, op_id: int) -> dict[str, Any] | None:
        """Place at which a host slice of a side is drawn."""
        return self._move_place(rank, self.opened[rank].place_of_op(self.steps[rank].rank, op_id))

    def _later_ns(self, side: int) -> int:
        """Distance by which times of a side are later here, both counted from the scene's start."""
        shift_ns = self.pair.shift_ns if side else 0
        return self.opened[side].scene.span[0] + shift_ns - self.scene.span[0]

    def _move_place(self, side: int, place: Mapping[str, Any] | None) -> dict[str, Any] | None:
        track = self.pair.track_of(side, place["track"]) if place else None
        if place is None or track is None:
            return None
        return {**place, "track": track, "start": place["start"] + self._later_ns(side)}

    def _moved_arrow(self, side: int, arrow: Mapping[str, Any]) -> dict[str, Any]:
        later_ns = self._later_ns(side)
        times = {name: arrow[name] + later_ns for name in ("from_ns", "to_ns")}
        return {**arrow, **times, **{end: self._move_place(side, arrow[end]) for end in ("from", "to")}}

    def _tables_of(
        self, totals: timeline.RangeTotals, rates: pl.DataFrame | None, *, is_reading: bool
    ) -> dict[str, Any]:
        first_of_second = self.opened[0].scene.names.height
        return range_tables.tables(
            self.scene,
            totals,
            rates,
            is_reading=is_reading,
            rank_name=self.rank_name,
            owner=lambda name_id: f"{LETTERS[name_id >= first_of_second]} · ",
        )

    def _read_rates(self, window: Window) -> pl.DataFrame | None:
        """Return the rates of both sides, each read from its own run."""
        parts = []
        for number, (side, opened) in enumerate(zip(self.pair.sides, self.opened, strict=True)):
            side_scene = replace(side.scene, parts=(side.part,))
            with opened.lock:
                rates = timeline.range_rates(opened.run, side_scene, self.pair.to_own_clock(number, window))
            parts.append(rates.with_columns(pl.lit(number, pl.Int64).alias("rank")))
        return pl.concat(parts)


def open_pair(
    opened: tuple[OpenTimeline, OpenTimeline], steps: tuple[PairStep, PairStep], *, is_private: bool
) -> OpenPair:
    """Return two timelines side by side. Raises KeyError if one does not draw the rank of its step."""
    first, second = (
        timeline.Side(side.scene, step.rank, step.start_ns) for side, step in zip(opened, steps, strict=True)
    )

    def lay_out() -> OpenPair:
        pair = timeline.side_by_side(first, second)
        run, lock, window = opened[0].run, opened[0].lock, opened[0].window
        return OpenPair(run, lock, scene=pair.scene, window=window, pair=pair, opened=opened, steps=steps)

    key = (*(side.scene.key for side in opened), steps)
    pair: OpenPair = timeline_store.pairs(is_private=is_private).get(key, lay_out)
    return pair


def pair_step(opened: OpenTimeline, run: str, row: Mapping[str, Any]) -> PairStep:
    """Return a step of a breakdown (a row with window, rank, step, start_ns, duration_ns) on the clock of the run."""
    times = pl.DataFrame([{name: row[name] for name in ("window", "rank", "start_ns")}])
    start_ns = alignment.on_run_clock(times, opened.scene.offsets, ("start_ns",))["start_ns"].item()
    return PairStep(run, row["rank"], row["step"], start_ns, row["duration_ns"])
