"""The options of the command line, a function for each group."""

import argparse
from pathlib import Path

from instrumented_trainers.config.settings import (
    CP_METHODS,
    LR_SCHEDULES,
    NEWEST,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTATIONS,
    SCHEDULES,
)
from instrumented_trainers.model_config import PRESETS


def add_ranks(group: argparse._ArgumentGroup) -> None:
    """Add the options on ranks and devices."""
    group.add_argument(
        "--world-size", type=positive, metavar="N", help="ranks to start; by default one per GPU, or 2 on the CPU"
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    group.add_argument(
        "--share-gpus",
        action="store_true",
        help="allow more ranks than GPUs: several ranks take turns on one GPU, and NCCL uses sockets, so it is slow",
    )
    group.add_argument(
        "--replicate",
        type=positive,
        metavar="R",
        help="replicas of the model, each sharded over a group of ranks (fsdp*, yafsdp)",
    )
    group.add_argument(
        "--offload",
        action="store_true",
        help="keep optimizer state, and shards of weights and gradients, in host memory (zero1, fsdp2, yafsdp)",
    )
    group.add_argument("--timeout-s", type=float, metavar="SECONDS", help="how long a rank waits for another")


def add_parallelism(group: argparse._ArgumentGroup) -> None:
    """Add the options on the axes of the mesh other than data parallelism, which has the ranks that they leave."""
    group.add_argument("--pp", type=positive, metavar="P", help="ranks that the layers are divided among, as stages")
    group.add_argument(
        "--schedule", type=_pipeline_schedule, choices=SCHEDULES, help="the order of a pipeline's forward and backward"
    )
    group.add_argument(
        "--virtual-stages",
        type=positive,
        metavar="V",
        help="stages on each rank; by default 2 under interleaved, zbv and dualpipev, else 1",
    )
    group.add_argument("--tp", type=positive, metavar="T", help="ranks that each matrix is divided among")
    group.add_argument("--sequence-parallel", action="store_true", help="divide what is between the matrices, too")
    group.add_argument("--loss-parallel", action="store_true", help="divide the logits by vocabulary, up to the loss")
    group.add_argument("--cp", type=positive, metavar="C", help="ranks that each sequence is divided among")
    group.add_argument(
        "--cp-method", choices=CP_METHODS, help="attention gathers keys and values, or they go round a ring of ranks"
    )
    group.add_argument(
        "--ep", type=positive, metavar="E", help="ranks that the experts are divided among, of those that shard"
    )


def add_model(group: argparse._ArgumentGroup) -> None:
    """Add the options on the model and its data."""
    group.add_argument("--model", choices=tuple(PRESETS), help="size of the model, by name")
    group.add_argument(
        "--experts",
        type=natural,
        metavar="N",
        help="feed-forward experts in each layer, as large as the model's own (0: none); by default the model's",
    )
    group.add_argument("--active-experts", type=positive, metavar="K", help="experts that each token goes through")
    group.add_argument("--balance-loss", type=float, metavar="X", help="weight of the loss that balances the experts")
    group.add_argument(
        "--capacity",
        type=float,
        metavar="FACTOR",
        help="an expert takes at most FACTOR times the mean number of a sequence's tokens, and what is above is "
        "dropped; by default it takes all",
    )
    group.add_argument(
        "--init-from",
        type=Path,
        metavar="FOLDER",
        help="train this model on: a Llama as `save_pretrained` of transformers writes it, with its tokenizer",
    )
    group.add_argument(
        "--data",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="text to train on: plain, .jsonl, .arrow or .parquet; by default the sources of Python's standard library",
    )
    group.add_argument("--text-field", metavar="NAME", help="the field of the text in .jsonl, .arrow and .parquet")
    group.add_argument(
        "--stream", action="store_true", help="read and tokenize the text while training, in order, not beforehand"
    )
    group.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json of `tokenizers`; by default a token is a byte"
    )
    group.add_argument(
        "--train-tokenizer",
        type=natural,
        metavar="VOCAB",
        help="train a byte-level BPE tokenizer of so many tokens on the text, into RUN/tokenizer.json",
    )
    group.add_argument(
        "--separator",
        metavar="TOKEN",
        help="the tokenizer's token between documents; by default <|endoftext|> or the like",
    )
    group.add_argument("--batch", type=positive, metavar="N", help="sequences per rank and micro-batch")
    group.add_argument("--tokens", type=positive, metavar="N", help="tokens in a sequence")
    group.add_argument(
        "--micro-batches", type=positive, metavar="N", help="micro-batches per step, whose gradients are accumulated"
    )
    group.add_argument("--precision", choices=PRECISIONS, help="of computation; bf16 reduces in fp32")
    group.add_argument(
        "--checkpoint-layers",
        type=natural,
        metavar="N",
        help="layers, from the first, that recompute activations in backward to save memory",
    )
    group.add_argument(
        "--recompute",
        choices=RECOMPUTATIONS,
        help="what these layers recompute: all, or (selective) all but matrix products and attention",
    )
    group.add_argument("--reentrant", action="store_true", help="use torch's reentrant activation checkpointing")
    group.add_argument(
        "--keep-gathered", action="store_true", help="keep gathered weights from forward to backward (fsdp*, yafsdp)"
    )
    group.add_argument(
        "--reshard-to",
        type=positive,
        metavar="N",
        help="after forward, reshard weights to groups of N ranks only (fsdp2's reshard_after_forward=N)",
    )
    group.add_argument(
        "--prefetch",
        type=natural,
        metavar="N",
        help="layers to prefetch, as set_modules_to_forward_prefetch does (fsdp2)",
    )


