"""Thirty questions with known answers, answered by calls of the tools of ``tracekit mcp`` alone.

    python -m benchmarks.agent_questions [--out docs/lab/agent_questions.md]

What is true is known without tracekit: the fault that was put into a run (sample_traces/faults/truth.json), the program
that hung, torch's own account of a failed allocation, events counted with the standard library, published formulas.
Each question has the calls that a program makes and what it takes from their answers; nobody reads a sentence for it,
but for words that name a place.
"""

import argparse
import asyncio
import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import Client

from tracekit.cli.commands.mcp import server
from tracekit.cli.commands.mcp.answers import Answers
from tracekit.cli.commands.mcp.roots import Roots

ROOT = Path(__file__).parents[1]
SAMPLES, RECORDINGS = ROOT / "sample_traces", ROOT / "tests" / "recordings"
Answer = dict[str, Any]
Call = Callable[..., Awaitable[Answer]]
_KERNELS = "kind IN ('compute', 'communication')"
CLOSE = 0.02
"""A number is right within 2%: savings of several steps are rounded to ns, nothing else differs."""


@dataclass(frozen=True)
class Question:
    """A question, what is true and how that is known, and how to ask."""

    text: str
    truth: object
    known_from: str
    ask: Callable[[Call], Awaitable[object]]


@dataclass(frozen=True)
class Result:
    """A question with the answer, the calls that it took, and the longest of their answers in bytes."""

    question: Question
    said: object
    calls: int
    longest: int

    @property
    def is_right(self) -> bool:
        """Whether the answer is the truth: equal, or within 2% for a number with a fraction."""
        truth = self.question.truth
        if isinstance(truth, float) and isinstance(self.said, int | float):
            return abs(self.said - truth) <= CLOSE * abs(truth)
        return self.said == truth


# What to ask ----------------------------------------------------------------------------------------------------------


def sample(name: str) -> str:
    return f"sample_traces/{name}"


def recording(name: str) -> str:
    return f"recordings/{name}"


def first_rule(run: str) -> Callable[[Call], Awaitable[object]]:
    async def ask(call: Call) -> object:
        findings = (await call("check", run=run))["findings"]
        return findings[0]["rule"] if findings else None

    return ask


def named_in_first(run: str, words: Sequence[str]) -> Callable[[Call], Awaitable[object]]:
    """Which of some words the sentence or the place of the first finding has."""

    async def ask(call: Call) -> object:
        finding = (await call("check", run=run))["findings"][0]
        return [word for word in words if word in finding["sentence"] + finding["where"]]

    return ask


def ranks_of_first(run: str) -> Callable[[Call], Awaitable[object]]:
    async def ask(call: Call) -> object:
        return (await call("check", run=run))["findings"][0]["ranks"]

    return ask


def culprits(case: str) -> Callable[[Call], Awaitable[object]]:
    async def ask(call: Call) -> object:
        return [culprit["rank"] for culprit in (await call("hang", run=recording(f"hangs/{case}")))["hang"]["culprits"]]

    return ask


def of_memory(case: str, *keys: str) -> Callable[[Call], Awaitable[object]]:
    async def ask(call: Call) -> object:
        value: Any = (await call("memory", run=recording(f"out_of_memory/{case}")))["memory"]
        for key in keys:
            value = value[key]
        return value

    return ask


def of_sql(run: str, select: str) -> Callable[[Call], Awaitable[object]]:
    async def ask(call: Call) -> object:
        (row,) = (await call("sql", run=run, select=select))["rows"]
        return next(iter(row.values()))

    return ask


async def is_hang(call: Call) -> object:
    return (await call("hang", run=recording("hangs/running")))["hang"]["hang"]


async def warnings_of_healthy(call: Call) -> object:
    findings = (await call("check", run=sample("faults/healthy-ddp")))["findings"]
    return [finding["rule"] for finding in findings if finding["severity"] != "info"]


async def kernel_of_one_rank(call: Call) -> object:
    counts = []
    for rank in (0, 1):
        rows = (await call("kernels", run=sample("gpu/slow-rank"), rank=rank, limit=500))["by_name"]
        counts.append(Counter({row["name"].strip("⟦⟧"): row["calls"] for row in rows}))
    return dict(
        (counts[1] - counts[0]).items() & {(name, counts[1][name]) for name in counts[1] if not counts[0][name]}
    )


async def verdict_of_ci(call: Call) -> object:
    return (await call("compare", reference=sample("ci/green"), candidate=sample("ci/red")))["comparison"]["verdict"]


async def cause_of_ci(call: Call) -> object:
    compared = (await call("compare", reference=sample("ci/green"), candidate=sample("ci/red")))["comparison"]
    return max(compared["contributions"], key=lambda part: part["change_ns"])["kind"]


