"""File names, span names and environment variables shared by the recorder and the analysis.

Recording and analysis share files on disk, and in code only this package. It imports nothing, so that a machine with
only torch can record.
"""

VERSION = "0.2.0"

RUN_SCHEMA = "tracekit.run/1"
REPORT_SCHEMA = "tracekit.report/2"
READABLE_REPORT_SCHEMAS = ("tracekit.report/1", REPORT_SCHEMA)  # 2 renamed keys of evidence (docs/lab/renamed.md)

# A run on disk -------------------------------------------------------------------------------------------------------
MANIFEST_FILE = "run.json"
TRUTH_FILE = "truth.json"  # the faults of a simulated run
TRACE_SUFFIX = ".pt.trace.json.gz"
CHECKPOINT_LOG_SUFFIX = ".checkpoint.jsonl"
METRICS_SUFFIX = ".metrics.jsonl"
METRICS_WRITE_S = 1.0  # steps reach a metrics log at most this late: a step must not pay for a file-system call
ATTEMPTS_FILE = "attempts.jsonl"  # each attempt at the job in this folder: its start, steps, end and exit
MEMORY_SNAPSHOT_SUFFIX = ".memory.pickle"
PICKLE_SUFFIXES = (".pickle", ".pkl")
SNAPSHOT_SUFFIXES = tuple(f"{pickle}{ending}" for pickle in PICKLE_SUFFIXES for ending in ("", ".gz", ".zst"))
HANG_FOLDER = "hang"  # in a run: what its ranks left when their collectives made no progress
HANG_SUFFIX = ".hang.json"  # a flight recorder's dump with the rank's stacks
HANG_NOTE_SUFFIX = ".hang"  # in the launcher's notes: the folder of a process that is watched for hangs
STACKS_SUFFIX = ".stacks.txt"  # the process of a watched rank, and stacks by faulthandler
DASHBOARD_HOST, DASHBOARD_PORT = "127.0.0.1", 8501  # where the dashboard listens by default
PARTIAL_SUFFIX = ".partial"  # the file is still being written, or its writer died
CLAIM_FILE = ".training"  # states which training owns a folder that `tracekit record` chose
NOW_FILE = "record.now"  # creating it in the folder of a running job requests another window
REQUEST_FILE = "record.request"  # the requested window, read by all ranks
PERTURB_STOP_FILE = "perturb.stop"  # creating it in the folder of a running job ends its injected delays for good


def rank_file(rank: int, suffix: str) -> str:
    """Return the name of one rank's file, such as ``rank00003.pt.trace.json.gz``."""
    return f"rank{rank:05d}{suffix}"


def throughput(step_tokens: float, step_time_ns: float, *, ranks: int) -> dict[str, float]:
    """Return the metrics on the tokens of a step, those of all ranks: per second, and per second and GPU."""
    per_second = step_tokens * 1e9 / step_time_ns
    return {TOKENS_METRIC: per_second, TOKENS_PER_GPU_METRIC: per_second / ranks}


def window_folder(window: int) -> str:
    """Return the folder of a profiled window other than the first (the first is in the run's folder)."""
    return f"window{window:03d}"


# `tracekit record` passes its settings to the processes it starts, as JSON: see tracekit/capture/launch_settings.py
RECORD_VARIABLE = "TRACEKIT_RECORD"
ROLE_VARIABLE = "TRACEKIT_ROLE"  # what these processes do in a job of several programs, such as rollout
LAUNCHED_VARIABLE = "TRACEKIT_LAUNCHED_NS"  # Unix time in ns at which the command of these processes was started

