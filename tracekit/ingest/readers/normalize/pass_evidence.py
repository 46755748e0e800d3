"""Evidence on what repeats in a recording without marked steps: iterations of a loop, or layers of one pass.

Work that repeats looks the same in both. Repetitions are layers unless the evidence for iterations outweighs that for
layers by `ENOUGH`.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.ingest.readers.normalize.host_slices import Host
from tracekit.model import nesting, repetitions, units
from tracekit.model.nesting import Flags, Ints
from tracekit.model.repetitions import Repetition

DECISIVE, STRONG, MODERATE, WEAK = 8, 4, 2, 1
IN_EACH = AROUND_EACH, ROOT_IN_EACH = "annotation_around_each", "root_module_in_each"
ENOUGH = STRONG
"""One strong piece of evidence, or several weaker ones: a layer may also synchronize, and have equal parts."""

_NEARLY_ALL, _ALMOST_ALL = 0.9, 0.97
_SAME_MODULES, _OTHER_MODULES = 0.8, 0.5
_LEAST_INSIDE = 0.5
"""Share of a pass inside a span around it: what comes before and after a call of the model belongs to its iteration."""
_MOST_LAYERS = 128
_FEW_PARTS = 3
_STORED, _RETURNED = 0.3, 0.02
"""Of what a pass allocates: a layer stores a third and more for its backward pass, a cache of keys and values less."""

_STEM = r"^(.[^\[({:=\d]*)"
"""What names of annotations share: servers append numbers of requests and tokens, as in `step[DECODE bs=4]`,
`execute_context_1(512)_generation_3(3)` (github.com/vllm-project/vllm, github.com/sgl-project/sglang)."""
_PART = re.compile(r"(?i)layer|block|expert|attention|attn|mlp|stage|unit|compile|inductor|dynamo")
"""Names of spans around a part of a model. Layers that are compiled one by one share one name, as iterations do."""
_LOOP = re.compile(r"(?i)generat|decod|serv|loop|train|epoch|sampl|denois|bench|profil|warm|steps|tokens|main|run")
_FORWARD = re.compile(r"(?i)forward|encode|decoder|model|block|layer|network|transformer|_call_impl")
_DATA_LOADING = r"(?i)dataloader.*(__next__|_next_data)"
_INPUT = r"(?i)embedding|randn|randint|normal_kernel"
_OF_LAYERS = r"(?i)rotary|rope|position"
_ENCODED = r"^aten::(arange|linspace|full|sin|cos|lift_fresh)$"
"""Encodings of the time of a diffusion, or of the position, of a model's input. Few layers make their own."""
_LARGE_BYTES = 64
"""Layers may copy a constant of a few bytes to the device."""
_RESULT = r"(?i)argmax|multinomial|cross_entropy|nll_loss|mse_loss|l1_loss|(^|[^a-zA-Z])sampl|SamplingFrom"
_OPTIMIZER = r"(?i)multi_tensor_apply|_foreach_|adam|lamb_|optimizer|fused_sgd"
_BACKWARD = r"(?i)backward|bwd|dgrad|wgrad|grad_?input"
_TO_DEVICE, _TO_HOST = r"(?i)memcpy.*(htod|hosttodevice)", r"(?i)memcpy.*(dtoh|devicetohost)"
_DEVICE_WAIT = r"^(cuda|hip)DeviceSynchronize"
_HOST_WAIT = r"^(cuda|hip)(Stream|Event)Synchronize|^aten::_local_scalar_dense"


@dataclass(frozen=True)
class Evidence:
    """What a recording shows about its repetitions: for iterations if `weight` is positive, else for layers."""

    name: str
    sentence: str
    weight: int


