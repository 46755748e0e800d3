"""Why a run cannot start as configured."""

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from instrumented_trainers.config import parallelism
from instrumented_trainers.config.settings import (
    MEMORY_STEP,
    MOST_HELD_OUT_RATIO,
    SELECTIVE,
    SMALLEST_VOCABULARY,
    TrainingConfig,
)
from instrumented_trainers.model_config import PRESETS
from tracekit.conventions import strategies

_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "learning_rate": (lambda value: 0 < value < math.inf, "more than 0"),
    "final_learning_rate_ratio": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "weight_decay": (lambda value: 0 <= value < math.inf, "0 or more"),
    "beta1": (lambda value: 0 <= value < 1, "from 0 to below 1"),
    "beta2": (lambda value: 0 <= value < 1, "from 0 to below 1"),
    "momentum": (lambda value: 0 <= value < 1, "from 0 to below 1"),
    "dropout": (lambda value: 0 <= value < 1, "from 0 to below 1"),
    "max_norm": (lambda value: 0 <= value < math.inf, "more than 0, or 0 not to clip"),
    "balance_loss": (lambda value: 0 <= value < math.inf, "0 or more"),
    "timeout_s": (lambda value: 0 < value < math.inf, "more than 0 seconds"),
}
"""What each option of a fractional number takes: a test that not-a-number fails, too, and words."""


def problem(config: TrainingConfig, *, is_dry_run: bool = False) -> str | None:
    """Return why a run cannot start, or None. A dry run needs no GPUs and no folder."""
    if reason := _number_problem(config):
        return reason
    if not is_dry_run and (reason := _place_problem(config)):
        return reason
    if (is_dry_run or config.memory_report) and (reason := _formula_problem(config)):
        return f"{'--dry-run' if is_dry_run else '--memory-report'}: has no formula for {reason}"
    if config.init_from is None and config.checkpoint_layers > PRESETS[config.model].layers:
        return f"--checkpoint-layers {config.checkpoint_layers}: {config.model} has {PRESETS[config.model].layers}"
    if config.strategy == "fsdp1" and config.precision == "fp64" and config.max_norm > 0:
        return "--strategy fsdp1 --precision fp64: FSDP1 cannot clip fp64 gradients; add --max-norm 0"
    if config.peak_flops is not None and config.peak_flops <= 0:
        return f"--peak-flops {config.peak_flops:g}: FLOP/s of one device, such as 989e12"
    if config.memory_report and config.profile_wait <= MEMORY_STEP:
        return f"--memory-report: measures step {MEMORY_STEP}; add --profile-wait {MEMORY_STEP + 1}, or more"
    return (
        _expert_problem(config)
        or _recomputation_problem(config)
        or _text_problem(config)
        or _evaluation_problem(config)
        or _layout_problem(config)
        or _optimization_problem(config)
        or _fault_problem(config)
    )


def _number_problem(config: TrainingConfig) -> str | None:
    """Return why a fractional number is impossible, or None."""
    for name, (is_possible, words) in _RANGES.items():
        if not is_possible(value := getattr(config, name)):
            return f"--{name.replace('_', '-')} {value:g}: takes {words}"
    return None


def _recomputation_problem(config: TrainingConfig) -> str | None:
    """Return why activations cannot be recomputed so, or None."""
    if config.recompute == SELECTIVE and (config.reentrant or not config.checkpoint_layers):
        return "--recompute selective: needs --checkpoint-layers N, and not --reentrant"
    if config.reentrant and not config.checkpoint_layers:
        return "--reentrant: recomputes nothing without --checkpoint-layers N"
    return None


def _expert_problem(config: TrainingConfig) -> str | None:
    """Return why there cannot be such experts, or None."""
    experts = PRESETS[config.model].experts if config.experts is None else config.experts
    if experts and config.active_experts > experts:
        return f"--active-experts {config.active_experts}: there are {experts} experts"
    if config.capacity is None:
        return None
    if not experts:
        return f"--capacity {config.capacity:g}: {config.model_name} has no experts; add --experts N"
    if not 0 < config.capacity < math.inf:
        return f"--capacity {config.capacity:g}: times the mean number of tokens of an expert, such as 1.25"
    if config.cp > 1:
        return f"--capacity {config.capacity:g}: is of whole sequences, which --cp {config.cp} divides over ranks"
    return None


def _formula_problem(config: TrainingConfig) -> str | None:
    """Return the option that the formulas of memory and traffic do not know, or None."""
    if config.optimizer == "muon":
        return "--optimizer muon"
    sizes = {"pp": config.pp, "tp": config.tp, "cp": config.cp, "ep": config.ep}
    return next((f"--{option} {size}" for option, size in sizes.items() if size > 1), None)


def _place_problem(config: TrainingConfig) -> str | None:
    """Return why the run cannot be on this machine and in this folder, or None."""
    launched = "RANK" in os.environ
    if config.device == "cuda" and (reason := _gpu_problem(config, launched=launched)):
        return reason
    if config.out.exists() and not config.out.is_dir():
        return f"--out {config.out}: is a file"
    if not launched and not config.overwrite and config.resume is None and _has_run(config.out):
        return f"--out {config.out}: contains a run; name another folder, or add --overwrite or --resume"
    return None