async def one_verdict_backwards(call: Call) -> object:
    return (await call("compare", reference=sample("ci/red"), candidate=sample("ci/green")))["comparison"]["verdict"]


async def slow_stage(call: Call) -> object:
    findings = (await call("check", run=sample("parallelism/pipeline-slow-stage")))["findings"]
    return next(finding["ranks"] for finding in findings if finding["rule"] == "unbalanced-stages")


async def replay_fits(call: Call) -> object:
    tried = (await call("memory", run=recording("out_of_memory/fragmented")))["memory"]["oom"]["tried"]
    return next(row["fits"] for row in tried if "expandable" in row["settings"])


async def checkpoint_of_a_trillion(call: Call) -> object:
    plan = await call("plan_checkpoints", params=1e12, write_bytes_per_second=273e9, interval_s=14_400)
    return plan["write_seconds"]


async def best_interval(call: Call) -> object:
    plan = await call("plan_checkpoints", params=1e12, write_bytes_per_second=273e9, interval_s=14_400, mtbf_s=11_124)
    return plan["young_interval_seconds"]


async def unit_of_a_column(call: Call) -> object:
    columns = (await call("explain", name="steps"))["meanings"]["table"]
    text = json.dumps(columns)
    return "ns" if '"unit": "ns"' in text else None


# What is true ---------------------------------------------------------------------------------------------------------


def events(folder: Path, rank: int) -> list[Answer]:
    """The events of a rank's trace, read with the standard library."""
    (path,) = folder.glob(f"rank{rank:05d}*.json.gz")
    content: list[Answer] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return content


def kernels_of_one_rank() -> dict[str, int]:
    counts = [
        Counter(event["name"] for event in events(SAMPLES / "gpu" / "slow-rank", rank) if event.get("cat") == "kernel")
        for rank in (0, 1)
    ]
    return {name: count for name, count in counts[1].items() if name not in counts[0]}


def count_of(folder: Path, category: str) -> int:
    return sum(event.get("cat") == category and event.get("ph") == "X" for event in events(folder, 0))


def longest_kernel_ns() -> int:
    durations = (event["dur"] for event in events(SAMPLES / "gpu" / "slow-rank", 1) if event.get("cat") == "kernel")
    return round(1_000 * max(durations))


def of_torch(case: str) -> Answer:
    content: Answer = json.loads((RECORDINGS / "out_of_memory" / case / "torch.json").read_bytes())
    return content


def stated_gib(message: str) -> float:
    """Of the allocated memory, which torch's error states with two digits."""
    stated = re.search(r"Of the allocated memory ([\d.]+) GiB is allocated by PyTorch", message)
    assert stated is not None
    return float(stated[1])


