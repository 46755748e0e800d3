"""Execution traces of PyTorch's ExecutionTraceObserver (Chakra host traces): inputs of operators, process groups.

Schemas 1.0.1 to 1.1.1 of torch/csrc/profiler/standalone/execution_trace_observer.cpp. The profiler's trace of the same
process states for each operator the id of its record function, which is the `rf_id` of a node here.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from tracekit.errors import BadTraceError
from tracekit.ingest import untrusted_json
from tracekit.ingest.decompression import Blocks
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.model.trace import Trace

_START = re.compile(rb'\s*\{\s*"schema"\s*:\s*"[^"]{1,64}"\s*,[^\[\]{}]{0,500}"nodes"\s*:\s*\[')
_HEAD_BYTES = 64 << 10
_PROCESS_ID = re.compile(rb'"pid"\s*:\s*(\d{1,9})\s*[,}]')
_NODE_END = re.compile(rb"\}\s*,\s*\{\s*\"(?:id|name)\"")
_GROUPS_NODE = "## process_group:init ##"
_NO_RAW = Raw(b"null")

OpInputs = tuple[bytes, bytes, bytes, bytes]
"""Shapes, element types, values and strides of an operator's inputs, as JSON arrays in the profiler's spelling."""


class ExecutionTraces(Reader):
    """Reads the JSON files of torch.profiler.ExecutionTraceObserver, with the profiler's trace of the same process."""

    name = "execution trace of PyTorch (ExecutionTraceObserver, Chakra)"
    suffixes = (".et.json", ".et.json.gz")
    contents = "shapes, types and values of operators' inputs where the profiler's trace has none; process groups"
    has_traces = False
    is_companion = True
    is_joined_by_record_ids = True
    usage = (
        "it has operators and their inputs, no times; put the profiler's trace of the same process into its "
        "folder, and name the folder"
    )

    def sniff(self, head: bytes, name: str) -> bool:  # noqa: ARG002
        """Return whether a file begins like those of the observer, or has such nodes, as tools write them."""
        start = head[:_HEAD_BYTES]
        has_nodes = start.lstrip()[:1] == b"{" and b'"nodes"' in start and b'"traceEvents"' not in start
        return _START.match(start) is not None or (has_nodes and (b'"ctrl_deps"' in start or b'"rf_id"' in start))

    def traces(self, path: str, head: bytes, *, is_complete: bool = True) -> Sequence[TraceInfo]:  # noqa: ARG002
        """Return the process that was recorded."""
        match = _PROCESS_ID.search(head)
        return [TraceInfo(process_id=None if match is None else int(match[1]))]

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:  # noqa: ARG002
        """Return an empty trace: the reader of the profiler's trace takes what it needs by `load`."""
        return Trace(rank, window, path)


class _Attribute(msgspec.Struct, gc=False):
    name: Any = None
    value: Raw = _NO_RAW


class _Node(msgspec.Struct, gc=False):
    name: Any = None
    inputs: Raw = _NO_RAW
    attrs: list[_Attribute] = []
    rf_id: Any = None  # here and the next two: schema 1.0.1
    input_shapes: Raw = _NO_RAW
    input_types: Raw = _NO_RAW


class _File(msgspec.Struct):
    nodes: list[_Node]


class _Inputs(msgspec.Struct, gc=False):
    values: Raw = _NO_RAW
    shapes: Raw = _NO_RAW
    types: Raw = _NO_RAW
    strides: Raw = _NO_RAW


@dataclass(frozen=True)
class ExecutionTrace:
    """The nodes of an execution trace by the id of their record function, and its process groups."""

    nodes: Mapping[int, _Node]
    node_count: int
    groups: Sequence[Any]
    """What torch.distributed states of each group: pg_name, pg_desc, backend_config, ranks, group_size."""
    is_truncated: bool

    def inputs_of(self, record_id: object, name: object) -> OpInputs | None:
        """Return the inputs of an operator; None without a node of this record id and name, or without inputs."""
        node = self.nodes.get(record_id) if isinstance(record_id, int) else None
        return None if node is None or node.name != name else _op_inputs(node)

    def has(self, record_id: object, name: object) -> bool:
        """Return whether there is a node of this record id and name."""
        node = self.nodes.get(record_id) if isinstance(record_id, int) else None
        return node is not None and node.name == name


def load(path: str) -> ExecutionTrace:
    """Read an execution trace. Raises BadTraceError if it is damaged or over its budget."""
    content = b"".join(Blocks(path))
    try:
        nodes, is_truncated = msgspec.json.decode(content, type=_File).nodes, False
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        nodes, is_truncated = _nodes_before_cut(path, content, error), True
    by_record = {record: node for node in nodes if (record := _record_id(node))}
    groups = next((_listed_groups(node) for node in nodes if node.name == _GROUPS_NODE), [])
    return ExecutionTrace(by_record, len(nodes), groups, is_truncated)


