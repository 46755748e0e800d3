"""Field numbers of Perfetto traces, and how an export states what slices alone do not: rows of tables.

Field numbers are those of Perfetto's protos/perfetto/trace: trace_packet, track_event, track_descriptor, interned_data
and debug_annotation.
"""

SUFFIXES = (".pftrace", ".perfetto-trace")

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4  # TrackEvent.Type
PACKET = 1  # of Trace

# Of TracePacket.
CLOCK_SNAPSHOT, TIMESTAMP, SEQUENCE, TRACK_EVENT, INTERNED, FLAGS, COMPRESSED = 6, 8, 10, 11, 12, 13, 50
CLOCK_ID, DEFAULTS, DESCRIPTOR, CLEARED_STATE, FIRST_ON_SEQUENCE = 58, 59, 60, 41, 87
ZSTD_COMPRESSED = 133
CLEARED, NEEDED = 1, 2  # TracePacket.SequenceFlags

# Of TrackEvent.
CATEGORY_IID, ANNOTATION, TYPE, NAME_IID, TRACK, CATEGORY, NAME = 3, 4, 9, 10, 11, 22, 23
VALUE, DOUBLE_VALUE, FLOW, LAST_FLOW, OLD_FLOW, OLD_LAST_FLOW = 30, 44, 47, 48, 36, 42
LEGACY = 6
PHASE, DURATION_US = 2, 3  # of TrackEvent.LegacyEvent

# Of DebugAnnotation.
ARGUMENT_IID, BOOL, UINT, INT, DOUBLE, TEXT, POINTER, JSON, ARGUMENT_NAME, DICT, ARRAY, TEXT_IID = (
    1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 17,
)  # fmt: skip

# Of TrackDescriptor.
UUID, TRACK_NAME, PROCESS, THREAD, PARENT, COUNTER_KIND, ORDERING, PLACE, MERGING, STATIC_NAME = (
    1, 2, 3, 4, 5, 8, 11, 12, 15, 10,
)  # fmt: skip
PID, PROCESS_NAME = 1, 6  # of ProcessDescriptor
THREAD_PID, TID, THREAD_NAME = 1, 2, 5  # of ThreadDescriptor
UNIT, BYTES = 3, 3  # CounterDescriptor.Unit
UNIT_FACTOR, IS_INCREMENTAL, UNIT_NAME = 4, 5, 6  # of CounterDescriptor
UNITS = {1: "ns", 2: "count", 3: "bytes"}
BY_PLACE, NEVER = 3, 2  # ChildTracksOrdering, SiblingMergeBehavior

# Of InternedData.
CATEGORIES, NAMES, ARGUMENT_NAMES, TEXTS = 1, 2, 3, 29
IID, INTERNED_TEXT = 1, 2

# Rows of tables in an export ------------------------------------------------------------------------------------------

ROW_PREFIX = "tracekit."
"""Category of an instant event that states a row of a table of the trace, before the table's name."""
TRACE_ROW = "trace"
"""One row for each trace: rank, window, clock, and the step if only one was exported."""
HEADER_ROWS = "header"
"""Keys of the trace file's header, with values as JSON."""
RUN_ROW = "run"
"""The manifest of the run, as JSON; one row in the file."""
RUN_ISSUES = "run_data_quality"
ROW = "row"
"""Argument: place of the row in its table."""
UNNAMED = "unnamed"
"""Argument of a slice whose name is missing or empty, which Perfetto cannot show."""
FORMAT = 1