@dataclass(frozen=True)
class Recording:
    """What can be evidence: host slices, the main lane's work in order, all activities, and what was allocated when.

    `issued` is the slice that issued each piece of work; None where that is not known of all.
    """

    host: Host
    work: pl.DataFrame
    activities: pl.DataFrame
    memory: pl.DataFrame

    @cached_property
    def codes(self) -> Ints:
        """The name of each piece of work, as a number."""
        return self.work["name"].rank("dense").cast(pl.Int64).to_numpy()

    @cached_property
    def issuer_slices(self) -> Ints | None:
        """The host slice that issued each piece of work."""
        return None if self.work["host_id"].null_count() else self.work["host_id"].to_numpy()

    @cached_property
    def begin_ns(self) -> Ints:
        """When each piece of work was issued, or, where that is not known of all, when it began."""
        if self.issuer_slices is None:
            return self.work["start_ns"].to_numpy()
        return np.maximum.accumulate(self.host.start_ns[self.issuer_slices])

    @cached_property
    def spans(self) -> "Spans":
        """The host slices on the issuing threads that mark parts of the program: annotations, modules and functions."""
        host = self.host
        if self.issuer_slices is None:
            return Spans(*(np.empty(0, np.int64),) * 3)
        on_threads = np.isin(host.lane, np.unique(host.lane[self.issuer_slices]))
        ids = np.flatnonzero(
            on_threads & (host.is_kind("annotation") | host.is_kind("python") | host.is_kind("cpu_op"))
        )
        first, end = (np.searchsorted(self.begin_ns, time[ids]) for time in (host.start_ns, host.end_ns))
        has_work = end > first
        return Spans(ids[has_work], first[has_work], end[has_work])

    @cached_property
    def is_module(self) -> Flags:
        """Which names are calls of a module or of an FSDP unit, with the number or path of the module."""
        unit = self.host.names.unit.fill_null("") != ""
        return np.asarray(self.host.names.name.str.starts_with(conventions.MODULE_PREFIX) | unit)

    def name(self, slice_id: int) -> str:
        """Name of a host slice."""
        return str(self.host.names.name[int(self.host.name_id[slice_id])])


@dataclass(frozen=True)
class Spans:
    """Host slices, and the pieces of work that were issued in each: from index `first` on, up to `end`."""

    ids: Ints
    first: Ints
    end: Ints

    def where(self, flags: Flags) -> "Spans":
        """The spans that are flagged."""
        return Spans(self.ids[flags], self.first[flags], self.end[flags])


@dataclass(frozen=True)
class Passes:
    """Passes through repeated work in a recording, which may be iterations or layers."""

    recording: Recording
    repetition: Repetition

    @cached_property
    def edges(self) -> Ints:
        """Index of the first piece of work of each pass, and of the end of the last one."""
        return np.append(self.repetition.starts, self.repetition.end)

    @property
    def count(self) -> int:
        """Number of passes."""
        return self.repetition.count

    @cached_property
    def evidence(self) -> list[Evidence]:
        """All that the recording shows about the passes, the strongest first."""
        found = (look(self) for look in _LOOKS)
        return sorted((e for e in found if e is not None), key=lambda e: -abs(e.weight))

    @property
    def weight(self) -> int:
        """By how much the evidence for iterations outweighs that for layers."""
        return sum(evidence.weight for evidence in self.evidence)

    @property
    def reason(self) -> str:
        """Why the passes are iterations, or why they are layers."""
        is_for = 1 if self.weight >= ENOUGH else -1
        sentences = [evidence.sentence for evidence in self.evidence if evidence.weight * is_for > 0][:2]
        return " and ".join(sentences) or "little shows that each has an input or a result of its own"

    def recur(self, indices: Ints) -> bool:
        """Whether nearly all passes have at least one of these pieces of work."""
        return float((self.counts(indices) > 0).mean()) >= _NEARLY_ALL

    def counts(self, indices: Ints) -> Ints:
        """How many of these pieces of work (ascending) each pass has."""
        return np.diff(np.searchsorted(indices, self.edges))

    def at(self, times_ns: Ints) -> Ints:
        """The pieces of work that were issued next after some times on the host."""
        return np.sort(np.searchsorted(self.recording.begin_ns, times_ns))

    def of_slices(self, pattern: str, without: str | None = None) -> Ints:
        """The pieces of work that were issued by or next after host slices with such names."""
        host = self.recording.host
        if self.recording.issuer_slices is None:
            return np.empty(0, np.int64)
        return self.at(host.start_ns[_matches(host.names.name, pattern, without)[host.name_id]])

    def of_work(self, pattern: str, without: str | None = None) -> Ints:
        """The pieces of work with such names."""
        return np.flatnonzero(_matches(self.recording.work["name"], pattern, without))

    def covers_all(self, spans: Spans) -> Flags:
        """Which spans have the work of all passes."""
        covers: Flags = (spans.first <= self.edges[0]) & (spans.end >= self.edges[-1])
        return covers

    def around_each(self, spans: Spans, names: pl.Series) -> list[str]:
        """The names of which exactly one span is in nearly each pass, and has most of its work."""
        number = np.searchsorted(self.edges, spans.first, side="right") - 1
        inside = (
            (number >= 0) & (number < self.count) & (spans.end <= self.edges[np.minimum(number, self.count - 1) + 1])
        )
        size = (spans.end - spans.first) / np.diff(self.edges)[np.clip(number, 0, self.count - 1)]
        table = pl.DataFrame({"name": names, "pass": number, "is_most": inside & (size >= _LEAST_INSIDE)})
        per_pass = table.group_by("name", "pass").agg(pl.len().alias("spans"), pl.col("is_most").any())
        single = per_pass.filter("is_most", pl.col("spans") == 1).group_by("name").len().sort("len", "name")
        return single.filter(pl.col("len") >= _NEARLY_ALL * self.count)["name"].to_list()


