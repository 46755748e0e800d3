"""The settings of a training run, and the command line that sets them."""

import argparse
import functools
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NoReturn

import torch

from instrumented_trainers import faults
from instrumented_trainers.model import PRESETS
from instrumented_trainers.parallelism import STRATEGIES
from tracekit.conventions import strategies
from tracekit.conventions.strategies import Layout

PRECISIONS = ("fp32", "bf16", "fp64")
NEWEST = "newest"
MEMORY_STEP = 2
"""The step of a training, counted from its first, whose memory is reported: before any that the profiler records."""

# Required, or not what the command line has where they are missing.
_OWN_DEFAULTS = ("strategy", "out", "world_size", "device", "data", "override", "fault")
# What may change when a training is resumed. Its model and its text may not.
OVERRIDABLE = (
    "steps",
    "learning_rate",
    "warmup_steps",
    "final_learning_rate_ratio",
    "weight_decay",
    "max_norm",
    "dropout",
    "batch",
    "micro_batches",
)


@dataclass(frozen=True)
class TrainingConfig:
    """One training run. Every field is the option of that name, whose help explains it."""

    strategy: str
    out: Path
    overwrite: bool = False
    world_size: int = 2
    device: str = "cpu"
    timeout_s: float = 300.0
    model: str = "tiny"
    data: tuple[Path, ...] = ()
    steps: int = 20
    batch: int = 4
    tokens: int = 128
    micro_batches: int = 1
    precision: str = "fp32"
    checkpoint_layers: int = 0
    reentrant: bool = False
    keep_gathered: bool = False
    reshard_to: int | None = None
    prefetch: int | None = None
    replicate: int = 1
    learning_rate: float = 1e-3
    warmup_steps: int = 5
    final_learning_rate_ratio: float = 0.1
    weight_decay: float = 0.1
    max_norm: float = 1.0
    dropout: float = 0.0
    seed: int = 0
    profile_wait: int = 3
    profile_warmup: int = 2
    profile_active: int = 5
    stacks: bool = False
    memory: bool = True
    checkpoint_every: int = 0
    keep: int = 2
    background_save: bool = False
    resume: str | None = None
    override: tuple[str, ...] = ()
    fault: tuple[str, ...] = ()
    memory_report: bool = False
    log_every: int = 5

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the run's checkpoints."""
        return self.out / "checkpoints"

    @property
    def layout(self) -> Layout:
        """Return how the ranks are laid out: replicas times shards, and without shards replicas only."""
        if strategies.STRATEGIES[self.strategy].shards_parameters:
            return Layout(dp_replicate=self.replicate, dp_shard=self.world_size // self.replicate)
        return Layout(dp_replicate=self.world_size)

    @property
    def tokens_per_step(self) -> int:
        """Return how many tokens all ranks together train on in one optimizer step."""
        return self.world_size * self.batch * self.tokens * self.micro_batches


def parse(arguments: Sequence[str] | None = None) -> TrainingConfig:
    """Parse the command line. Exits with code 2 and one line if it is invalid."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    options["device"] = _device(options["device"])
    options["world_size"] = _world_size(options["world_size"], options["device"])
    for several in ("data", "override", "fault"):
        options[several] = tuple(options[several] or ())
    config = TrainingConfig(**{field.name: options[field.name] for field in fields(TrainingConfig)})
    config = _overridden(config, parser)
    problem = _problem(config)
    if problem:
        parser.error(problem)
    return config


class InvalidConfigError(ValueError):
    """The run cannot be done as configured. The message says why and what to change, on one line."""


class TrainingFailedError(RuntimeError):
    """The run failed for an external reason. The message says why and what can be recovered, on one line."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"instrumented_trainers: {message} (--help lists the options)\n")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there is one to show, and keeps the lines of a text of several."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = functools.partial(textwrap.fill, width=width, initial_indent=indent, subsequent_indent=indent + "    ")
        return "\n".join(fill(line) for line in text.splitlines()) if "\n" in text else fill(text)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


_FAULTS_HELP = "Real faults, to test whether they are found. Losses do not change.\n" + faults.explained()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m instrumented_trainers",
        usage="%(prog)s --strategy NAME --out RUN [options]",
        description="Train a Llama-style model and record the run: a trace per rank of some steps, metrics of every "
        "step, and the stages of each checkpoint. Starts the ranks itself; under torchrun it is one of them.",
        formatter_class=_HelpFormatter,
    )
    parser.add_argument(
        "--strategy", required=True, choices=tuple(STRATEGIES), help="how to parallelize over the ranks"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="RUN", help="folder to write the run to")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing run")
    for title, add in (
        ("ranks", _add_ranks),
        ("model and data", _add_model),
        ("optimization", _add_optimization),
        ("recording", _add_recording),
        ("checkpoints", _add_checkpoints),
        ("faults", _add_faults),
    ):
        add(parser.add_argument_group(title, _FAULTS_HELP if title == "faults" else None))
    shown = {field.name: field.default for field in fields(TrainingConfig) if field.name not in _OWN_DEFAULTS}
    parser.set_defaults(**shown)
    return parser


