"""YaFSDP in frameworks: Hugging Face's example, Trainer and files, Accelerate, Lightning."""

import copy
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

from instrumented_trainers.parallelism.yafsdp import fully_shard, module
from tests.support import process_group
from tracekit import conventions

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install transformers"
)
REPOSITORY = Path(__file__).parents[2]


TRAINER = REPOSITORY / "tests" / "integration" / "scripts" / "huggingface_trainer.py"


def start(ranks: int, *arguments: str, script: Path = TRAINER) -> None:
    """Start the script on so many ranks and wait for its end."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, *launcher, str(script), *arguments]
    done = subprocess.run(command, env=environment, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


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


def generate(unequal: bool) -> list[int]:
    """Generate from a prompt of each rank's own, if `unequal` by another number of tokens; return the lengths."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
    plain = copy.deepcopy(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    rank = dist.get_rank()
    prompt = torch.arange(3 + rank)[None]
    options = {"max_new_tokens": 4 + 5 * rank * unequal, "do_sample": False, "eos_token_id": None}
    found = model.generate(prompt, **options).tolist()
    assert found == plain.generate(prompt, **options).tolist()
    return [len(each) for each in found]


def test_ranks_generate_as_many_tokens_as_each_wants() -> None:
    assert process_group.run(2, functools.partial(generate, unequal=True)) == [[7], [13]]


def save_on_one_rank(folder: str) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = fully_shard(LlamaForCausalLM(LlamaConfig(vocab_size=8, num_key_value_heads=2, **sizes)))
    module._PATIENCE_S = 1
    if dist.get_rank():
        return ""
    try:
        model.save_pretrained(folder)  # type: ignore[operator]
    except RuntimeError as error:
        return str(error)
    return "nothing was refused"


def test_saving_on_one_rank_alone_is_refused(tmp_path: Path) -> None:
    words, _ = process_group.run(2, functools.partial(save_on_one_rank, str(tmp_path)))
    assert "not all of them called it" in words


ACCELERATED = REPOSITORY / "tests" / "integration" / "scripts" / "accelerated.py"


def test_accelerate_trains_as_on_one_process(tmp_path: Path) -> None:
    found = [tmp_path / "one.json", tmp_path / "two.json"]
    start(1, str(found[0]), script=ACCELERATED)
    start(2, str(found[1]), script=ACCELERATED)
    one, two = (torch.tensor(json.loads(path.read_text(encoding="utf-8"))) for path in found)
    assert len(one) == 20
    assert torch.allclose(one, two, rtol=1e-5, atol=0)


def test_plain_transformers_reads_what_a_sharded_model_saves(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    logits = process_group.run(3, functools.partial(save_pretrained, str(tmp_path)))
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["architectures"] == ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(input_ids=torch.arange(16).view(2, 8)).logits.flatten()
    for found in logits:
        assert torch.allclose(torch.tensor(found), expected, atol=1e-6)


def losses(folder: Path) -> torch.Tensor:
    return torch.tensor(json.loads((folder / "losses.json").read_text(encoding="utf-8")))


def test_the_trainer_trains_saves_and_resumes_as_one_process_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    one, two, resumed = (tmp_path / name for name in ("one", "two", "resumed"))
    start(1, str(one))
    start(2, str(two))
    assert losses(one).shape == (20, 2)  # loss and gradient norm
    assert torch.allclose(losses(one), losses(two), rtol=1e-5, atol=0)
    start(2, str(resumed), str(two / "checkpoint-10"))
    assert torch.allclose(losses(resumed)[-10:], losses(two)[-10:], rtol=1e-6, atol=0)
    weights = [AutoModelForCausalLM.from_pretrained(folder / "final").state_dict() for folder in (one, two, resumed)]
    for other in weights[1:]:
        assert all(torch.allclose(weights[0][name], value, atol=1e-5) for name, value in other.items())


LIGHTNING = REPOSITORY / "tests" / "integration" / "scripts" / "lightning_trainer.py"


@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="pytorch-lightning is not installed")
def test_lightning_trains_and_resumes_as_one_process_does(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, ranks in ((one, "1"), (two, "2")):
        start(1, str(folder), ranks, script=LIGHTNING)  # Lightning starts the other ranks itself
    assert losses(one).shape == (20,)
    assert torch.allclose(losses(one), losses(two), rtol=1e-4, atol=0)
    for kind in ("file", "folder"):
        saved = two if kind == "file" else tmp_path / kind
        if kind == "folder":
            start(1, str(saved), "2", kind, script=LIGHTNING)
        (first,) = saved.glob("*step=10.ckpt")
        assert first.is_dir() == (kind == "folder")
        resumed = tmp_path / f"resumed from a {kind}"
        start(1, str(resumed), "2", kind, str(first), script=LIGHTNING)
        assert torch.allclose(losses(resumed), losses(two)[-10:], rtol=1e-6, atol=0)