def stems(names: pl.Series) -> pl.Series:
    """Names of annotations, up to the first number or bracket.

    >>> stems(pl.Series(["step[DECODE bs=4]", "[Executor] _forward_step 7: 2 requests"])).to_list()
    ['step', '[Executor] _forward_step']
    """
    return names.str.extract(_STEM).str.strip_chars_end(" _.#-/").fill_null(names)


def _matches(names: pl.Series, pattern: str, without: str | None = None) -> Flags:
    """Flag the names that match a pattern and not another one."""
    matches = names.str.contains(pattern)
    flags: Flags = (matches & ~names.str.contains(without) if without else matches).to_numpy()
    return flags


Look: TypeAlias = Callable[[Passes], Evidence | None]


def _modules(passes: Passes) -> Evidence | None:
    """A call of one module around all passes; else whether passes call the same modules, or each others."""
    recording, spans = passes.recording, passes.recording.spans
    modules = spans.where(recording.is_module[recording.host.name_id[spans.ids]])
    covering = modules.ids[passes.covers_all(modules)]
    if len(covering):
        root = recording.name(covering[0]).removeprefix(conventions.MODULE_PREFIX)
        return Evidence("root_module", f"one call of {root} covers all {passes.count}", -DECISIVE)
    number = np.searchsorted(passes.edges, modules.first, side="right") - 1
    inside = (number >= 0) & (number < passes.count)
    called: list[set[int]] = [set() for _ in range(passes.count)]
    for which, name in zip(number[inside].tolist(), recording.host.name_id[modules.ids[inside]].tolist(), strict=True):
        called[which].add(name)
    if sum(map(bool, called)) < _NEARLY_ALL * passes.count:
        return None
    # Passes of a server alternate between a few kinds; no other layer calls the modules of a layer.
    often = Counter(map(frozenset, called))
    shared = np.median(
        [1.0 if often[frozenset(b)] > 1 else len(a & b) / max(len(a | b), 1) for a, b in itertools.pairwise(called)]
    )
    if shared >= _SAME_MODULES:
        return Evidence("same_modules", "each calls the same modules", DECISIVE)
    return Evidence("other_modules", "each calls other modules", -DECISIVE) if shared <= _OTHER_MODULES else None


def _root_calls(passes: Passes) -> Evidence | None:
    """One call of the same whole model in each pass: a module with no module around it."""
    host, spans = passes.recording.host, passes.recording.spans
    is_module = passes.recording.is_module[host.name_id]
    around = nesting.nearest(host.parent, is_module)
    is_root = is_module[spans.ids] & (np.append(around, -1)[host.parent[spans.ids]] < 0)
    roots = spans.where(is_root)
    names = host.names.name.gather(host.name_id[roots.ids])
    for name in passes.around_each(roots, names)[-1:] if names.n_unique() == 1 else ():
        root = name.removeprefix(conventions.MODULE_PREFIX)
        return Evidence(ROOT_IN_EACH, f"one call of {root} is in each", STRONG)
    return None


def _one_call(passes: Passes) -> Evidence | None:
    """Passes that one operator, compiled function or launch of a graph issues."""
    recording, spans = passes.recording, passes.recording.spans
    if recording.issuer_slices is None:
        return None
    inner = recording.issuer_slices[passes.edges[1:-1]]
    if (inner == recording.issuer_slices[passes.edges[1:-1] - 1]).mean() > _LEAST_INSIDE:
        return Evidence("one_launch", f"one {recording.name(inner[0])} launches several", -DECISIVE)
    covering = spans.ids[passes.covers_all(spans)]
    is_operator = recording.host.is_kind("cpu_op") & recording.host.names.is_compute_op[recording.host.name_id]
    for slice_id in covering[is_operator[covering]][:1]:
        return Evidence("one_operator", f"one {recording.name(slice_id)} issues all {passes.count}", -DECISIVE)
    return None