def questions() -> list[Question]:
    """Thirty questions."""
    fault, hung, raw = "the fault that was made", "the program that hung", "the file, by the standard library"
    slow_rank = sample("gpu/slow-rank")
    fragmented, leak = of_torch("fragmented"), of_torch("leak")
    return [
        Question("Why is faults/slow-rank slow?", "straggler", fault, first_rule(sample("faults/slow-rank"))),
        Question("Which rank?", ["1"], fault, named_in_first(sample("faults/slow-rank"), ["1"])),
        Question("Why is faults/late-launch slow?", "late-launch", fault, first_rule(sample("faults/late-launch"))),
        Question("faults/no-prefetch?", "exposed-communication", fault, first_rule(sample("faults/no-prefetch"))),
        Question("faults/dataloader?", "data-stall", fault, first_rule(sample("faults/dataloader"))),
        Question("faults/churn?", "changing-sizes", fault, first_rule(sample("faults/churn"))),
        Question("faults/host-sync?", "blocking-sync", fault, first_rule(sample("faults/host-sync"))),
        Question(
            "Which stage of its saves makes faults/slow-disk slow?",
            ["write"],
            fault,
            named_in_first(sample("faults/slow-disk"), ["serialize", "write", "fsync"]),
        ),
        Question(
            "And faults/slow-fsync?",
            ["fsync"],
            fault,
            named_in_first(sample("faults/slow-fsync"), ["serialize", "write", "fsync"]),
        ),
        Question("faults/gil-save?", "gil-contention", fault, first_rule(sample("faults/gil-save"))),
        Question("Which warnings does faults/healthy-ddp have?", [], fault, warnings_of_healthy),
        Question("Which stage of pipeline-slow-stage delays the others?", [1], fault, slow_stage),
        Question(
            "Which inputs of uneven_batches are larger, and how many times?",
            ["Rank 1", "16.0 times"],
            "tests/recordings/README.md",
            named_in_first(recording("uneven_batches"), ["Rank 0", "Rank 1", "16.0 times"]),
        ),
        Question("Which kernels has only rank 1 of gpu/slow-rank?", kernels_of_one_rank(), raw, kernel_of_one_rank),
        Question(
            "How many kernels has rank 0?",
            count_of(SAMPLES / "gpu" / "slow-rank", "kernel"),
            raw,
            of_sql(slow_rank, f"SELECT count(*) FROM activities WHERE rank = 0 AND {_KERNELS}"),
        ),
        Question(
            "How long is the longest kernel of rank 1, in ns?",
            float(longest_kernel_ns()),
            raw,
            of_sql(slow_rank, f"SELECT max(dur_ns) FROM activities WHERE rank = 1 AND {_KERNELS}"),
        ),
        Question("Is ci/red slower than ci/green?", "worse", fault, verdict_of_ci),
        Question("Because of what?", "data", fault, cause_of_ci),
        Question("Is ci/green slower than ci/red?", "better", fault, one_verdict_backwards),
        *(
            Question(f"Which rank does the hung job {case} wait for?", ranks, hung, culprits(case))
            for case, ranks in {
                "skipped_collective": [2],
                "killed": [1],
                "data_loader": [3],
                "dead_disk": [0],
            }.items()
        ),
        Question("Does the job hangs/running hang?", False, hung, is_hang),
        Question(
            "How many bytes could out_of_memory/fragmented not get?",
            fragmented["alloc"],
            "torch's error",
            of_memory("fragmented", "oom", "requested_bytes"),
        ),
        Question(
            "How many had out_of_memory/leak allocated then?",
            stated_gib(leak["message"]) * 2**30,
            "torch's error, whose statistics were counted later",
            of_memory("leak", "oom", "allocated_bytes"),
        ),
        Question("Would expandable segments have helped?", True, "torch's error names them", replay_fits),
        Question(
            "How long does a checkpoint of 10¹² parameters take at 273 GB/s, in s?",
            14e12 / 273e9,
            "14 B a parameter over the bandwidth",
            checkpoint_of_a_trillion,
        ),
        Question(
            "How often to save it with a failure every 3.09 h, in s?",
            (2 * 14e12 / 273e9 * 11_124) ** 0.5,
            "Young's formula",
            best_interval,
        ),
        Question("In which unit are times of the table steps?", "ns", "docs/schema.md", unit_of_a_column),
    ]


# The evaluation -------------------------------------------------------------------------------------------------------


async def evaluate() -> list[Result]:
    """Ask all questions, each with no memory of the others but what the server keeps open."""
    served = server.build(Answers(Roots([RECORDINGS, SAMPLES])))
    results = []
    async with Client(served) as client:
        for question in questions():
            sizes: list[int] = []

            async def call(tool: str, sizes: list[int] = sizes, **arguments: Any) -> Answer:
                result = await client.call_tool(tool, arguments)
                text = result.content[0].text
                sizes.append(len(text.encode()))
                if result.is_error:
                    raise ValueError(text)
                answer: Answer = json.loads(text)
                return answer

            try:
                said = await question.ask(call)
            except (ValueError, LookupError, TypeError) as error:
                said = f"{type(error).__name__}: {error}"
            results.append(Result(question, said, len(sizes), max(sizes, default=0)))
    return results


def page(results: Sequence[Result]) -> str:
    """The page of docs/lab."""
    right = sum(result.is_right for result in results)
    lines = [
        "# Questions of agents",
        "",
        "    python -m benchmarks.agent_questions",
        "",
        "Each question is answered by calls of the tools of `tracekit mcp` alone: a program makes the calls and takes",
        f"a key of their answers. {right} of {len(results)} answers are right. The longest answer of a tool takes",
        f"{max(result.longest for result in results):,} bytes. Of the first answers two were called wrong, where the",
        "truth was not: faults/healthy-fsdp2 has no fault, but exposed communication, as FSDP2 on gloo has; and torch",
        "counted the statistics of the leak after it had freed 96 MiB.",
        "",
        "| question | true, from | answer | calls |",
        "|---|---|---|---|",
    ]
    for result in results:
        question, said = result.question, result.said if result.is_right else f"**{result.said}**"
        lines.append(f"| {question.text} | `{question.truth}`, {question.known_from} | `{said}` | {result.calls} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Thirty questions, answered by the tools of tracekit mcp.")
    parser.add_argument("--out", type=Path, help="write the page here")
    options = parser.parse_args(arguments)
    results = asyncio.run(evaluate())
    text = page(results)
    if options.out:
        options.out.write_text(text)
    else:
        sys.stdout.write(text)
    return sum(not result.is_right for result in results)


if __name__ == "__main__":
    sys.exit(main())