# Spans in a trace ----------------------------------------------------------------------------------------------------
SPAN_PREFIX = "tracekit::"
MODULE_PREFIX = "nn.Module: "
GARBAGE_SPAN = "gc: full collection"  # of Python's garbage collector, on the thread that it interrupts
"""Names of slices that are calls of modules: frames of the profiler, and spans of `record --modules`."""
PHASES = ("data", "forward", "backward", "clip", "optimizer", "checkpoint")
DATA, FORWARD, BACKWARD, CLIP, OPTIMIZER, CHECKPOINT = PHASES
EVALUATION = "evaluation"
"""A span like those of the phases, but no part of a step."""


def span_name(phase: str) -> str:
    """Return the name under which a phase of the training step appears in the trace."""
    return SPAN_PREFIX + phase


# The checkpoint log: one JSON object per line, one line per stage of a save or load ----------------------------------
#   checkpoint  str   name of the checkpoint, the same on every rank
#   operation   str   one of CHECKPOINT_OPERATIONS
#   step        int   optimizer steps done when it began, or null
#   stage       str   one of CHECKPOINT_STAGES
#   start_ns    int   Unix time at which the stage first began
#   dur_ns      int   time spent in the stage. Of one worker, those other than "total" do not overlap and sum to "total"
#   bytes       int   bytes the stage moved, or null
#   files       int   files the stage opened or synced, or null
#   path        str   path of the checkpoint, or null
#   blocking    bool  whether the training thread waited for this stage
#   rank        int
#   call        str   one of CHECKPOINT_CALLS: the function called
#   worker      str   one of WORKERS: the thread or process that ran the stage
#   process     int   its process id
#   thread      int   its native thread id, as traces have it
#   calls       int   calls that wrote or read, of stage fsync those that synced the whole machine (os.sync), or null
# Lines of stage "total" and "complete" also describe the whole operation, or the machine during it; null where it could
# not be read:
#   durable                         bool  whether each file that this rank wrote was synced after its last byte
#   dirty_before_bytes, …_after_…   int   dirty pages of the machine; writeback_…: pages under writeback
#   io_some_ns, io_full_ns          int   time in which some, or all, of the machine's tasks stalled on I/O
#   cpu_ns, run_delay_ns            int   time that `thread` ran, and was runnable but not running
#   storage_written_bytes           int   bytes that the whole process sent to storage; …_read_…: read from it
#   whole_bytes                     int   bytes of all shards of the loaded checkpoint, by its metadata
# On a line "complete", `worker` ran the background part; `process` and `thread` are those of the caller.
# A background save has two durations. Its blocking "total" is the time that training was stopped; "complete" lasts from
# the same start to the end of all work. Without a line "complete", all work ends with "total".
SAVE, LOAD = CHECKPOINT_OPERATIONS = ("save", "load")
DCP_SAVE, DCP_ASYNC_SAVE, DCP_LOAD, TORCH_SAVE, TORCH_LOAD, SAFETENSORS_SAVE, SAFETENSORS_LOAD = CHECKPOINT_CALLS = (
    "dcp.save",
    "dcp.async_save",
    "dcp.load",
    "torch.save",
    "torch.load",
    "safetensors.save_file",
    "safetensors.load_file",
)
# The training thread; another thread of its process; another process.
MAIN, THREAD, PROCESS = WORKERS = ("main", "thread", "process")
PLAN, STAGE, SERIALIZE, WRITE, FSYNC, READ, DESERIALIZE, COPY, FINISH, WAIT, LAUNCH, TOTAL, COMPLETE = (
    "plan",
    "stage",
    "serialize",
    "write",
    "fsync",
    "read",
    "deserialize",
    "copy",
    "finish",
    "wait",
    "launch",
    "total",
    "complete",
)
SAVE_STAGES = (PLAN, STAGE, SERIALIZE, WRITE, FSYNC, FINISH, WAIT, TOTAL)
LOAD_STAGES = (PLAN, READ, DESERIALIZE, COPY, FINISH, WAIT, TOTAL)
CHECKPOINT_STAGES = tuple(dict.fromkeys((*SAVE_STAGES[:-1], *LOAD_STAGES[:-1], LAUNCH, TOTAL, COMPLETE)))

