"""Roles: groups of processes recorded at the same time are runs of their own; all other files are read as before."""

import json
from pathlib import Path

import pytest

from tests.support.kineto_files import trace, write
from tracekit.errors import InputError
from tracekit.ingest import roles
from tracekit.ingest.loader import load


def of_process(process, rank=0, world_size=1, **options):
    content = trace(rank, world_size, **options)
    for event in content["traceEvents"]:
        event["pid"] = process
    return content


def write_trainer(folder, pattern="trainer/rank{}.json", **options):
    for rank in (0, 1):
        write(folder / pattern.format(rank), of_process(70 + rank, rank, 2, **options))


def kinds(run):
    return run.data_quality["kind"].to_list()


def names(run):
    return [str(Path(source.path).name) for source in run.sources]


def test_groups_of_processes_that_were_recorded_at_the_same_time_are_roles(tmp_path):
    write_trainer(tmp_path)
    write(tmp_path / "rollout" / "rank0.json", of_process(90, start_us=700))
    run = load(tmp_path)
    assert list(run.roles) == ["trainer", "rollout"]
    assert (run.role, run.name, run.path) == ("trainer", "trainer", str(tmp_path / "trainer"))
    assert run.roles["trainer"] is run
    assert (run.ranks, run.roles["rollout"].ranks) == ((0, 1), (0,))
    assert [kinds(of_role) for of_role in run.roles.values()] == [["roles"], ["roles"]]
    assert run.roles["rollout"].roles is run.roles


def test_a_role_is_loaded_by_its_name(tmp_path):
    write_trainer(tmp_path)
    write(tmp_path / "rollout" / "rank0.json", of_process(90))
    run = load(tmp_path, role="rollout")
    assert (run.role, run.path, names(run)) == ("rollout", str(tmp_path / "rollout"), ["rank0.json"])
    with pytest.raises(InputError, match=r"rollouts.*did you mean rollout.*trainer, rollout"):
        load(tmp_path, role="rollouts")
    with pytest.raises(InputError, match="name no role"):
        load(tmp_path / "rollout", role="rollout")


def test_three_roles(tmp_path):
    write_trainer(tmp_path)
    for number, name in enumerate(("reward", "rollout")):
        write(tmp_path / "job" / name / "rank0.json", of_process(90 + number, start_us=100 + number))
    assert sorted(load(tmp_path).roles) == ["job/reward", "job/rollout", "trainer"]


def test_files_in_one_folder_are_named_by_words(tmp_path):
    write_trainer(tmp_path, "trainer-rank{}.json")
    write(tmp_path / "rollout_actor-rank0.json", of_process(90))
    run = load(tmp_path)
    assert list(run.roles) == ["trainer", "rollout_actor"]
    assert [of_role.name for of_role in run.roles.values()] == [f"{tmp_path.name} ({name})" for name in run.roles]
    assert {of_role.path for of_role in run.roles.values()} == {str(tmp_path)}


def test_the_manifest_states_the_name(tmp_path):
    for folder, role, process in (("a", "trainer", 70), ("b", "rollout", 90), ("c", "rollout", 91)):
        write(tmp_path / folder / "window000" / "rank0.json", of_process(process))
        (tmp_path / folder / "run.json").write_text(json.dumps({"role": role, "world_size": 1}))
    run = load(tmp_path)
    assert sorted(run.roles) == ["rollout 0", "rollout 1", "trainer"]
    assert run.roles["trainer"].path == str(tmp_path / "a")
    assert run.roles["trainer"].manifest["role"] == "trainer"


def test_processes_of_containers_with_equal_ids_are_roles(tmp_path):
    for rank in (0, 1):
        write(tmp_path / "trainer" / f"rank{rank}.json", of_process(1, rank, 2, steps=9))
    write(tmp_path / "rollout" / "rank0.json", of_process(1, start_us=5_000))
    assert sorted(load(tmp_path).roles) == ["rollout", "trainer"]


def test_of_two_attempts_at_a_role_the_latest_is_loaded(tmp_path):
    write_trainer(tmp_path, steps=100)
    for attempt in (0, 1):
        write(tmp_path / f"r{attempt}" / "rank0.json", of_process(90 + attempt, start_us=100 + attempt * 50_000))
        (tmp_path / f"r{attempt}" / "run.json").write_text('{"role": "rollout"}')
    run = load(tmp_path)
    assert sorted(run.roles) == ["rollout", "trainer"]
    assert run.roles["rollout"].path == str(tmp_path / "r1")
    assert sorted(kinds(run)) == ["mixed_jobs", "roles"]


@pytest.mark.parametrize(
    "other",
    [
        of_process(90, start_us=60e6),
        of_process(70),
        of_process(90, baseTimeNanoseconds=0),
        of_process(90, start_us=4000e6),
    ],
    ids=["later", "copy", "no time of day", "an hour later"],
)
def test_what_does_not_cooperate_is_another_run_as_before(tmp_path, other):
    write_trainer(tmp_path)
    write(tmp_path / "other" / "rank0.json", other)
    run = load(tmp_path)
    assert (run.roles, run.role, run.path) == ({}, "", str(tmp_path))
    assert len(run.sources) == (1 if len(run.ranks) == 1 else 2)
    assert "mixed_jobs" in kinds(run)
    assert "roles" not in kinds(run)


def test_many_groups_are_runs(tmp_path):
    for process in range(roles.MAX_ROLES + 1):
        write(tmp_path / f"job{process}" / "rank0.json", of_process(100 + process))
    run = load(tmp_path)
    assert run.roles == {}
    assert kinds(run) == ["mixed_jobs"] * roles.MAX_ROLES


def test_a_truncated_role_is_read_as_far_as_possible(tmp_path):
    write_trainer(tmp_path)
    path = write(tmp_path / "rollout" / "rank0.json", of_process(90, steps=8))
    path.write_bytes(path.read_bytes()[:-1500])
    run = load(tmp_path)
    assert sorted(run.roles) == ["rollout", "trainer"]
    assert 0 < run.roles["rollout"].trace(0).steps.height < 8


def test_a_role_without_events_is_left_out(tmp_path):
    write_trainer(tmp_path)
    path = write(tmp_path / "rollout" / "rank0.json", of_process(90))
    path.write_bytes(path.read_bytes()[:120])
    run = load(tmp_path)
    assert run.roles == {}
    assert run.ranks == (0, 1)


def test_names_with_control_characters_are_inert(tmp_path):
    write_trainer(tmp_path)
    write(tmp_path / "roll\x1b[31mout" / "rank0.json", of_process(90))
    assert [name for name in load(tmp_path).roles if not name.isprintable()] == []
