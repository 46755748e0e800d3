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
from tests.integration import framework_scripts
from tests.integration.framework_scripts import in_one_process, in_process_group, under_torchrun
from tests.support import process_group
from tests.support.python_path import PYTHON_PATH, REPOSITORY
from tracekit import conventions

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install transformers"
)
SCRIPTS = REPOSITORY / "tests" / "integration" / "scripts"
TRAINER, ACCELERATED, LIGHTNING = (
    SCRIPTS / name for name in ("huggingface_trainer.py", "accelerated.py", "lightning_trainer.py")
)
HAS_LIGHTNING = importlib.util.find_spec("pytorch_lightning") is not None
needs_lightning = pytest.mark.skipif(not HAS_LIGHTNING, reason="pytorch-lightning is not installed")


def start(script: Path, *arguments: str) -> None:
    """Start the script as one process and wait for its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frameworks")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[int, dict[str, process_group.Outcome]]:
    """All that ranks do from the start, and what one process does to compare with."""
    lightning, alone = {}, {"trainer": in_one_process(TRAINER, str(folder / "one"))}
    alone["accelerate"] = in_one_process(ACCELERATED, str(folder / "one.json"))
    if HAS_LIGHTNING:
        for kind in ("file", "folder"):
            lightning[f"lightning {kind}"] = in_process_group(LIGHTNING, str(folder / kind), "2", kind)
        alone["lightning"] = in_one_process(LIGHTNING, str(folder / "lightning one"), "1")
    example = REPOSITORY / "examples" / "huggingface.py"
    on_two = {
        "trainer": in_process_group(TRAINER, str(folder / "two")),
        "accelerate": in_process_group(ACCELERATED, str(folder / "two.json")),
        "example": under_torchrun(example, "--out", str(folder / "example"), "--steps", "12"),
        "generate": functools.partial(generate, unequal=True),
        "save on one rank": functools.partial(save_on_one_rank, str(folder / "refused")),
    }
    on_three = {"save": functools.partial(save_pretrained, str(folder / "pretrained"))}
    return framework_scripts.run_worlds({2: on_two | lightning, 3: on_three, 1: alone})


@pytest.fixture(scope="module")
def resumed(folder: Path, outcomes: dict[int, dict[str, process_group.Outcome]]) -> dict[str, process_group.Outcome]:
    """Trainings resumed in new processes, by framework and kind of checkpoint; their files are in `folder`."""
    outcomes[2]["trainer"].results()
    cases = {"trainer": in_process_group(TRAINER, str(folder / "resumed"), str(folder / "two" / "checkpoint-10"))}
    if HAS_LIGHTNING:
        for kind in ("file", "folder"):
            outcomes[2][f"lightning {kind}"].results()
            (first,) = (folder / kind).glob("*step=10.ckpt")
            assert first.is_dir() == (kind == "folder")
            cases[kind] = in_process_group(LIGHTNING, str(folder / f"resumed from a {kind}"), "2", kind, str(first))
    return framework_scripts.run_worlds({2: cases})[2]


def test_the_example_learns_and_records_a_run(
    folder: Path, outcomes: dict[int, dict[str, process_group.Outcome]]
) -> None:
    outcomes[2]["example"].results()
    run = folder / "example"
    lines = (run / conventions.rank_file(0, conventions.METRICS_SUFFIX)).read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)[conventions.LOSS_METRIC] for line in lines]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1
    assert (run / conventions.rank_file(1, conventions.TRACE_SUFFIX)).is_file()


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


def test_ranks_generate_as_many_tokens_as_each_wants(outcomes: dict[int, dict[str, process_group.Outcome]]) -> None:
    assert outcomes[2]["generate"].results() == [[7], [13]]


def save_on_one_rank(folder: str) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = fully_shard(LlamaForCausalLM(LlamaConfig(vocab_size=8, num_key_value_heads=2, **sizes)))
    if dist.get_rank():
        return ""
    patience_s, module._PATIENCE_S = module._PATIENCE_S, 1
    try:
        model.save_pretrained(folder)  # type: ignore[operator]
    except RuntimeError as error:
        return str(error)
    finally:
        module._PATIENCE_S = patience_s
    return "nothing was refused"


def test_saving_on_one_rank_alone_is_refused(outcomes: dict[int, dict[str, process_group.Outcome]]) -> None:
    words, _ = outcomes[2]["save on one rank"].results()
    assert "not all of them called it" in words


def test_accelerate_trains_as_on_one_process(
    folder: Path, outcomes: dict[int, dict[str, process_group.Outcome]]
) -> None:
    for ranks in (1, 2):
        outcomes[ranks]["accelerate"].results()
    found = [folder / "one.json", folder / "two.json"]
    one, two = (torch.tensor(json.loads(path.read_text(encoding="utf-8"))) for path in found)
    assert len(one) == 20
    assert torch.allclose(one, two, rtol=1e-5, atol=0)


def test_plain_transformers_reads_what_a_sharded_model_saves(
    folder: Path, outcomes: dict[int, dict[str, process_group.Outcome]]
) -> None:
    from transformers import AutoModelForCausalLM

    logits, saved = outcomes[3]["save"].results(), folder / "pretrained"
    assert json.loads((saved / "config.json").read_text(encoding="utf-8"))["architectures"] == ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_pretrained(saved)
    with torch.no_grad():
        expected = model(input_ids=torch.arange(16).view(2, 8)).logits.flatten()
    for found in logits:
        assert torch.allclose(torch.tensor(found), expected, atol=1e-6)


def losses(folder: Path) -> torch.Tensor:
    return torch.tensor(json.loads((folder / "losses.json").read_text(encoding="utf-8")))


def test_the_trainer_trains_saves_and_resumes_as_one_process_does(
    folder: Path,
    outcomes: dict[int, dict[str, process_group.Outcome]],
    resumed: dict[str, process_group.Outcome],
) -> None:
    from transformers import AutoModelForCausalLM

    one, two, third = (folder / name for name in ("one", "two", "resumed"))
    for ranks in (1, 2):
        outcomes[ranks]["trainer"].results()
    assert losses(one).shape == (20, 2)  # loss and gradient norm
    assert torch.allclose(losses(one), losses(two), rtol=1e-5, atol=0)
    resumed["trainer"].results()
    assert torch.allclose(losses(third)[-10:], losses(two)[-10:], rtol=1e-6, atol=0)
    weights = [AutoModelForCausalLM.from_pretrained(each / "final").state_dict() for each in (one, two, third)]
    for other in weights[1:]:
        assert all(torch.allclose(weights[0][name], value, atol=1e-5) for name, value in other.items())


@needs_lightning
def test_lightning_trains_and_resumes_as_one_process_does(
    folder: Path,
    outcomes: dict[int, dict[str, process_group.Outcome]],
    resumed: dict[str, process_group.Outcome],
) -> None:
    one = folder / "lightning one"
    outcomes[1]["lightning"].results()
    assert losses(one).shape == (20,)
    for kind in ("file", "folder"):
        two = losses(folder / kind)
        assert torch.allclose(losses(one), two, rtol=1e-4, atol=0)
        resumed[kind].results()
        assert torch.allclose(losses(folder / f"resumed from a {kind}"), two[-10:], rtol=1e-6, atol=0)


@pytest.mark.accuracy  # above they are started with the environment of a launcher
@needs_lightning
def test_ranks_that_lightning_starts_train_as_one_process_does(
    folder: Path, outcomes: dict[int, dict[str, process_group.Outcome]]
) -> None:
    outcomes[1]["lightning"].results()
    start(LIGHTNING, str(folder / "started by Lightning"), "2")
    assert torch.allclose(losses(folder / "lightning one"), losses(folder / "started by Lightning"), rtol=1e-4, atol=0)