# The attempts log: one JSON object per line, in order of time. All times are Unix times in ns.
#   start  time_ns (the recording begins), process_start_ns and launched_ns (or null), first_step, world_size
#   steps  time_ns (the first of these steps begins), first_step, and lists with a value per step: begin_ns (since
#          time_ns), step_ns (its duration on the host). Evaluation and writing of traces are between two steps
#   end    time_ns (the training's loop has ended), error (type of the exception that ended it, or null)
#   exit   time_ns (the command has exited), launched_ns, failed_ns (its first rank exited with an error, or null),
#          code (negative for a signal), reason (a text, or null)
ATTEMPT_START, ATTEMPT_STEPS, ATTEMPT_END, ATTEMPT_EXIT = ("start", "steps", "end", "exit")

# The metrics log: one JSON object per line, one line per training step; "step" and numbers by name --------------------
STEP_TIME_METRIC = "step_time_ns"
CPU_TIME_METRIC = "cpu_time_ns"  # time that the process, all its threads, ran in the step
PROCESSOR_WAIT_METRIC = "processor_wait_ns"  # for which the training's thread was ready to run, without a processor
LOSS_METRIC = "loss"
GRADIENT_NORM_METRIC = "grad_norm"
# Checksums: sums of the absolute values of a module in the step. The prefix and the name of the module are the metric.
CHECKSUM_PREFIX = "checksum/"  # what it returned
GRADIENT_CHECKSUM_PREFIX = (
    "gradient_checksum/"  # the gradients of its parameters, as backward computed them on the rank
)
REDUCED_GRADIENT_CHECKSUM_PREFIX = "reduced_gradient_checksum/"  # those that the optimizer read
WEIGHT_CHECKSUM_PREFIX = "weight_checksum/"  # its parameters after the optimizer's step
CHECKSUM_PREFIXES = (
    CHECKSUM_PREFIX, GRADIENT_CHECKSUM_PREFIX, REDUCED_GRADIENT_CHECKSUM_PREFIX, WEIGHT_CHECKSUM_PREFIX,
)  # fmt: skip
TOKENS_METRIC = "tokens_per_second"  # of all ranks together: the tokens of a step over the rank's time of the step
TOKENS_PER_GPU_METRIC = "tokens_per_second_per_gpu"  # the same over the number of ranks
DATA_WAIT_METRIC = "data_wait_ns"  # time of the step in which the training waited for a batch
COLLECTIVE_WAIT_METRIC = "collective_wait_ns"  # in which its thread waited for collectives on the host; not on GPUs
# Delays of `record --perturb`, in trials of TRIAL_STEPS steps: a block whose first step has a delay, and one without.
# Each rank logs the place and the rank of the trial in all of its steps, and the length in the step that it delayed.
INJECTED_METRIC = "injected_ns"  # length of the delay that this rank injected in the step; 0 without one
INJECTED_PLACE_METRIC = "injected_place"  # where: an index of PERTURBED_PLACES
INJECTED_RANK_METRIC = "injected_rank"  # the rank that is delayed in the trial
COLLECTIVE_PLACE = "collective"  # before the host waits for a collective; the others are before a phase
PERTURBED_PLACES = (DATA, FORWARD, BACKWARD, COLLECTIVE_PLACE, OPTIMIZER)  # codes in logs: append new ones only
BLOCK_STEPS = 2  # a delay late in a step reaches the other ranks in the next one
TRIAL_STEPS = 2 * BLOCK_STEPS
SKIPPED_METRIC = "skipped"  # 1 where a GradScaler skipped the step's update
ALLOCATED_METRIC = "allocated_bytes"
RESERVED_METRIC = "reserved_bytes"
DEVICE_ALLOC_METRIC = "num_device_alloc"
DEVICE_FREE_METRIC = "num_device_free"
ALLOC_RETRIES_METRIC = "num_alloc_retries"
