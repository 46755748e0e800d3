"""Weights from and for Hugging Face: plain transformers computes what the trainers compute, and what they trained."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from instrumented_trainers import export, huggingface
from instrumented_trainers.config import InvalidConfigError
from instrumented_trainers.huggingface import PretrainedWeights
from instrumented_trainers.model import Llama
from instrumented_trainers.parallelism import STRATEGIES
from instrumented_trainers.text.batches import read_tokens, standard_library
from instrumented_trainers.text.tokenizer import FileTokenizer
from tests.integration import trainings
from tests.integration.trainings import case, micro
from tests.support import process_group
from tests.support.selection import OutcomesOnDemand, others_in_accuracy
from tracekit import conventions

transformers = pytest.importorskip("transformers", reason="needs the extra [huggingface]")
pytest.importorskip("tokenizers", reason="needs the extra [tokenizers]")

TOLERANCE = 1e-5
EVERYDAY = ("fsdp2", "yafsdp")
LENGTH = 32
PLAIN: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}


def pretrained(folder: Path, **changes: Any) -> Any:
    """Save a model of transformers with random weights and return it."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**PLAIN, "initializer_range": 0.06, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return model.eval()


def ours(folder: Path) -> Llama:
    with torch.device("meta"):
        model = Llama(huggingface.read_sizes(folder))
    model.materialize(torch.device("cpu"), PretrainedWeights(model, folder))
    return model


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left - right).abs().max().item()


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_our_model_computes_what_theirs_computes_and_back(tied: bool, tmp_path: Path) -> None:
    theirs = pretrained(tmp_path / "theirs", tie_word_embeddings=tied)
    model, tokens = ours(tmp_path / "theirs"), torch.randint(320, (2, 200))
    expected = theirs(tokens).logits
    assert expected.std() > 0.1
    assert difference(model(tokens), expected) < TOLERANCE
    weights = dict(model.named_parameters())
    huggingface.save(
        tmp_path / "back", huggingface.config_of(model.config, positions=2048, dtype=torch.float32), weights
    )
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(again) is transformers.LlamaForCausalLM
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert difference(again(tokens).logits, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2', only 'llama' is known"),
        ({"attention_bias": True}, "attention_bias True, only False is known"),
        ({"head_dim": 32}, "head_dim 32, not 16"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rotary positions of type 'llama3'"),
        ({"hidden_size": 66}, "is not understood: width 66, heads 4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_model_that_ours_cannot_be_is_refused(changes: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    config = {**PLAIN, "model_type": "llama", **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidConfigError) as refused:
        huggingface.read_sizes(tmp_path)
    assert words in str(refused.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Mapping[str, process_group.Outcome]:
    """Trainings of a pretrained model and of a new one with a tokenizer of its own, evaluated after the last step."""
    pretrained(folder / "theirs", tie_word_embeddings=True)
    (folder / "held out.txt").write_bytes(standard_library()[3].read_bytes()[:3000])
    settings: dict[str, Any] = {
        "steps": 2,
        "checkpoint_every": 2,
        "data": tuple(standard_library()[:4]),
        "eval_data": (folder / "held out.txt",),
        "eval_every": 2,
        "learning_rate": 1e-2,
        "tokens": LENGTH,
    }
    cases = {
        name: case(micro(name, folder / name, **{**settings, "init_from": folder / "theirs"})) for name in STRATEGIES
    }
    cases["trained"] = case(micro("yafsdp", folder / "trained", **{**settings, "train_tokenizer": 400}))
    return OutcomesOnDemand(2, cases, {*EVERYDAY, "trained"})


def loss_in_transformers(exported: Path, tokens: torch.Tensor) -> float:
    """Return the loss on the tokens that a training of 2 ranks of 2 sequences evaluates, in plain transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    count = (len(tokens) - 1) // LENGTH
    rows = torch.stack([tokens[place * LENGTH : (place + 1) * LENGTH + 1] for place in range(min(count, 40))]).long()
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def last_evaluation(run: Path) -> float:
    return float(trainings.rows(run, 0, conventions.METRICS_SUFFIX)[-1]["eval_loss"])


@pytest.mark.parametrize("strategy", others_in_accuracy(STRATEGIES, EVERYDAY))
def test_an_exported_checkpoint_has_the_loss_of_the_trainings_evaluation(
    strategy: str, folder: Path, outcomes: Mapping[str, process_group.Outcome], tmp_path: Path
) -> None:
    assert all(losses for losses, _ in outcomes[strategy].results()), outcomes[strategy].results()
    assert export.main([str(folder / strategy), str(tmp_path / "out")]) == 0
    tokens = torch.frombuffer(bytearray((folder / "held out.txt").read_bytes() + b"\0"), dtype=torch.uint8).int()
    tokens[-1] = 256
    loss = loss_in_transformers(tmp_path / "out", tokens)
    assert loss == pytest.approx(last_evaluation(folder / strategy), rel=TOLERANCE)
    assert loss != pytest.approx(loss_in_transformers(folder / "theirs", tokens), rel=0.01)
    assert trainings.manifest(folder / strategy)["model"]["name"] == "theirs"


def test_an_exported_model_comes_with_its_tokenizer(
    folder: Path, outcomes: Mapping[str, process_group.Outcome], tmp_path: Path
) -> None:
    outcomes["trained"].results()
    run, out = folder / "trained", tmp_path / "out"
    checkpoint = export.export(run, out)
    assert checkpoint == run / "checkpoints" / "step-000002"
    words = transformers.AutoTokenizer.from_pretrained(out)
    text = (folder / "held out.txt").read_text()
    tokens = read_tokens([folder / "held out.txt"], FileTokenizer(run / "tokenizer.json", None))
    assert words(text)["input_ids"] == tokens.tolist()[:-1]
    assert words.eos_token_id == tokens.tolist()[-1] == 0
    assert loss_in_transformers(out, tokens) == pytest.approx(last_evaluation(run), rel=TOLERANCE)


def test_a_damaged_or_missing_checkpoint_and_a_full_folder_are_refused(
    folder: Path, outcomes: Mapping[str, process_group.Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes["fsdp2"].results()
    assert export.main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "no complete checkpoint; train with --checkpoint-every N" in capsys.readouterr().err
    copy = tmp_path / "run"
    shutil.copytree(folder / "fsdp2", copy)
    assert export.main([str(copy), str(copy)]) == 2
    assert "is not empty; name another folder, or add --overwrite" in capsys.readouterr().err
    shard = copy / "checkpoints" / "step-000002" / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert export.main([str(copy), str(tmp_path / "out")]) == 2
    assert "is damaged: rank 1: __1_0.distcp differs from the saved file" in capsys.readouterr().err
