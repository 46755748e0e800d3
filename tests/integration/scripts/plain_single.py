"""A training that knows nothing of tracekit, in one process, that comes to a chosen end at its 13th step.

python plain_single.py [raise|exit|kill|interrupt|profile|profile-late|never|short|long] [--seconds S]
"""

import os
import signal
import sys
import time

import torch


def main(end: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    begins, ends = {"profile": (2, 16), "profile-late": (12, 14)}.get(end, (None, None))
    steps = {"short": 5, "long": 100_000}.get(end, 20)
    deadline = time.monotonic() + float(os.environ.get("SECONDS_AT_MOST", "60"))
    for step in range(steps):
        if step == 12:
            meet(end)
        if step == begins:
            own.start()
        if step == ends:
            own.stop()
            steps_seen = sum(event.name.startswith("Optimizer.step") for event in own.events())
            print(f"own profiler: {steps_seen} optimizer steps, of tracekit {foreign(own)}")
        loss = model(torch.randn(8, 32)).pow(2).mean()
        if end != "never":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if end == "long":
            time.sleep(0.01)
            if time.monotonic() > deadline:
                break
    print(f"loss {loss.item()!r}", flush=True)


def meet(end: str) -> None:
    if end == "raise":
        raise RuntimeError("the training's own trouble")
    if end == "exit":
        sys.exit(7)
    if end in ("kill", "interrupt"):
        os.kill(os.getpid(), signal.SIGKILL if end == "kill" else signal.SIGINT)


def foreign(own: torch.profiler.profile) -> int:
    return sum(event.name.startswith(("ProfilerStep", "tracekit")) for event in own.events())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
