"""Trainings that know nothing of tracekit and step their optimizers in a way of their own.

python plain_odd.py [in-backward|compiled|closure|thread]…
"""

import sys
import threading

import torch

STEPS = 9


def in_backward(model, batches):
    """Each parameter has an optimizer, which steps as soon as the gradient is there."""
    optimizers = {parameter: torch.optim.AdamW([parameter]) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for batch in batches:
        model(batch).pow(2).mean().backward()


def compiled(model, batches):
    optimizer = torch.optim.AdamW(model.parameters())
    forward, step = torch.compile(model, backend="eager"), torch.compile(optimizer.step, backend="eager")
    for batch in batches:
        forward(batch).pow(2).mean().backward()
        step()
        optimizer.zero_grad()


def closure(model, batches):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for batch in batches:

        def evaluate(batch=batch):
            optimizer.zero_grad()
            loss = model(batch).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(evaluate)


def thread(model, batches):
    worker = threading.Thread(target=closure, args=(model, batches))
    worker.start()
    worker.join()


def main(way):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    batches = [torch.randn(4, 16) for _ in range(STEPS)]
    {"in-backward": in_backward, "compiled": compiled, "closure": closure, "thread": thread}[way](model, batches)
    print(f"loss {model(batches[0]).pow(2).mean().item()!r}")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(each)
