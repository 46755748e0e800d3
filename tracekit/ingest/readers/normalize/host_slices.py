"""Host slices: which encloses which, and the step, phase and FSDP unit that each belongs to."""

import functools
import json
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import conventions
from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.normalize import event_categories, name_patterns, steps
from tracekit.ingest.readers.normalize.columns import OpInputs
from tracekit.ingest.readers.normalize.name_patterns import HostNames
from tracekit.ingest.readers.normalize.steps import Steps
from tracekit.model import nesting
from tracekit.model.nesting import Flags, Ints

_KIND = {kind: index for index, kind in enumerate(event_categories.HOST_KINDS)}
_PHASES = pl.Series("phase", conventions.PHASES)
_PHASE = {phase: index for index, phase in enumerate(conventions.PHASES)}


@dataclass(frozen=True)
class Host:
    """All host slices of a trace as arrays, sorted by lane, start and falling end; a slice's id is its index.

    `row` is a slice's place in the file, `name_id` its name's place in `names`, `called_with` its inputs' in `inputs`,
    `parent` the slice around it (-1: none).
    `step` is an index into `steps`, `phase` into conventions.PHASES, `span` the FSDP span around it, by id; -1: none.
    """

    names: HostNames
    inputs: list[OpInputs]
    steps: Steps
    row: Ints
    name_id: Ints
    kind: npt.NDArray[np.uint8]
    lane: Ints
    start_ns: Ints
    end_ns: Ints
    external_id: Ints
    correlation: Ints
    sequence: Ints
    forward_thread: Ints
    called_with: Ints
    parent: Ints
    crossings: tuple[Ints, Ints]
    """Slices that end after one in which they began, and the latter."""
    step: Ints
    phase: Ints
    span: Ints

    def is_kind(self, kind: str) -> Flags:
        """Flag the slices of a kind of `event_categories.HOST_KINDS`."""
        return np.equal(self.kind, _KIND[kind])

    @property
    def size_bytes(self) -> int:
        """Memory that the slices take."""
        return sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))

    def table(self) -> pl.DataFrame:
        """Return the ops table."""
        return pl.DataFrame(
            {
                "id": np.arange(len(self.row), dtype=np.int64),
                "parent_id": id_column(self.parent),
                "lane": self.lane,
                "name": self.names.name.gather(self.name_id),
                "kind": pl.Series(event_categories.HOST_KINDS).gather(self.kind),
                "start_ns": self.start_ns,
                "dur_ns": self.end_ns - self.start_ns,
                "forward_id": id_column(_forward(self)),
                **self._inputs(),
            }
        ).with_columns(self.context(np.arange(len(self.row), dtype=np.int64)))

    def context(self, ids: Ints, otherwise: Ints | None = None) -> list[pl.Series]:
        """Return step, phase, unit and span of some slices; from the fallback where a slice has none (or id -1)."""
        step, phase, span = (self._at(which, ids, otherwise) for which in (self.step, self.phase, self.span))
        of_span = np.where(span >= 0, self.name_id[np.maximum(span, 0)] if len(self.name_id) else 0, -1)
        return [
            _gather(pl.Series("step", self.steps.step), step),
            _gather(_PHASES, phase),
            _gather(self.names.unit.alias("unit"), of_span),
            _gather(self.names.span.alias("span"), of_span),
        ]

    def step_of(self, ids: pl.Series) -> Ints:
        """Return the index in `steps` of the step of each slice; -1 for none, and where `ids` is null."""
        return self._at(self.step, ids.fill_null(-1).to_numpy(), None)

    def find(self, kind: str, field: str, sought: Ints) -> Ints:
        """Return the first slice of a kind with each of the `sought` ids in a field; -1 where there is none."""
        ids = np.flatnonzero(self.is_kind(kind))
        first = first_of(getattr(self, field)[ids], sought)
        return np.where(first >= 0, ids[np.maximum(first, 0)], -1) if len(ids) else np.full(len(first), -1, np.int64)

    def _inputs(self) -> dict[str, pl.Series]:
        """Return the columns that describe the inputs of each slice, as JSON."""
        texts, sizes = functools.cache(_plain), functools.cache(_sizes)
        read = {"shapes": sizes, "dtypes": texts, "arguments": texts, "strides": sizes}
        return {
            name: pl.Series([text(raw) for raw in raws], dtype=pl.String).gather(self.called_with)
            for (name, text), raws in zip(read.items(), zip(*self.inputs, strict=True), strict=True)
        }

    def _at(self, which: Ints, ids: Ints, otherwise: Ints | None) -> Ints:
        if not len(which):
            return np.full(len(ids), -1, np.int64)
        picked = np.where(ids >= 0, which[ids], -1)
        return picked if otherwise is None else np.where(picked >= 0, picked, self._at(which, otherwise, None))