def _gpu_problem(config: TrainingConfig, *, launched: bool) -> str | None:
    import torch  # not at the top: most command lines are parsed without it, which saves seconds

    if not torch.cuda.is_available():
        return "--device cuda: torch finds no GPU"
    gpus = torch.cuda.device_count()
    if not launched and config.world_size > gpus and not config.share_gpus:
        return f"--world-size {config.world_size}: there are {gpus} GPUs; each rank needs its own, or --share-gpus"
    return None


def _text_problem(config: TrainingConfig) -> str | None:
    """Return why the text or its tokenizer is impossible, or None."""
    if reason := _file_problem("data", config.data) or _file_problem("eval-data", config.eval_data):
        return reason
    if config.tokenizer is not None and not config.tokenizer.is_file():
        return f"--tokenizer {config.tokenizer}: no such file"
    if config.init_from is not None and not (config.init_from / "config.json").is_file():
        return (
            f"--init-from {config.init_from}: there is no config.json; name a folder that save_pretrained has written"
        )
    if config.init_from is not None and config.experts:
        return "--experts: not with --init-from, whose model has none"
    if config.init_from is not None and config.train_tokenizer is not None:
        return "--train-tokenizer: not with --init-from, whose model has its own tokens"
    if config.tokenizer is not None and config.train_tokenizer is not None:
        return "--train-tokenizer: not with --tokenizer, which is one already"
    if config.train_tokenizer is not None and config.train_tokenizer < SMALLEST_VOCABULARY:
        return f"--train-tokenizer {config.train_tokenizer}: bytes alone are {SMALLEST_VOCABULARY} tokens; give more"
    if config.separator is not None and config.tokenizer is None and config.init_from is None:
        return "--separator: only with --tokenizer; others have one of their own"
    return None


def _file_problem(option: str, paths: Iterable[Path]) -> str | None:
    """Return why an option's files have no text, or None."""
    for path in paths:
        if not path.is_file():
            return f"--{option} {path}: {'is no regular file' if path.exists() else 'no such file'}"
        if not path.stat().st_size:
            return f"--{option} {path}: the file is empty"
    return None


def _evaluation_problem(config: TrainingConfig) -> str | None:
    """Return why the model cannot be evaluated as configured, or None."""
    if not 0 <= config.eval_split <= MOST_HELD_OUT_RATIO:
        return f"--eval-split {config.eval_split:g}: a share of the text from 0 to {MOST_HELD_OUT_RATIO:g}"
    if config.eval_split and config.eval_data:
        return "--eval-split: not with --eval-data, which is text to evaluate on already"
    has_text = bool(config.eval_split or config.eval_data)
    if config.eval_every and not has_text:
        return "--eval-every: on which text? Add --eval-data FILE or --eval-split 0.05"
    if has_text and not config.eval_every:
        return "--eval-data, --eval-split: the model is never evaluated; add --eval-every N"
    return None


def _layout_problem(config: TrainingConfig) -> str | None:
    """Return why the parallel layout is impossible, or None."""
    if reason := parallelism.layout_problem(config):
        return reason
    if config.offload and config.strategy in ("ddp", "fsdp1"):
        return f"--offload: {config.strategy} cannot; zero1, fsdp2 and yafsdp can"
    if config.prefetch is not None and config.strategy != "fsdp2":
        return f"--prefetch: {config.strategy} does not take it; only fsdp2 does"
    if config.keep_gathered and not strategies.STRATEGIES[config.strategy].shards_parameters:
        return f"--keep-gathered: {config.strategy} gathers no weights; fsdp1, fsdp2 and yafsdp do"
    if config.reshard_to is None:
        return None
    if config.strategy != "fsdp2" or config.keep_gathered:
        return "--reshard-to: only for fsdp2, and not with --keep-gathered"
    ranks = config.layout.dp_shard
    if not 1 < config.reshard_to < ranks or ranks % config.reshard_to:
        return f"--reshard-to {config.reshard_to}: name a divisor of the {ranks} ranks that share a model"
    return None


def _optimization_problem(config: TrainingConfig) -> str | None:
    """Return why the optimizer or the schedule is impossible, or None."""
    if config.optimizer == "muon" and config.strategy == "fsdp1":
        return "--optimizer muon: needs matrices, and FSDP1 shards to flat vectors; use another --strategy"
    if config.decay_steps is not None and config.lr_schedule != "wsd":
        return f"--decay-steps: {config.lr_schedule} falls over all steps; only wsd takes it"
    return None


def _fault_problem(config: TrainingConfig) -> str | None:
    """Return why the requested faults are impossible, or None."""
    if not config.fault:
        return None
    from instrumented_trainers import faults  # it imports torch

    for text in config.fault:
        try:
            fault = faults.parse(text)
        except ValueError as error:
            return f"--fault: {error}"
        if reason := fault.problem(config.strategy, config.world_size) or fault.stage_problem(config.stages):
            return f"--fault {text}: {reason}"
        if fault.needs_saves and not config.checkpoint_every:
            return f"--fault {text}: a checkpoint fault, but no checkpoint is saved; add --checkpoint-every N"
    return None


def _has_run(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())