def _add_ranks(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--world-size", type=_positive, metavar="N", help="ranks to start; by default one per GPU, or 2 on the CPU"
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    group.add_argument(
        "--replicate",
        type=_positive,
        metavar="R",
        help="replicas of the model, each sharded over a group of ranks (fsdp*, yafsdp)",
    )
    group.add_argument("--timeout-s", type=float, metavar="SECONDS", help="how long a rank waits for another")


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", choices=tuple(PRESETS), help="size of the model, by name")
    group.add_argument(
        "--data",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="text to train on, byte by byte; by default the sources of Python's own standard library",
    )
    group.add_argument("--batch", type=_positive, metavar="N", help="sequences per rank and micro-batch")
    group.add_argument("--tokens", type=_positive, metavar="N", help="tokens in a sequence")
    group.add_argument(
        "--micro-batches", type=_positive, metavar="N", help="micro-batches per step, whose gradients are accumulated"
    )
    group.add_argument("--precision", choices=PRECISIONS, help="of computation; bf16 reduces in fp32")
    group.add_argument(
        "--checkpoint-layers",
        type=_natural,
        metavar="N",
        help="layers, from the first, that recompute activations in backward to save memory",
    )
    group.add_argument("--reentrant", action="store_true", help="use torch's reentrant activation checkpointing")
    group.add_argument(
        "--keep-gathered", action="store_true", help="keep gathered weights from forward to backward (fsdp*, yafsdp)"
    )
    group.add_argument(
        "--reshard-to",
        type=_positive,
        metavar="N",
        help="after forward, reshard weights to groups of N ranks only (fsdp2's reshard_after_forward=N)",
    )
    group.add_argument(
        "--prefetch",
        type=_natural,
        metavar="N",
        help="layers to prefetch, as set_modules_to_forward_prefetch does (fsdp2)",
    )


def _add_optimization(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=_positive, metavar="N", help="optimizer steps to train for")
    group.add_argument("--learning-rate", type=float, metavar="X", help="highest learning rate")
    group.add_argument("--warmup-steps", type=_natural, metavar="N", help="steps in which it rises")
    group.add_argument(
        "--final-learning-rate-ratio", type=float, metavar="X", help="share of it that remains at the last step"
    )
    group.add_argument("--weight-decay", type=float, metavar="X", help="of AdamW, on all weights")
    group.add_argument("--dropout", type=float, metavar="X", help="share of each layer's output dropped")
    group.add_argument("--max-norm", type=float, metavar="X", help="gradient norm to clip at; 0: don't")
    group.add_argument("--seed", type=_natural, metavar="N", help="of the weights and the order of the data")
    group.add_argument("--log-every", type=_positive, metavar="N", help="steps between two lines of output")


def _add_recording(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--profile-wait", type=_natural, metavar="N", help="steps before the profiler")
    group.add_argument("--profile-warmup", type=_natural, metavar="N", help="steps it warms up for")
    group.add_argument("--profile-active", type=_positive, metavar="N", help="steps in the trace")
    group.add_argument("--stacks", action="store_true", help="record Python stacks too (traces grow tenfold)")
    group.add_argument(
        "--memory-report",
        action="store_true",
        help="report the memory of the third step, predicted and measured, at the end and in run.json",
    )
    group.add_argument("--no-memory", dest="memory", action="store_false", help="record no allocator events")


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--checkpoint-every", type=_natural, metavar="N", help="steps between two checkpoints; 0: none")
    group.add_argument("--keep", type=_positive, metavar="N", help="checkpoints to keep, the newest")
    group.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST,
        metavar="CHECKPOINT",
        help="resume from this checkpoint, or from the newest complete one of this run; without a name, of RUN",
    )
    group.add_argument(
        "--override",
        action="append",
        metavar="NAME=VALUE",
        help="with --resume: change a setting of the training, such as lr=1e-4; may be repeated",
    )
    group.add_argument(
        "--background-save", action="store_true", help="save on a background thread while training continues"
    )


def _add_faults(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--fault", action="append", metavar="NAME[=ARGS]", help="inject this fault; may be repeated")


def _device(requested: str) -> str:
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return requested


def _world_size(requested: int | None, device: str) -> int:
    """Return the number of ranks: from the launcher, else the user's, else one per GPU or two."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return requested or (torch.cuda.device_count() if device == "cuda" else 2) or 1


def _problem(config: TrainingConfig) -> str | None:
    """Return why a run cannot start, or None."""
    launched = "RANK" in os.environ
    if config.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: torch finds no GPU"
    if config.device == "cuda" and not launched and config.world_size > torch.cuda.device_count():
        return f"--world-size {config.world_size}: there are {torch.cuda.device_count()} GPUs; each rank needs its own"
    missing = [str(path) for path in config.data if not path.is_file()]
    if missing:
        return f"--data {missing[0]}: no such file"
    if config.checkpoint_layers > PRESETS[config.model].layers:
        return f"--checkpoint-layers {config.checkpoint_layers}: {config.model} has {PRESETS[config.model].layers}"
    if config.strategy == "fsdp1" and config.precision == "fp64" and config.max_norm > 0:
        return "--strategy fsdp1 --precision fp64: FSDP1 cannot clip fp64 gradients; add --max-norm 0"
    if config.memory_report and config.profile_wait <= MEMORY_STEP:
        return f"--memory-report: measures step {MEMORY_STEP}; add --profile-wait {MEMORY_STEP + 1}, or more"
    if problem := _layout_problem(config) or _fault_problem(config):
        return problem
    if config.out.exists() and not config.out.is_dir():
        return f"--out {config.out}: is a file"
    if not launched and not config.overwrite and config.resume is None and _has_run(config.out):
        return f"--out {config.out}: contains a run; name another folder, or add --overwrite or --resume"
    return None


def _overridden(config: TrainingConfig, parser: argparse.ArgumentParser) -> TrainingConfig:
    """Return the run with the settings that `--override` names, under their full names."""
    values, overrides = {}, []
    actions = {action.dest: action for action in parser._actions}
    for text in config.override:
        name, equals, value = text.partition("=")
        name = {"lr": "learning_rate"}.get(name, name).replace("-", "_")
        if name not in OVERRIDABLE or not equals:
            parser.error(f"--override {text}: NAME=VALUE, NAME one of lr, {', '.join(OVERRIDABLE)}")
        try:
            values[name] = parser._get_value(actions[name], value)
        except argparse.ArgumentError as error:
            parser.error(f"--override {text}: {error.message}")
        overrides.append(f"{name}={values[name]}")
    if config.override and config.resume is None:
        parser.error("--override: only with --resume; a new training takes its settings from their options")
    return replace(config, **values, override=tuple(overrides))


def _fault_problem(config: TrainingConfig) -> str | None:
    """Return why the requested faults are impossible, or None."""
    for text in config.fault:
        try:
            fault = faults.parse(text)
        except ValueError as error:
            return f"--fault: {error}"
        if problem := fault.problem(config.strategy, config.world_size):
            return f"--fault {text}: {problem}"
        if fault.needs_saves and not config.checkpoint_every:
            return f"--fault {text}: a checkpoint fault, but no checkpoint is saved; add --checkpoint-every N"
    return None


def _layout_problem(config: TrainingConfig) -> str | None:
    """Return why the parallel layout is impossible, or None."""
    if config.replicate > 1 and not strategies.STRATEGIES[config.strategy].shards_parameters:
        return (
            f"--replicate {config.replicate}: {config.strategy} replicates over all ranks; only fsdp* and yafsdp shard"
        )
    if config.world_size % config.replicate:
        return f"--replicate {config.replicate}: does not divide the {config.world_size} ranks"
    if config.prefetch is not None and config.strategy != "fsdp2":
        return f"--prefetch: {config.strategy} does not take it; only fsdp2 does"
    if config.reshard_to is None:
        return None
    if config.strategy != "fsdp2" or config.keep_gathered:
        return "--reshard-to: only for fsdp2, and not with --keep-gathered"
    ranks = config.layout.dp_shard
    if not 1 < config.reshard_to < ranks or ranks % config.reshard_to:
        return f"--reshard-to {config.reshard_to}: name a divisor of the {ranks} ranks that share a model"
    return None


def _has_run(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _positive(text: str) -> int:
    return _whole_number(text, at_least=1)


def _natural(text: str) -> int:
    return _whole_number(text, at_least=0)


def _whole_number(text: str, *, at_least: int) -> int:
    if not text.lstrip("-").isdecimal() or int(text) < at_least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {at_least} or more")
    return int(text)