def _nodes_before_cut(path: str, content: bytes, error: Exception) -> list[_Node]:
    """Return the complete nodes of a file that ends early. Raises BadTraceError if it is damaged otherwise."""
    ends = [match.start() for match in _NODE_END.finditer(content, max(len(content) - (1 << 20), 0))]
    try:
        return msgspec.json.decode(content[: ends[-1] + 1] + b"]}", type=_File).nodes
    except (IndexError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadTraceError(f"{path}: cannot be read as an execution trace ({error}); record it again") from None


def _record_id(node: _Node) -> int:
    """Id of a node's record function; 0 if it has none."""
    stated = next((a.value for a in node.attrs if a.name == "rf_id"), None)
    if stated is not None:
        text = bytes(stated)
        return int(text) if text.isdigit() and len(text) < 20 else 0
    return node.rf_id if type(node.rf_id) is int else 0


def _inputs(node: _Node) -> _Inputs:
    """Return a node's inputs; those of schema 1.0.1 are fields of the node, without strides."""
    if not bytes(node.inputs).startswith(b"{"):
        return _Inputs(node.inputs, node.input_shapes, node.input_types)
    try:
        return msgspec.json.decode(node.inputs, type=_Inputs)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Inputs()


def _parse_list(raw: Raw | bytes) -> list[Any]:
    """Return a JSON array; an empty list for anything else."""
    try:
        parsed = untrusted_json.parse(bytes(raw))
    except ValueError:
        return []
    return parsed if isinstance(parsed, list) else []


def _listed_groups(node: _Node) -> list[Any]:
    text = next(iter(_parse_list(_inputs(node).values)), None)
    return _parse_list(text.encode("utf-8", "replace")) if isinstance(text, str) else []


# In the profiler's spelling ------------------------------------------------------------------------------------------

_SCALARS = frozenset({"Int", "Double", "Bool", "ComplexDouble", "SymInt", "SymFloat", "SymBool"})
_LIST = "GenericList["
_UNDEFINED = "nullptr"
_TENSOR = re.compile(r"Tensor\((.*)\)")


def _op_inputs(node: _Node) -> OpInputs | None:
    """Return a node's inputs as the profiler writes them with record_shapes.

    See InputOutputEncoder and shapesToStr of torch/csrc/profiler. None if there are none, or they are malformed.
    """
    inputs = _inputs(node)
    described = _describe(bytes(inputs.shapes), bytes(inputs.types), bytes(inputs.strides))
    if described is None:
        return None
    kinds, dims, types, strides = described
    values = [""] * len(kinds)
    if any(kind.startswith("Scalar") for kind in kinds):
        stated = _parse_list(inputs.values)
        if len(stated) != len(kinds):
            return None
        values = [_text(value) if kind.startswith("Scalar") else "" for value, kind in zip(stated, kinds, strict=True)]
    return dims, types, json.dumps(values).encode(), strides


@functools.lru_cache(maxsize=4096)
def _describe(shapes: bytes, types: bytes, strides: bytes) -> tuple[list[str], bytes, bytes, bytes] | None:
    """Return the kinds of inputs, and their shapes, kinds and strides as the profiler writes them."""
    kinds = [_kind(stated) for stated in _parse_list(types)]
    listed_shapes, listed_strides = _parse_list(shapes), _parse_list(strides)
    if not kinds or len(listed_shapes) != len(kinds):
        return None
    shaped = [kind not in ("", "Scalar", "ScalarList") for kind in kinds]
    dims, steps = (
        [part if keep else [] for part, keep in zip(parts, shaped, strict=False)]
        for parts in (listed_shapes, listed_strides)
    )
    text = json.dumps(steps).encode() if len(steps) == len(kinds) else b""
    return kinds, json.dumps(dims).encode(), json.dumps(kinds).encode(), text


def _kind(stated: object) -> str:
    """Return the profiler's type of an input.

    >>> [_kind(t) for t in ("Tensor(float)", "GenericList[Tensor(float),Tensor(float)]", "GenericList[Int]", "Device")]
    ['float', 'TensorList', 'ScalarList', '']
    >>> _kind("Tensor(nullptr (uninitialized))")
    ''
    """
    text = str(stated)
    if (tensor := _TENSOR.fullmatch(text)) is not None and not text.startswith(_LIST):
        return "" if tensor[1].startswith(_UNDEFINED) else tensor[1]
    if text in _SCALARS:
        return "Scalar"
    if not text.startswith(_LIST) or not text.endswith("]"):
        return ""
    elements = text[len(_LIST) : -1].split(",") if text != f"{_LIST}]" else []
    if all(element in _SCALARS for element in elements):
        return "ScalarList"
    return "TensorList" if all(_TENSOR.fullmatch(element) for element in elements) else ""


def _text(value: Any) -> str:
    """Return a value as PyTorch prints it.

    >>> [_text(value) for value in (True, 3, 2.0, [8, 32])]
    ['True', '3', '2.', '[8, 32]']
    """
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, float):
        text = f"{value:.17g}"
        return text if any(c in text for c in ".en") else f"{text}."
    return str(value)
