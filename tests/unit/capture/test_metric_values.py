"""Values of metrics that a training passes: tensors, functions, and what is no number."""

import json

import numpy as np
import pytest
import torch

from tracekit.capture.metrics import MetricsLog


def logged(tmp_path, *rows):
    log = MetricsLog(tmp_path / "rank00000.metrics.jsonl")
    for row in rows:
        log.collect()
        log.add(row)
    log.close()
    return [json.loads(line) for line in (tmp_path / "rank00000.metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "value",
    [
        2.5,
        torch.tensor(2.5, requires_grad=True),
        torch.tensor([2.5], dtype=torch.bfloat16),
        np.float32(2.5),
        lambda: 2.5,
        lambda: torch.tensor(2.5),
    ],
    ids=["float", "tensor", "bfloat16", "numpy", "function", "function of a tensor"],
)
def test_a_value_is_logged_as_a_number(tmp_path, value):
    assert logged(tmp_path, {"step": 0, "loss": value}) == [{"step": 0, "loss": 2.5}]


@pytest.mark.parametrize("value", ["low", torch.ones(3), object(), {"a": 1}])
def test_a_value_without_number_is_null_with_one_notice_and_other_metrics_are_logged(tmp_path, value, capsys):
    rows = logged(tmp_path, {"step": 0, "loss": 1.0, "other": value}, {"step": 1, "loss": 0.5, "other": value})
    assert rows == [{"step": 0, "loss": 1.0, "other": None}, {"step": 1, "loss": 0.5, "other": None}]
    assert capsys.readouterr().err.count("the metric other") == 1


def test_a_tensor_that_changes_later_is_logged_as_it_was(tmp_path):
    loss = torch.tensor(1.0)
    log = MetricsLog(tmp_path / "rank00000.metrics.jsonl")
    log.add({"step": 0, "loss": loss})
    loss.fill_(9.0)
    log.close()
    assert json.loads((tmp_path / "rank00000.metrics.jsonl").read_text())["loss"] == 1.0
