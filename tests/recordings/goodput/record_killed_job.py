"""Train, kill a rank five times, resume each time; write the job's logs and its true account.

    python -m tests.recordings.goodput.record_killed_job FOLDER

The account is computed of the events that `killed_trainer.py` writes, by other code than tracekit's.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TypeAlias

HERE = Path(__file__).parent
KILLED_STEPS = (11, 13, 20, 22, 35)
STEPS, SAVE_EVERY, PAUSE_S = 40, 8, 1.0
CLASSES = ("productive", "lost", "save", "stall", "warm_up", "load", "start", "stop", "idle")
LOGS = ("attempts.jsonl", "rank00000.checkpoint.jsonl")
Events: TypeAlias = list[dict[str, Any]]


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        attempts = [run_attempt(Path(folder), step) for step in (*KILLED_STEPS, -1)]
        out.mkdir(parents=True, exist_ok=True)
        for name in LOGS:
            shutil.copyfile(Path(folder, "job", name), out / name)
    (out / "truth.json").write_text(json.dumps(account(attempts), indent=2) + "\n", encoding="utf-8")


def run_attempt(folder: Path, killed_step: int) -> Events:
    """Events of an attempt that ends when rank 1 begins this step; -1: it ends by itself."""
    events = folder / f"events{len(list(folder.glob('events*')))}.jsonl"
    variables = {"JOB_EVENTS": str(events), "JOB_KILLED_STEP": str(killed_step), "OMP_NUM_THREADS": "1"}
    options = f"--strategy fsdp2 --model micro --world-size 2 --device cpu --out job --steps {STEPS}"
    options += f" --checkpoint-every {SAVE_EVERY} --profile-wait 1000"
    resume = ["--resume"] if (folder / "job" / "checkpoints").is_dir() else []
    command = [sys.executable, str(HERE / "killed_trainer.py"), *options.split(), *resume]
    path = os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
    launched_ns = time.time_ns()
    subprocess.run(command, cwd=folder, env=os.environ | variables | {"PYTHONPATH": path}, check=False)
    ended_ns = time.time_ns()
    time.sleep(PAUSE_S if killed_step >= 0 else 0)
    lines = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    return [{"event": "launch", "time_ns": launched_ns}, *lines[1:], {"event": "exit", "time_ns": ended_ns}]


def account(attempts: list[Events]) -> dict[str, float]:
    """Seconds of each class, and of the whole."""
    usual_s = statistics.median(
        step_s for events in attempts for number, step_s in enumerate(steps_s(events)) if number > 0
    )
    totals = dict.fromkeys(CLASSES, 0.0)
    for index, events in enumerate(attempts):
        launch_s, exit_s = seconds(events, "launch")[0], seconds(events, "exit")[0]
        loaded_s = sum(seconds(events, "load end")) - sum(seconds(events, "load begin"))
        first_s = seconds(events, "step begin")[0]
        kill_s = seconds(events, "killed")
        save_ends_s = {line["step"]: line["time_ns"] / 1e9 for line in events if line["event"] == "save end"}
        save_begins_s = {line["step"]: line["time_ns"] / 1e9 for line in events if line["event"] == "save begin"}
        end_s = kill_s[0] if kill_s else seconds(events, "step end")[-1]
        if kill_s:
            kept_until_s = max((save_ends_s[step] for step in save_ends_s), default=first_s)
        else:
            end_s = kept_until_s = max(end_s, *save_ends_s.values())
        saved_s = sum(save_ends_s[step] - save_begins_s[step] for step in save_ends_s)
        kept = [step for step in steps(events) if step[2] <= kept_until_s]
        excess_s = [max(0.0, ended_s - began_s - usual_s) for _, began_s, ended_s in kept]
        slow = [extra_s > usual_s / 2 for extra_s in excess_s]
        first_usual = slow.index(False) if False in slow else len(slow)
        warm_up_s = sum(excess_s[:first_usual])
        stall_s = sum(
            extra_s for extra_s, is_slow in zip(excess_s[first_usual:], slow[first_usual:], strict=True) if is_slow
        )
        totals["load"] += loaded_s
        totals["start"] += first_s - launch_s - loaded_s
        totals["stop"] += exit_s - end_s
        totals["lost"] += end_s - kept_until_s
        totals["save"] += saved_s
        totals["warm_up"] += warm_up_s
        totals["stall"] += stall_s
        totals["productive"] += kept_until_s - first_s - saved_s - warm_up_s - stall_s
        if index:
            totals["idle"] += launch_s - seconds(attempts[index - 1], "exit")[0]
    whole_s = seconds(attempts[-1], "exit")[0] - seconds(attempts[0], "launch")[0]
    assert abs(sum(totals.values()) - whole_s) < 1e-3
    return {"whole": whole_s, **totals}


def seconds(events: Events, event: str) -> list[float]:
    return [line["time_ns"] / 1e9 for line in events if line["event"] == event]


def steps(events: Events) -> list[tuple[int, float, float]]:
    """Number, begin and end in s of each completed step."""
    ends = {line["step"]: line["time_ns"] / 1e9 for line in events if line["event"] == "step end"}
    begins = {line["step"]: line["time_ns"] / 1e9 for line in events if line["event"] == "step begin"}
    return [(number, begins[number], end_s) for number, end_s in ends.items()]


def steps_s(events: Events) -> list[float]:
    return [end_s - begin_s for _, begin_s, end_s in steps(events)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