def _annotations(passes: Passes) -> Evidence | None:
    """An annotation around each pass, unless it names a part of a model; else one around all of them."""
    recording, spans = passes.recording, passes.recording.spans
    is_annotation = recording.host.is_kind("annotation") & ~recording.is_module[recording.host.name_id]
    annotations = spans.where(is_annotation[spans.ids])
    names = stems(recording.host.names.name.gather(recording.host.name_id[annotations.ids]))
    for name in passes.around_each(annotations, names):
        if _PART.search(name):
            return Evidence("annotated_parts", f"each is a {name}", -STRONG)
        return Evidence(AROUND_EACH, f"an annotation {name} is around each", STRONG)
    for slice_id in annotations.ids[passes.covers_all(annotations)]:
        name = recording.name(slice_id)
        if not _LOOP.search(name):
            return Evidence("annotation_around_all", f"one annotation {name} is around all {passes.count}", -STRONG)
    return None


def _python_loop(passes: Passes) -> Evidence | None:
    """The Python function that has the loop: that of a module, or of the program."""
    recording, spans = passes.recording, passes.recording.spans
    functions = spans.where(recording.host.is_kind("python")[spans.ids])
    around = functions.ids[passes.covers_all(functions)]
    if not len(around):
        return None
    innermost = recording.name(around[np.argmax(recording.host.start_ns[around])])
    function = innermost.rpartition(": ")[2]
    if _FORWARD.search(function):
        return Evidence("loop_in_forward", f"their loop is in {innermost}", -STRONG)
    return Evidence("loop_in_program", f"their loop is in {innermost}", MODERATE)


def _backward(passes: Passes) -> Evidence | None:
    """Forward and backward work in each pass; or passes that are in one of both."""
    recording = passes.recording
    names = recording.work["name"].str.contains(_BACKWARD).to_numpy()
    backward = names | (recording.work["phase"] == conventions.BACKWARD).fill_null(value=False).to_numpy()
    if not backward.any():
        return None
    both = (passes.counts(np.flatnonzero(backward)) > 0) & (passes.counts(np.flatnonzero(~backward)) > 0)
    if both.mean() >= _NEARLY_ALL:
        return Evidence("backward_in_each", "each has forward and backward work", DECISIVE)
    return Evidence("backward_apart", "forward and backward work are apart from each other", -DECISIVE)


def _optimizer(passes: Passes) -> Evidence | None:
    """An optimizer's work in each pass; or somewhere else."""
    indices = passes.of_work(_OPTIMIZER)
    if passes.recur(indices):
        return Evidence("optimizer_in_each", "the optimizer steps in each", DECISIVE)
    return Evidence("optimizer_apart", "the optimizer does not step in each", -STRONG) if len(indices) else None


def _data_loading(passes: Passes) -> Evidence | None:
    """A batch that is taken from a data loader for each pass: maybe for the next one."""
    batches = np.unique(np.searchsorted(passes.edges, passes.of_slices(_DATA_LOADING), side="right"))
    if len(batches) >= max(_NEARLY_ALL * passes.count, 2):
        return Evidence("data_loading", "a batch is loaded for each", DECISIVE)
    return None


def _input(passes: Passes) -> Evidence | None:
    """Input of each pass: what is copied from the host, looked up by token, or random."""
    if passes.recur(passes.of_work(_INPUT, _OF_LAYERS)) or passes.recur(passes.of_slices(_INPUT, _OF_LAYERS)):
        return Evidence("input", "each looks up tokens or makes its input", STRONG)
    if passes.recur(_copies(passes, _TO_DEVICE, _LARGE_BYTES)):
        return Evidence("input_copies", "each copies from the host", STRONG)
    if passes.recur(_copies(passes, _TO_DEVICE)):
        return Evidence("small_copies", "each copies a few bytes from the host", WEAK)
    if passes.recur(passes.of_slices(_ENCODED)):
        return Evidence("encoded_input", "each makes a part of its input", MODERATE)
    return None


