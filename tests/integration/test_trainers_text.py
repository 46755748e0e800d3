"""Training on real files through a real tokenizer, streamed or not, and resuming in the middle of a document."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tracekit
from instrumented_trainers.text.batches import standard_library
from tests.integration import trainings
from tests.integration.trainings import case, micro
from tests.support import process_group

pytest.importorskip("tokenizers", reason="needs the extra [tokenizers]")

SHORT: dict[str, Any] = {"steps": 6, "train_tokenizer": 400, "profile_wait": 1}
SAVED = {**SHORT, "checkpoint_every": 3, "micro_batches": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, sources in (("a", standard_library()[:9]), ("b", standard_library()[9:20])):
        rows = [json.dumps({"code": path.read_text("utf-8", "replace")}) + "\n" for path in sources]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[int, dict[str, process_group.Outcome]]:
    data = {"data": (folder / "a.jsonl", folder / "b.jsonl"), "text_field": "code"}
    streamed = {**SAVED, **data, "stream": True}

    def resumed(name: str, run: str, settings: Mapping[str, Any], **changes: Any) -> functools.partial[Any]:
        origin = str(folder / run / "checkpoints" / "step-000003")
        return case(micro("fsdp2", folder / name, **{**settings, **changes, "resume": origin}))

    cases = {
        "memory": case(micro("fsdp2", folder / "memory", **SAVED, **data)),
        "memory, resumed": resumed("memory again", "memory", {**SAVED, **data}),
        "stream": case(micro("fsdp2", folder / "stream", **streamed)),
        "stream, resumed": resumed("stream again", "stream", streamed),
        "no such field": case(micro("ddp", folder / "x", **{**SHORT, "data": data["data"], "stream": True})),
    }
    alone = {
        "stream, one rank": resumed("stream alone", "stream", streamed, world_size=1),
        "memory, one rank": resumed("memory alone", "memory", {**SAVED, **data}, world_size=1),
    }
    pair = process_group.run_cases(2, cases, timeout_s=400)
    return {2: pair, 1: process_group.run_cases(1, alone, timeout_s=200)}


def losses(outcome: process_group.Outcome) -> list[list[float]]:
    assert not [said for _, said in outcome.results() if said]
    return [of_rank for of_rank, _ in outcome.results()]


@pytest.mark.parametrize("name", ["memory", "stream"])
def test_a_resumed_training_has_the_batches_of_the_uninterrupted_one(
    name: str, outcomes: dict[int, dict[str, process_group.Outcome]]
) -> None:
    whole = losses(outcomes[2][name])
    assert len(whole[0]) == 6
    assert losses(outcomes[2][f"{name}, resumed"]) == [of_rank[3:] for of_rank in whole]


def test_a_stream_resumes_on_the_same_number_of_ranks_only(
    outcomes: dict[int, dict[str, process_group.Outcome]],
) -> None:
    ((_, said),) = outcomes[1]["stream, one rank"].results()
    assert "divided among 2 ranks and cannot be redistributed to 1; resume with --world-size 2" in said
    assert len(losses(outcomes[1]["memory, one rank"])[0]) == 3


def test_the_run_has_its_tokenizer_and_the_resumed_one_the_same(
    folder: Path, outcomes: dict[int, dict[str, process_group.Outcome]]
) -> None:
    losses(outcomes[2]["stream, resumed"])
    assert (folder / "stream again" / "tokenizer.json").read_bytes() == (
        folder / "stream" / "tokenizer.json"
    ).read_bytes()
    assert trainings.manifest(folder / "stream")["model"]["vocabulary"] == 512
    assert tracekit.load(str(folder / "stream"), cache=False).ranks == (0, 1)


def test_a_wrong_field_ends_all_ranks_with_one_line(outcomes: dict[int, dict[str, process_group.Outcome]]) -> None:
    for _, said in outcomes[2]["no such field"].results():
        assert "no text in 'text' (code); name its field with --text-field" in said
