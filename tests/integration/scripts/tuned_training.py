"""A training of one process whose batches take time, less of it with --fast-data. Not a test."""

import sys
import time

import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(6):
    time.sleep(0.001 if "--fast-data" in sys.argv else 0.02)
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
