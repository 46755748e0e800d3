"""A trainer without torch: it simulates the run that its options and environment ask for. Not a test.

    python simulated_trainer.py instrumented_trainers --out RUN [--prefetch N] [--keep-gathered] [--trouble NAME]

Without --prefetch each layer is gathered only when it runs. --trouble says what happens with --keep-gathered: slower,
fail, killed or hang. `--trouble always-fail` fails without it, too, and `always-hang` tells its process in a file.
"""

import argparse
import os
import signal
import sys
import time
import zlib
from pathlib import Path

from tracekit.cli import main

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("module")
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--prefetch", type=int, default=0)
parser.add_argument("--keep-gathered", action="store_true")
parser.add_argument("--strategy")
parser.add_argument("--trouble", default="")
options = parser.parse_args()

if options.trouble == "always-fail" or (options.keep_gathered and options.trouble == "fail"):
    sys.exit("out of memory \x1b[31m")
if options.keep_gathered and options.trouble == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if options.trouble == "always-hang":
    options.out.with_suffix(".pid").write_text(str(os.getpid()))
if options.trouble == "always-hang" or (options.keep_gathered and options.trouble == "hang"):
    time.sleep(600)
faults = [] if options.prefetch else ["--fault", "no-prefetch"]
if options.keep_gathered and options.trouble == "slower":
    faults += ["--fault", "slow-network:2"]
seed = str(zlib.crc32(options.out.name.encode()) % 1000)
words = ["--strategy", "fsdp2", "--gpus", "2", "--layers", "2", "--steps", "4", "--ranks-written", "2", "--seed", seed]
sys.argv = ["tracekit", "simulate", *words, *faults, "--out", str(options.out)]
main()