def build(frame: pl.DataFrame, distinct: pl.Series, inputs: list[OpInputs], lanes: Ints, lost_steps: Ints) -> Host:
    """Build the slices of `frame` (columns of `Events.host`, and row); `lanes` numbers the threads in use.

    `lost_steps` are the numbers of steps whose marks were left out.
    """
    names_info = name_patterns.host_names(distinct)
    start, dur = frame["start_ns"].to_numpy(), frame["dur_ns"].to_numpy()
    lane = lanes[frame["lane"].to_numpy()] if len(frame) else np.empty(0, np.int64)
    recorded_kind = frame["kind"].to_numpy()
    # Slices with equal times are ordered from the outermost to the innermost: the profiler numbers operators and
    # annotations as they start; Python calls them, and they call the runtime.
    is_numbered = (recorded_kind == _KIND["cpu_op"]) | (recorded_kind == _KIND["annotation"])
    unnumbered = np.where(recorded_kind == _KIND["python"], np.int64(-1), np.iinfo(np.int64).max)
    call_number = np.where(is_numbered, frame["external_id"].to_numpy(), unnumbered)
    order = nesting.order(lane, start, start + dur, call_number)
    lane, start, dur = lane[order], start[order], dur[order]
    name_id = frame["name"].to_numpy()[order].astype(np.int64)
    kind = np.where(
        names_info.is_module[name_id] & (recorded_kind[order] == _KIND["cpu_op"]),
        np.uint8(_KIND["annotation"]),  # a span of `record --modules`: torch writes its fast spans as operators
        recorded_kind[order],
    )
    parent, late, around = nesting.parents_and_crossings(lane, start, start + dur)
    marked = (kind == _KIND["annotation"]) | (kind == _KIND["cpu_op"])
    is_operator = kind == _KIND["cpu_op"]
    host_steps = steps.find(names_info, name_id, marked, is_operator, start, start + dur, lost_steps)
    is_span = names_info.span.is_not_null().to_numpy()[name_id] & (kind == _KIND["annotation"])
    return Host(
        names=names_info,
        inputs=inputs,
        steps=host_steps,
        row=frame["row"].to_numpy()[order],
        name_id=name_id,
        kind=kind,
        lane=lane,
        start_ns=start,
        end_ns=start + dur,
        **{
            name: frame[name].to_numpy()[order] for name in ("external_id", "correlation", "sequence", "forward_thread")
        },
        called_with=frame["inputs"].to_numpy()[order].astype(np.int64),
        parent=parent,
        crossings=(late, around),
        step=host_steps.at(start),
        phase=_phase(names_info, name_id, parent, start, start + dur),
        span=nesting.nearest(parent, is_span),
    )


def id_column(ids: Ints, name: str = "") -> pl.Series:
    """Return indices as a column, null where -1."""
    column = pl.Series(name, ids, pl.Int64)
    missing = column < 0
    return column.set(missing, None) if missing.any() else column


def first_of(ids: Ints, sought: Ints) -> Ints:
    """The first place of each of `sought` in `ids`; -1 where it is missing, and for 0, which names nothing.

    >>> first_of(np.array([7, 0, 5, 7]), np.array([5, 7, 8, 0])).tolist()
    [2, 0, -1, -1]
    """
    if not len(ids):
        return np.full(len(sought), -1, np.int64)
    distinct, first = np.unique(ids, return_index=True)
    place = np.minimum(np.searchsorted(distinct, sought), len(distinct) - 1)
    return np.where((distinct[place] == sought) & (sought != 0), first[place], -1)


def _gather(values: pl.Series, indices: Ints) -> pl.Series:
    return values.gather(id_column(indices)) if len(values) else values.clear().extend_constant(None, len(indices))


def _plain(raw: bytes) -> str | None:
    """Return a JSON value without the blanks of its file; None for none, and for what is no JSON."""
    try:
        return json.dumps(untrusted_json.parse(raw.decode("utf-8", "replace"))) if raw else None
    except ValueError:
        return None


_SIZES, _TOO_LARGE = re.compile(r"\[[\[\], 0-9]*\]"), re.compile(r"[0-9]{19}")


def _sizes(raw: bytes) -> str | None:
    """Return shapes or strides as `_plain` does; None where a size is no integer of at most 18 digits."""
    text = _plain(raw)
    return text if text is not None and _SIZES.fullmatch(text) and not _TOO_LARGE.search(text) else None


def _phase(names_info: HostNames, name_id: Ints, parent: Ints, start: Ints, end: Ints) -> Ints:
    """Return each slice's phase: by the recorder's spans around its start on any thread, else by autograd's names."""
    phase = np.full(len(name_id), -1, np.int64)
    for flags, name in ((names_info.backward, conventions.BACKWARD), (names_info.optimizer, conventions.OPTIMIZER)):
        if flags.any():
            phase[nesting.nearest(parent, flags[name_id]) >= 0] = _PHASE[name]
    if names_info.phase.null_count() == len(names_info.phase):
        return phase
    code = names_info.phase.replace_strict(_PHASE, return_dtype=pl.Int64, default=None).fill_null(-1).to_numpy()
    marks = np.flatnonzero(code[name_id] >= 0)
    marks = marks[np.argsort(start[marks], kind="stable")]
    index = np.searchsorted(start[marks], start, side="right") - 1
    inside = (index >= 0) & (start < end[marks][np.maximum(index, 0)]) if len(marks) else np.zeros(len(name_id), bool)
    return np.where(inside, code[name_id][marks][np.maximum(index, 0)], phase) if len(marks) else phase


def _forward(host: Host) -> Ints:
    """Return, for each backward op, the forward op whose gradient it computes, by autograd's sequence number; else -1.

    Of the ops with one number on the forward thread the last to start made the node; of those in backward all count.
    """
    forward = np.full(len(host.row), -1, np.int64)
    forward_ops = np.flatnonzero((host.sequence > 0) & (host.forward_thread == 0))
    runs = np.flatnonzero((host.sequence > 0) & (host.forward_thread != 0))
    if len(forward_ops) and len(runs):
        forward_ops = forward_ops[np.argsort(-host.start_ns[forward_ops], kind="stable")]
        first = first_of(host.sequence[forward_ops], host.sequence[runs])
        earlier = (first >= 0) & (host.start_ns[forward_ops][first] <= host.start_ns[runs])
        forward[runs[earlier]] = forward_ops[first[earlier]]
    return forward
