"""What a rank sends for data parallelism in a step: by formula, by the simulator, and counted in our trainers on gloo.

    python -m benchmarks.traffic [--out docs/lab/traffic.md]

The formula is `Strategy.sent_bytes`, which `plan layout` and the trainers' dry run use. The simulator's bytes are the
messages of its programs, and the counted ones those that torch's profiler records in a real step.
"""

import argparse
import functools
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

import tracekit
from instrumented_trainers.model_config import PRESETS
from instrumented_trainers.parallelism import ShardOptions
from tests.integration import training
from tests.integration.training import Training
from tests.support import process_group
from tracekit.conventions import strategies
from tracekit.conventions.strategies import ALL_REDUCE, RING_PASSES
from tracekit.plan import hardware
from tracekit.plan.models import Model
from tracekit.simulate import engine
from tracekit.simulate.job import Impairments, Job, laid_out
from tracekit.simulate.program import Collective, Launch

CONFIG = PRESETS["micro-deep"]
"""Trained, simulated and computed with: 4 layers, so that YaFSDP gathers two of them again."""
_MESSAGE_BYTES, _LEAST_BYTES = pl.max_horizontal("sent_bytes", "received_bytes"), 100
_ELEMENT_BYTES = {"Float": 4, "BFloat16": 2}


class SimulatedModel(Model):
    """The trainers' model with its norms, which plans leave out: the last one counts half for embedding and head."""

    @property
    def layer_parameters(self) -> int:
        return super().layer_parameters + 2 * self.width

    @property
    def outer_parameters(self) -> int:
        return super().outer_parameters + self.width // 2


@dataclass(frozen=True)
class Case:
    """A layout. Data parallelism has `ranks` in all; with `nodes`, shards are replicated over so many."""

    strategy: str
    ranks: int
    micro_batches: int = 1
    recomputed_layers: int = 0
    nodes: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    divides_micro_batches: bool = False
    """With a pipeline: whether weights are gathered, and gradients reduced, in each micro-batch."""

    @property
    def name(self) -> str:
        """Words of the table."""
        parts = [
            f"{self.ranks // self.nodes // self.pp} shards" if self._shards else f"{self.ranks // self.pp} replicas"
        ]
        parts += [f"× {self.nodes} replicas"] if self.nodes > 1 else []
        parts += [f"PP {self.pp} ({self.schedule})"] if self.pp > 1 else []
        parts += [f"{self.recomputed_layers} layers recomputed"] if self.recomputed_layers else []
        parts += ["gathered and reduced in each micro-batch"] if self.divides_micro_batches else []
        return ", ".join(parts)

    @property
    def _shards(self) -> bool:
        return strategies.STRATEGIES[self.strategy].shards_parameters

    @property
    def is_trained(self) -> bool:
        """Whether our trainers run it here: without a pipeline, on at most four ranks."""
        return self.ranks <= 4 and self.pp == 1


CASES = (
    *(Case("ddp", ranks, micro_batches) for ranks in (2, 3, 4) for micro_batches in (1, 4)),
    *(Case("fsdp2", ranks, micro_batches) for ranks in (2, 3, 4) for micro_batches in (1, 2, 4)),
    *(Case("yafsdp", ranks, micro_batches) for ranks in (2, 3, 4) for micro_batches in (1, 2, 4)),
    *(Case(strategy, 4, 2, recomputed_layers=4) for strategy in ("fsdp2", "yafsdp")),
    *(Case(strategy, 2, 2, recomputed_layers=4) for strategy in ("fsdp2", "yafsdp")),
    *(Case("hsdp", 4, micro_batches, nodes=2) for micro_batches in (1, 2)),
    *(Case(strategy, ranks, 4) for strategy in ("fsdp2", "yafsdp") for ranks in (64, 1024)),
    *(Case("hsdp", 64, micro_batches, nodes=8) for micro_batches in (1, 4)),
    *(Case(strategy, 8, 8, pp=2) for strategy in ("ddp", "zero1", "zero1-scattered", "zero2", "fsdp2")),
    *(Case("zero2", ranks, micro_batches, pp=4) for ranks in (8, 32) for micro_batches in (4, 16)),
    *(Case(strategy, 8, 8, pp=2, schedule="interleaved") for strategy in ("zero1", "zero2", "fsdp2")),
    *(Case("fsdp2", 8, 8, pp=pp, divides_micro_batches=True) for pp in (2, 4)),
)


def formula_bytes(case: Case) -> float:
    """Bytes that a rank sends, on average over the stages of a pipeline."""
    strategy = strategies.STRATEGIES[case.strategy]
    shards = case.ranks // case.nodes // case.pp
    if case.pp > 1:
        parameters = _model(case).parameters
        gathered_once = strategy.shards_parameters and not case.divides_micro_batches
        return strategy.sent_bytes(
            parameters / case.pp,
            ranks=shards,
            micro_batches=1 if gathered_once else case.micro_batches,
            still_gathered=parameters / case.pp if gathered_once else 0.0,
        )
    again = max(0, CONFIG.layers - strategy.weight_buffers)
    return strategy.sent_bytes(
        CONFIG.parameters,
        ranks=shards,
        micro_batches=case.micro_batches,
        reduces_each=case.strategy == "yafsdp",
        still_gathered=CONFIG.parameters - again * CONFIG.layer_parameters,
        replicas=case.nodes,
    )


