"""Record a small run of each fault and a healthy twin, scrub them, and write the truth about each.

``python -m instrumented_trainers.faults.samples`` makes ``sample_traces/faults``; ``truth.json`` there says what is in
it. Each is recorded right after a healthy run with the same options and seed, the last of which becomes the twin.
"""

import argparse
import gzip
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from instrumented_trainers import faults
from tracekit.conventions import python_child

TRUTH_FILE = "truth.json"

_ALL = "--device cpu --model micro --max-norm 0 --keep 1 --profile-wait 2 --profile-warmup 1"
_STEPS = f"{_ALL} --profile-active 2 --steps 6"
_SAVE = f"{_ALL} --profile-active 1 --batch 2 --tokens 32 --strategy ddp --world-size 1 --no-memory"
# By name of the healthy twin: the options of it and of its faulty runs. Two ranks only where communication matters,
# because each adds a trace; saves only where they matter, after the profiled steps.
_TWINS: Mapping[str, str] = {
    "healthy-fsdp2": f"{_STEPS} --batch 8 --tokens 128 --strategy fsdp2 --world-size 2 --prefetch 1 --no-memory",
    "healthy-ddp": f"{_STEPS} --batch 2 --tokens 32 --strategy ddp --world-size 1",
    "healthy-save": f"{_SAVE} --steps 6 --checkpoint-every 6",
    "healthy-background-save": f"{_SAVE} --steps 60 --checkpoint-every 40 --background-save",
}


@dataclass(frozen=True)
class Sample:
    """One faulty run: the fault's option, its twin, and what a rule must find in the pair.

    `rank` is the rank at fault, None if all are. `size` describes how large the fault is.
    """

    fault: str
    twin: str
    rank: int | None
    size: str
    must_find: str

    @property
    def name(self) -> str:
        """Return the folder's name."""
        return self.fault.partition("=")[0]


SAMPLES = (
    Sample(
        "slow-rank=1:20ms",
        "healthy-fsdp2",
        1,
        "20 ms of compute more in each forward pass",
        "rank 1 is the straggler: it computes 20 ms a step longer, and rank 0 waits for it in a collective",
    ),
    Sample(
        "late-launch=10ms",
        "healthy-ddp",
        None,
        "10 ms before each of 2 layers",
        "the host launches nothing for 10 ms before each layer's forward",
    ),
    Sample(
        "no-prefetch",
        "healthy-fsdp2",
        None,
        "every gather of a layer",
        "each layer's all-gather begins after the layer before it ran, so that nothing hides it",
    ),
    Sample(
        "churn=4",
        "healthy-ddp",
        None,
        "4 MiB and more, in each of 2 layers",
        "each layer's forward takes a block of over 4 MiB and lets it go, a larger one every step",
    ),
    Sample(
        "host-sync",
        "healthy-ddp",
        None,
        "one read in each of 2 layers",
        "each layer's output is read on the host (aten::item) in its forward",
    ),
    Sample(
        "dataloader=50ms",
        "healthy-ddp",
        None,
        "50 ms for each batch",
        "nothing trains for 50 ms a step while the batch is prepared",
    ),
    Sample(
        "slow-disk=4MB/s:0",
        "healthy-save",
        0,
        "4 MB/s, for 1.9 MB",
        "the save's stage write takes most of it, at 4 MB/s",
    ),
    Sample(
        "slow-fsync=500ms",
        "healthy-save",
        None,
        "500 ms for each fsync",
        "the save's stage fsync takes most of it, 500 ms for each file",
    ),
    Sample(
        "small-tensors=2000",
        "healthy-save",
        None,
        "2,000 tensors of 256 bytes",
        "the save's stages serialize and plan take most of it, for few bytes",
    ),
    Sample(
        "gil-save=2000",
        "healthy-background-save",
        None,
        "2,000 tensors of 256 bytes",
        "a save in the background holds Python's lock, and takes much longer than its twin's",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Record all samples, or those named, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m instrumented_trainers.faults.samples", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("sample_traces/faults"), help="where they go")
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to record again, with their twins; else all")
    options = parser.parse_args(arguments)
    out, names = options.out, options.names
    with tempfile.TemporaryDirectory() as folder:
        for sample in (sample for sample in SAMPLES if not names or sample.name in names):
            for name, fault in ((sample.twin, None), (sample.name, sample.fault)):
                code = _record(name, _TWINS[sample.twin], fault, Path(folder) / name, out / name)
                if code:
                    return code
    truth = {"command": "python -m instrumented_trainers.faults.samples", "samples": list(map(_truth, SAMPLES))}
    (out / TRUTH_FILE).write_text(json.dumps(truth, indent=2) + "\n", encoding="utf-8")
    return 0


def _record(name: str, options: str, fault: str | None, raw: Path, out: Path) -> int:
    """Train, scrub into `out` and pack tightly; return the first exit code that is not 0."""
    sys.stdout.write(f"{name}\n")
    arguments = [*shlex.split(options), *(["--fault", fault] if fault else [])]
    code = _call("instrumented_trainers", *arguments, "--out", str(raw), "--overwrite")
    if code == 0:
        shutil.rmtree(raw / "checkpoints", ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        code = _call("tracekit", "scrub", str(raw), str(out), "--force")
    if code == 0:
        for trace in out.glob("*.gz"):
            trace.write_bytes(gzip.compress(gzip.decompress(trace.read_bytes()), 9, mtime=0))
    return code


def _truth(sample: Sample) -> Mapping[str, object]:
    return {"sample": sample.name, **asdict(sample), "seen_by": list(faults.parse(sample.fault).seen_by)}


def _call(module: str, *arguments: str) -> int:
    command = python_child.module_command(module, *arguments)
    done = subprocess.run(  # noqa: S603 our own
        command, env=python_child.environment(), check=False, stdout=subprocess.DEVNULL
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