def add_optimization(group: argparse._ArgumentGroup) -> None:
    """Add the options on the optimization."""
    group.add_argument("--steps", type=positive, metavar="N", help="optimizer steps to train for")
    group.add_argument(
        "--optimizer", choices=OPTIMIZERS, help="muon: for the matrices inside the layers, adamw for the rest"
    )
    group.add_argument("--learning-rate", type=float, metavar="X", help="highest learning rate")
    group.add_argument(
        "--lr-schedule", choices=LR_SCHEDULES, help="how the rate falls after the warm-up; wsd: only in the last steps"
    )
    group.add_argument("--warmup-steps", type=natural, metavar="N", help="steps in which it rises")
    group.add_argument(
        "--decay-steps", type=natural, metavar="N", help="steps in which it falls (wsd); by default a fifth of --steps"
    )
    group.add_argument(
        "--final-learning-rate-ratio", type=float, metavar="X", help="share of it that remains at the last step"
    )
    group.add_argument(
        "--weight-decay", type=float, metavar="X", help="on all weights but those of norms, biases and embeddings"
    )
    group.add_argument("--beta1", type=float, metavar="X", help="of adamw, adam and lion: decay of the first moment")
    group.add_argument("--beta2", type=float, metavar="X", help="of adamw, adam and lion: decay of the second moment")
    group.add_argument("--momentum", type=float, metavar="X", help="of sgd and muon, Nesterov's; sgd: 0 for none")
    group.add_argument("--dropout", type=float, metavar="X", help="share of each layer's output dropped")
    group.add_argument("--max-norm", type=float, metavar="X", help="gradient norm to clip at; 0: don't")
    group.add_argument("--seed", type=natural, metavar="N", help="of the weights and the order of the data")


def add_evaluation(group: argparse._ArgumentGroup) -> None:
    """Add the options on evaluation."""
    group.add_argument("--eval-every", type=natural, metavar="N", help="steps between two evaluations; 0: none")
    group.add_argument("--eval-steps", type=positive, metavar="N", help="batches per rank in an evaluation, at most")
    group.add_argument("--eval-data", type=Path, nargs="+", metavar="FILE", help="text to evaluate on, as --data")
    group.add_argument(
        "--eval-split", type=float, metavar="X", help="share of the text to hold out from training and evaluate on"
    )


def add_logging(group: argparse._ArgumentGroup) -> None:
    """Add the options on what is logged."""
    group.add_argument("--log-every", type=positive, metavar="N", help="steps between two lines of output")
    group.add_argument(
        "--peak-flops", type=float, metavar="X", help="of one device in FLOP/s, for MFU; by default by its name"
    )
    group.add_argument("--tensorboard", action="store_true", help="write event files into RUN/tensorboard")
    group.add_argument("--wandb", choices=("offline", "online"), help="log to Weights & Biases, into RUN/wandb")
    group.add_argument("--wandb-project", metavar="NAME", help="the project there")


def add_recording(group: argparse._ArgumentGroup) -> None:
    """Add the options on what is recorded."""
    group.add_argument("--profile-wait", type=natural, metavar="N", help="steps before the profiler")
    group.add_argument("--profile-warmup", type=natural, metavar="N", help="steps it warms up for")
    group.add_argument("--profile-active", type=positive, metavar="N", help="steps in the trace")
    group.add_argument("--stacks", action="store_true", help="record Python stacks too (traces grow tenfold)")
    group.add_argument("--modules", action="store_true", help="record a span for each forward call of a module")
    group.add_argument(
        "--checksums", action="store_true", help="log a checksum of what each module computes, for tracekit compare"
    )
    group.add_argument(
        "--device-metrics", action="store_true", help="record clocks, power, temperature and throttling of the GPUs"
    )
    group.add_argument(
        "--memory-report",
        action="store_true",
        help="report the memory of the third step, predicted and measured, at the end and in run.json",
    )
    group.add_argument("--no-memory", dest="memory", action="store_false", help="record no allocator events")


def add_checkpoints(group: argparse._ArgumentGroup) -> None:
    """Add the options on checkpoints."""
    group.add_argument("--checkpoint-every", type=natural, metavar="N", help="steps between two checkpoints; 0: none")
    group.add_argument("--keep", type=positive, metavar="N", help="checkpoints to keep, the newest")
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


def add_faults(group: argparse._ArgumentGroup) -> None:
    """Add the option that injects faults."""
    group.add_argument("--fault", action="append", metavar="NAME[=ARGS]", help="inject this fault; may be repeated")


def positive(text: str) -> int:
    """Return the whole number of 1 or more in an option's text. Raises ArgumentTypeError."""
    return _whole_number(text, at_least=1)


def natural(text: str) -> int:
    """Return the whole number of 0 or more in an option's text. Raises ArgumentTypeError."""
    return _whole_number(text, at_least=0)


def _pipeline_schedule(text: str) -> str:
    """Return the name of a pipeline's schedule. Raises ArgumentTypeError for one of the learning rate."""
    if text in LR_SCHEDULES:
        raise argparse.ArgumentTypeError(f"{text} is a schedule of the learning rate: --lr-schedule {text}")
    return text


def _whole_number(text: str, *, at_least: int) -> int:
    if not text.lstrip("-").isdecimal() or int(text) < at_least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {at_least} or more")
    return int(text)