def simulated_bytes(case: Case) -> float:
    """Bytes of the messages in the simulator's programs of one step, mean over ranks."""
    machine = replace(hardware.find("a100-80"), gpus_per_node=case.ranks // case.nodes)
    divided = dict.fromkeys(("gathers_every_micro_batch", "reduces_every_micro_batch"), case.divides_micro_batches)
    model, layout = _model(case), None
    if case.pp > 1:
        stages = 2 if case.schedule == "interleaved" else 1
        shards = strategies.GRADIENTS in strategies.STRATEGIES[case.strategy].sharded
        layout = laid_out(
            gpus=case.ranks, model=model, pp=case.pp, shards_data=shards, schedule=case.schedule, virtual_stages=stages
        )
    job = Job(
        case.strategy, model, machine, case.ranks, 64, micro_batches=case.micro_batches,
        checkpoint_layers=case.recomputed_layers, steps=1, hybrid=layout, impairments=Impairments(**divided),
    )  # fmt: skip
    programs = engine.programs(job)
    of_ranks = list(programs.values()) if isinstance(programs, Mapping) else [programs]
    messages = [
        instruction.kernel.collective
        for program in of_ranks
        for instruction in program
        if isinstance(instruction, Launch) and instruction.kernel.collective is not None
    ]
    return sum(_ring_bytes(message, case) for message in messages) / len(of_ranks)


def _model(case: Case) -> Model:
    sizes = (CONFIG.width, CONFIG.layers, CONFIG.heads, CONFIG.key_value_heads, CONFIG.hidden_width, CONFIG.vocabulary)
    return (Model if case.pp > 1 else SimulatedModel)("micro-deep", *sizes)


def _ring_bytes(message: Collective, case: Case) -> float:
    elements = max(message.sent, message.received)
    if message.op not in RING_PASSES or elements <= 1:  # transfers between stages, and the norm of all gradients
        return 0.0
    members = _members(message.op, case)
    return RING_PASSES[message.op] * elements * _ELEMENT_BYTES[message.dtype] * (members - 1) / members


# Counted --------------------------------------------------------------------------------------------------------------


def counted_bytes(cases: Iterable[Case]) -> dict[Case, float]:
    """Bytes that rank 0 of real trainings sends, by case: the messages that torch's profiler records in one step."""
    worlds: dict[int, dict[str, functools.partial[float]]] = {}
    trained = {str(number): case for number, case in enumerate(cases) if case.is_trained}
    for key, case in trained.items():
        worlds.setdefault(case.ranks, {})[key] = functools.partial(_count, case)
    outcomes = process_group.run_worlds(worlds) if worlds else {}
    return {case: outcomes[case.ranks][key].results()[0] for key, case in trained.items()}


def _count(case: Case) -> float:
    import torch
    from torch.profiler import ProfilerActivity, profile

    options = ShardOptions(gather_norms_once=False)
    if case.strategy != "ddp":
        options = replace(options, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    config = replace(CONFIG, checkpointed_layers=case.recomputed_layers)
    strategy = "fsdp2" if case.strategy == "hsdp" else case.strategy
    setting = Training(
        strategy, "sgd", micro_batches=case.micro_batches, dtype=torch.float32, config=config, options=options,
        replicas=case.nodes,
    )  # fmt: skip
    model, optimizer = training.build(setting)
    training.step(setting, model, optimizer, 0)  # the first step records the order of units
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        training.step(setting, model, optimizer, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank00000.pt.trace.json"
        profiler.export_chrome_trace(str(path))
        messages = next(iter(tracekit.load(str(path), cache=False).traces())).collectives
    # Flags, losses and norms are all-reduced, too, and small or of whole numbers.
    is_data = pl.col("dtype").str.to_lowercase().str.contains("float") & (_MESSAGE_BYTES > _LEAST_BYTES)
    return sum(
        RING_PASSES[op] * size_bytes * (_members(op, case) - 1) / _members(op, case)
        for op, size_bytes in messages.filter(is_data).select("op", _MESSAGE_BYTES).iter_rows()
        if op in RING_PASSES
    )


def _members(op: str, case: Case) -> int:
    """Ranks of the group of a collective: with replicas of shards, all-reduces are among these."""
    return case.nodes if op == ALL_REDUCE and case.nodes > 1 else case.ranks // case.nodes // case.pp


# The table ------------------------------------------------------------------------------------------------------------


def table(counted: Mapping[Case, float]) -> str:
    """Rows of all cases, in kB."""
    rows = [
        "| strategy | layout | micro-batches | formula, kB | simulated | counted |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for case in CASES:
        computed, simulated = formula_bytes(case), simulated_bytes(case)
        real = f"{counted[case] / 1e3:,.1f}" if case in counted else "–"
        cells = (
            case.strategy,
            case.name,
            str(case.micro_batches),
            f"{computed / 1e3:,.1f}",
            f"{simulated / 1e3:,.1f}",
            real,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, and print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="replace the table in FILE instead of printing it")
    options = parser.parse_args(arguments)
    text = table(counted_bytes(CASES))
    if options.out is None:
        sys.stdout.write(text)
        return 0
    page = options.out.read_text(encoding="utf-8")
    first, last = page.index("| strategy |"), page.rindex("|\n") + 2
    options.out.write_text(page[:first] + text + page[last:], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