def _result(passes: Passes) -> Evidence | None:
    """A result of each pass: the next token or a loss."""
    if passes.recur(passes.of_work(_RESULT)) or passes.recur(passes.of_slices(_RESULT)):
        return Evidence("result", "each chooses a token or has a loss", MODERATE)
    return None


def _copies(passes: Passes, pattern: str, least_bytes: int = 0) -> Ints:
    """The pieces of work that copy, or next before which something is copied on another stream."""
    recording = passes.recording
    copies = recording.activities.filter(pl.col("name").str.contains(pattern))
    if least_bytes and "bytes" in copies.columns:
        copies = copies.filter(pl.col("bytes").fill_null(least_bytes) >= least_bytes)
    if recording.issuer_slices is None:
        return passes.at(copies["start_ns"].to_numpy())
    return passes.at(recording.host.start_ns[copies["host_id"].drop_nulls().to_numpy()])


def _waits(passes: Passes) -> Evidence | None:
    """A host that waits in each pass: for the whole device, as between measurements, or for a result."""
    if passes.recur(passes.of_slices(_DEVICE_WAIT) - 1):  # a wait ends the pass of what was issued before it
        return Evidence("device_synchronization", "the host waits for the device in each", STRONG)
    if passes.recur(passes.of_slices(_HOST_WAIT) - 1) or passes.recur(_copies(passes, _TO_HOST)):
        return Evidence("host_synchronization", "the host waits for a result of each", WEAK)
    return None


def _memory(passes: Passes) -> Evidence | None:
    """Memory that each pass stores for a backward pass; or that returns to its level though gradients are recorded."""
    recording = passes.recording
    if recording.memory.is_empty() or recording.issuer_slices is None:
        return None
    at_ns, delta = recording.memory["at_ns"].to_numpy(), recording.memory["delta_bytes"].to_numpy()
    edges_ns = np.append(recording.begin_ns, recording.host.end_ns.max())[passes.edges]
    level = np.append(0, np.cumsum(delta))[np.searchsorted(at_ns, edges_ns)]
    allocated = np.append(0, np.cumsum(np.maximum(delta, 0)))[np.searchsorted(at_ns, edges_ns)]
    stored, of_pass = np.diff(level)[:-1], max(float(np.median(np.diff(allocated))), 1)  # at the end all is freed
    if (stored > 0).all() and np.median(stored) >= _STORED * of_pass:
        return Evidence("memory_rises", f"each stores {units.size(float(np.median(stored)))} and frees none", -STRONG)
    operators = nesting.nearest(recording.host.parent, recording.host.is_kind("cpu_op"))[recording.issuer_slices]
    has_gradient = recording.host.sequence[operators[operators >= 0]] > 0
    if np.median(np.abs(stored)) <= _RETURNED * of_pass and len(has_gradient) and has_gradient.mean() > _LEAST_INSIDE:
        return Evidence("memory_returns", "memory returns to its level after each", STRONG)
    return None


def _parts(passes: Passes) -> Evidence | None:
    """Passes that consist of equal parts themselves, as a model does of its layers."""
    middle = passes.count // 2
    codes = passes.recording.codes[passes.edges[middle] : passes.edges[middle + 1]]
    parts = repetitions.find(codes)
    if parts and parts.count >= _FEW_PARTS and parts.end - parts.starts[0] >= _LEAST_INSIDE * len(codes):
        return Evidence("parts", f"each has {parts.count} equal parts", MODERATE)
    return None


def _nothing_else(passes: Passes) -> Evidence | None:
    """Passes without other work: before and after the layers of one pass are an embedding and a head."""
    is_all = passes.edges[-1] - passes.edges[0] >= _ALMOST_ALL * len(passes.recording.codes)
    if is_all and passes.repetition.alike_ratio >= _ALMOST_ALL:
        return Evidence("nothing_else", "there is no other work", MODERATE)
    return None


def _number(passes: Passes) -> Evidence | None:
    """More passes than models have layers."""
    return Evidence("number", "they are more than a model has layers", STRONG) if passes.count > _MOST_LAYERS else None


_LOOKS: Iterable[Look] = (
    _modules, _root_calls, _one_call, _annotations, _python_loop, _backward, _optimizer, _data_loading, _input, _result,
    _waits, _memory, _parts, _nothing_else, _number,
)  # fmt: skip
