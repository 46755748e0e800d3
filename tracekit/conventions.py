"""File names, span names and environment variables that the recorder writes and the reader looks for.

The contract between recording and analysis is files on disk, and this module is all that the two sides share. It
imports nothing, so that a machine with only torch can record.
"""

RUN_SCHEMA = "tracekit.run/1"
REPORT_SCHEMA = "tracekit.report/1"

# A run on disk -------------------------------------------------------------------------------------------------------
MANIFEST_FILE = "run.json"
TRUTH_FILE = "truth.json"  # what is known to be wrong with a simulated run
TRACE_SUFFIX = ".pt.trace.json.gz"
CHECKPOINT_LOG_SUFFIX = ".checkpoint.jsonl"
METRICS_SUFFIX = ".metrics.jsonl"
MEMORY_SNAPSHOT_SUFFIX = ".memory.pickle"
PARTIAL_SUFFIX = ".partial"  # a file under this name is still being written, or its writer died


def rank_file(rank: int, suffix: str) -> str:
    """Return the name of one rank's file, such as ``rank00003.pt.trace.json.gz``."""
    return f"rank{rank:05d}{suffix}"


def window_folder(window: int) -> str:
    """Return the folder of a profiled window other than the first (which lies in the run's own folder)."""
    return f"window{window:03d}"


# Spans in a trace ----------------------------------------------------------------------------------------------------
SPAN_PREFIX = "tracekit::"
DATA, FORWARD, BACKWARD, CLIP, OPTIMIZER, CHECKPOINT = (
    "data",
    "forward",
    "backward",
    "clip",
    "optimizer",
    "checkpoint",
)
PHASES = (DATA, FORWARD, BACKWARD, CLIP, OPTIMIZER, CHECKPOINT)

# FSDP2 names its spans "FSDP::all_gather (layers.0)"; our engine mirrors them under its own prefix.
UNIT_SPAN_PREFIXES = ("FSDP::", "YaFSDP::")


def span_name(phase: str) -> str:
    """Return the name under which a phase of the training step appears in the trace."""
    return SPAN_PREFIX + phase


# The checkpoint log: one JSON object per line, one line per stage of a save or load ----------------------------------
#   checkpoint  str   name of the checkpoint, the same on every rank
#   operation   str   "save" or "load"
#   step        int   optimizer steps done when it began, or null
#   stage       str   one of CHECKPOINT_STAGES
#   start_ns    int   Unix time at which the stage was first entered
#   dur_ns      int   time spent in the stage. Stages other than "total" do not overlap, so they sum to "total" at most
#   bytes       int   bytes the stage moved, or null
#   files       int   files the stage opened or synced, or null
#   path        str   where the checkpoint goes, or null
#   blocking    bool  whether the training thread waited for this stage
#   rank        int
PLAN, STAGE, SERIALIZE, WRITE, FSYNC, FINISH, WAIT, TOTAL = (
    "plan",
    "stage",
    "serialize",
    "write",
    "fsync",
    "finish",
    "wait",
    "total",
)
CHECKPOINT_STAGES = (PLAN, STAGE, SERIALIZE, WRITE, FSYNC, FINISH, WAIT, TOTAL)

# The metrics log: one JSON object per line, one line per training step; "step" and numbers by name --------------------
STEP_TIME_METRIC = "step_time_ns"
LOSS_METRIC = "loss"
TOKENS_METRIC = "tokens_per_second"
ALLOCATED_METRIC = "allocated_bytes"
RESERVED_METRIC = "reserved_bytes"
DEVICE_ALLOC_METRIC = "num_device_alloc"
DEVICE_FREE_METRIC = "num_device_free"
ALLOC_RETRIES_METRIC = "num_alloc_retries"
