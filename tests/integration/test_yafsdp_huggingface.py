"""Hugging Face models under YaFSDP: the example trains one, and what is saved is read by plain transformers."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from instrumented_trainers.parallelism.yafsdp import fully_shard
from tests.support import process_group
from tracekit import conventions

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install transformers"
)
REPOSITORY = Path(__file__).parents[2]


def test_the_example_learns_and_records_a_run(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = [str(REPOSITORY / "examples" / "huggingface.py"), "--out", str(tmp_path), "--steps", "12"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([*launcher, *example], env=environment, check=True, timeout=240)
    lines = (tmp_path / conventions.rank_file(0, conventions.METRICS_SUFFIX)).read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)[conventions.LOSS_METRIC] for line in lines]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1
    assert (tmp_path / conventions.rank_file(1, conventions.TRACE_SUFFIX)).is_file()


def save_pretrained(folder: str) -> list[float]:
    """Train a step, save as Hugging Face does, and return this rank's logits for a batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, tie_word_embeddings=True, **sizes))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(2 * 8).view(2, 8) + dist.get_rank()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(input_ids=torch.arange(16).view(2, 8)).logits.flatten().tolist()


def test_plain_transformers_reads_what_a_sharded_model_saves(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    logits = process_group.run(3, functools.partial(save_pretrained, str(tmp_path)))
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["architectures"] == ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(input_ids=torch.arange(16).view(2, 8)).logits.flatten()
    for found in logits:
        assert torch.allclose(torch.tensor(found), expected, atol=1e-6)
