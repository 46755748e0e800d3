"""Settings are found, read and overridden; an error is one line with the remedy."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support import drawn_traces
from tests.support.wording import Wording
from tracekit.cli import settings as config
from tracekit.cli import settings_file
from tracekit.cli.settings import CheckSettings, Ignore
from tracekit.conventions import devices
from tracekit.conventions.devices import DeviceOverride
from tracekit.errors import ConfigError
from tracekit.model.run import Run
from tracekit.regression.thresholds import Thresholds
from tracekit.rules.rule import Finding, Report, Rule, Severity


@dataclass(frozen=True)
class SlowStart(Rule):
    """Start-up that takes long."""

    code: ClassVar[str] = "BOOT001"
    max_start_ratio: float = 0.2
    min_steps: int = 5
    strict: bool = False
    phase: str = "data"

    def check(self, run: Run) -> Iterator[Finding]:
        yield Finding(self.code, Severity.INFO, "slow", "start faster")


@dataclass(frozen=True)
class ColdCache(Rule):
    """A cache that is cold."""

    code: ClassVar[str] = "BOOT002"

    def check(self, run: Run) -> Iterator[Finding]:
        yield Finding(self.code, Severity.INFO, "cold", "warm it")


CATALOG = (SlowStart, ColdCache)


def read(folder: Path, text: str) -> CheckSettings:
    path = folder / settings_file.FILE
    path.write_text(text)
    return config.read(path, CATALOG)


def test_every_setting_is_read(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        """
        fail_on = "warning"
        select = ["BOOT", "cold-cache"]
        ignore = [{code = "BOOT001", reason = "known", until = 2027-01-31}, {code = "cold-cache", reason = "so it is"}]
        [rules.slow-start]
        max_start_ratio = 1
        strict = true
        [baseline]
        max_cpu_stretch = 2
        min_cpu_recordings = 1
        """,
    )
    assert settings.baseline == Thresholds(max_cpu_stretch=2.0, min_cpu_recordings=1)
    assert settings.fail_on is Severity.WARNING
    assert settings.select == ("BOOT", "cold-cache")
    assert settings.ignore == (Ignore("BOOT001", "known", date(2027, 1, 31)), Ignore("cold-cache", "so it is"))
    assert settings.thresholds == {"BOOT001": {"max_start_ratio": 1.0, "strict": True}}


def test_devices_are_read_in_operations_and_bytes_per_second(tmp_path: Path) -> None:
    text = """
        [devices."My GPU"]
        peak_bf16_tflops = 400
        memory_gb_per_s = 2000.0
        [devices.H100]
        link_gb_per_s = 300
        """
    mine, h100 = read(tmp_path, text).read.devices
    assert mine == DeviceOverride("My GPU", {"bf16": 4e14}, 2e12)
    assert h100 == DeviceOverride("H100", {}, None, 3e11)
    listed = devices.find_overridden("NVIDIA H100 80GB HBM3", [mine, h100])
    assert listed is not None
    assert (listed.link_bytes_per_s, listed.peaks["bf16"], listed.memory_bytes_per_s) == (3e11, 989e12, 3350e9)
    own = devices.find_overridden("ACME My GPU 2", [mine, h100])
    assert own is not None
    assert (own.peaks["fp16"], own.link_bytes_per_s) == (4e14, None)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    settings = read(tmp_path, "")
    assert (settings.fail_on, settings.select, settings.ignore) == (Severity.ERROR, (), ())


WRONG = {
    "unknown key": ('fail_an = "error"', "unknown key 'fail_an': did you mean fail_on?"),
    "severity": ('fail_on = "warnings"', "fail_on: 'warnings' is no severity: did you mean warning?"),
    "severity type": ("fail_on = 3", "fail_on: expected text, not 3"),
    "select type": ('select = "BOOT001"', "select: expected a list"),
    "select unknown": ('select = ["BOOT01"]', "select: no rule is called 'BOOT01': did you mean BOOT001?"),
    "rules type": ("rules = 3", "rules: expected a table, not 3"),
    "rule unknown": ("[rules.slow-stat]\nx = 1", "no rule is called 'slow-stat': did you mean slow-start?"),
    "rule family": ("[rules.BOOT]\nx = 1", "BOOT is a family of rules: name one of BOOT001, BOOT002"),
    "rule type": (
        "[rules]\nBOOT001 = 3",
        "rules.BOOT001: expected a table of max_start_ratio, min_steps, strict, phase, not 3",
    ),
    "threshold unknown": (
        "[rules.BOOT001]\nmax_start = 1",
        "rules.BOOT001: unknown key 'max_start': did you mean max_start_ratio?",
    ),
    "threshold of none": ("[rules.BOOT002]\nx = 1", "BOOT002 has no thresholds"),
    "float": (
        '[rules.BOOT001]\nmax_start_ratio = "0.2"',
        "max_start_ratio: expected a number, not '0.2'",
    ),
    "float from bool": ("[rules.BOOT001]\nmax_start_ratio = true", "max_start_ratio: expected a number, not True"),
    "ratio": ("[rules.BOOT001]\nmax_start_ratio = 20.0", "max_start_ratio: expected a ratio from 0 to 1, not 20.0"),
    "not a number": (
        "[rules.BOOT001]\nmax_start_ratio = nan",
        "max_start_ratio: expected a ratio from 0 to 1, not nan",
    ),
    "int": ("[rules.BOOT001]\nmin_steps = 2.5", "min_steps: expected an integer, not 2.5"),
    "int from bool": ("[rules.BOOT001]\nmin_steps = true", "min_steps: expected an integer, not True"),
    "bool": ("[rules.BOOT001]\nstrict = 1", "strict: expected true or false, not 1"),
    "text": ("[rules.BOOT001]\nphase = 1", "phase: expected text, not 1"),
    "ignore type": ('ignore = "BOOT001"', "ignore: expected a list"),
    "ignore item": ('ignore = ["BOOT001"]', "ignore[0]: expected a table of code, reason, until, not 'BOOT001'"),
    "ignore reason": (
        'ignore = [{code = "BOOT001"}]',
        "ignore[0]: reason is required",
    ),
    "ignore blank": (
        'ignore = [{code = "BOOT001", reason = " "}]',
        "ignore[0].reason: expected text that is not blank, not ' '",
    ),
    "ignore code": ('ignore = [{code = "BOOT9", reason = "x"}]', "ignore[0]: no rule is called 'BOOT9'"),
    "ignore key": (
        'ignore = [{code = "BOOT001", reasn = "x"}]',
        "ignore[0]: unknown key 'reasn': did you mean reason?",
    ),
    "ignore date": ('ignore = [{code = "BOOT001", reason = "x", until = "soon"}]', "ignore[0].until: expected a date"),
    "baseline key": ("[baseline]\nmetric = []", "baseline: unknown key 'metric': did you mean metrics?"),
    "baseline ratio": (
        "[baseline]\nmin_change_ratio = 3.0",
        "baseline.min_change_ratio: expected a ratio from 0 to 1, not 3.0",
    ),
    "baseline count": (
        "[baseline]\nmin_cpu_recordings = 0",
        "baseline.min_cpu_recordings: ",
    ),
    "baseline metric": ('[baseline]\nmetrics = ["step_tim"]', "baseline.metrics: "),
    "budget": ("[budget]\nstep_time = -1", "budget: step_time: "),
    "select item": ("select = [1]", "select[0]: expected text, not 1"),
    "date type": ('ignore = [{code = "BOOT001", reason = "x", until = 3}]', "ignore[0].until: expected a date"),
    "devices type": ("devices = 3", "devices: expected a table, not 3"),
    "device type": ("[devices]\nH100 = 3", 'devices."H100": expected a table of peak_fp64_tflops, '),
    "device key": (
        '[devices."My GPU"]\npeak_bf16 = 3',
        "devices.\"My GPU\": unknown key 'peak_bf16': did you mean peak_bf16_tflops?",
    ),
    "device value": (
        '[devices."H100"]\nmemory_gb_per_s = "3350"',
        "devices.\"H100\": memory_gb_per_s: expected a number, not '3350'",
    ),
    "device zero": ("[devices.H100]\nmemory_gb_per_s = 0", 'devices."H100": memory_gb_per_s: expected a number > 0'),
    "device memory": ('[devices."My GPU"]\npeak_bf16_tflops = 3', "so memory_gb_per_s is required"),
    "device empty": ("[devices.H100]", 'devices."H100": expected a name and some of peak_fp64_tflops'),
    "toml": ("fail_on = ", "is not valid TOML"),
    "deep key": ("a" + ".b" * 101 + " = 1", "a key of more than 100 parts"),
    "long": ("#" * (1 << 20) + "\n", "longer than 1 MiB"),
    "change": ('[tune.arguments]\nworkers = "--n {value}"', "tune.arguments: no change is called 'workers'"),
    "blank argument": ("[tune.arguments]\ncompile = ' '", "text that is not blank"),
    "open quote": ("[tune.arguments]\ncompile = '--a=\"'", "no closing quotation"),
    "argument that is no text": ("[tune.arguments]\ncompile = 1", "expected text"),
    "key of tune": ("[tune]\nargument = {}", "unknown key 'argument'"),
}


@pytest.mark.parametrize(("text", "expected"), WRONG.values(), ids=WRONG)
def test_an_error_is_one_line_that_starts_with_the_file(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert expected in message
    assert message.startswith(str(tmp_path / settings_file.FILE))
    assert "\n" not in message


def test_a_missing_file_is_named(tmp_path: Path, wording: Wording) -> None:
    with wording.raises(ConfigError):
        config.read(tmp_path / "absent.toml", CATALOG)


def test_the_nearest_file_is_used_and_projects_without_a_section_are_skipped(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert settings_file.find_file(inner) is None or tmp_path not in settings_file.find_file(inner).parents
    (tmp_path / "pyproject.toml").write_text('[tool.tracekit]\nfail_on = "info"\n')
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    found = settings_file.find_file(inner)
    assert found == tmp_path / "pyproject.toml"
    assert config.read(found, CATALOG).fail_on is Severity.INFO
    (tmp_path / "tracekit.toml").write_text('fail_on = "never"\n')
    found = settings_file.find_file(inner)
    assert found == tmp_path / "tracekit.toml"
    assert config.read(found, CATALOG).fail_on is None


def test_a_named_pyproject_without_a_section_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.other]\n")
    with pytest.raises(ConfigError, match=r"no \[tool\.tracekit\]"):
        config.read(tmp_path / "pyproject.toml", CATALOG)


def test_assignments_override_the_file(tmp_path: Path) -> None:
    settings = read(tmp_path, "[rules.BOOT001]\nmax_start_ratio = 0.5\nmin_steps = 7")
    settings = config.with_settings(settings, ["slow-start.max_start_ratio=0.1", "BOOT001.strict=true"], CATALOG)
    (rule, _) = config.configured_rules(settings, CATALOG)
    assert rule == SlowStart(max_start_ratio=0.1, min_steps=7, strict=True)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("BOOT001", "expected CODE.field=value"),
        ("BOOT001.min_steps", "expected CODE.field=value"),
        ("BOOT1.min_steps=3", "no rule is called 'BOOT1'"),
        ("BOOT001.min_step=3", "did you mean min_steps?"),
        ("BOOT001.min_steps=3.5", "expected an integer, not '3.5'"),
        ("BOOT001.strict=maybe", "expected true or false, not 'maybe'"),
        ("BOOT001.max_start_ratio=inf", "expected a ratio from 0 to 1, not 'inf'"),
    ],
)
def test_an_assignment_is_validated(setting: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.with_settings(CheckSettings(), [setting], CATALOG)
    assert str(caught.value).startswith(f"--set {setting}: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("select", "codes"),
    [
        ((), ["BOOT001", "BOOT002"]),
        (("BOOT",), ["BOOT001", "BOOT002"]),
        (("BOOT002",), ["BOOT002"]),
        (("slow-start",), ["BOOT001"]),
    ],
)
def test_rules_are_selected_by_code_name_and_family(select: tuple[str, ...], codes: list[str]) -> None:
    assert [rule.code for rule in config.configured_rules(CheckSettings(select=select), CATALOG)] == codes


def test_a_selection_that_matches_nothing_is_refused(wording: Wording) -> None:
    with wording.raises(ConfigError):
        config.configured_rules(CheckSettings(select=("cold-cash",)), CATALOG)


@pytest.mark.parametrize("code", ["BOOT001", "slow-start", "BOOT", "BOOT001-5feceb66"])
def test_an_ignore_names_a_code_a_name_a_family_or_one_finding(code: str) -> None:
    found = Finding("BOOT001", Severity.ERROR, "slow", "start faster", subject="0")
    other = Finding("DATA001", Severity.ERROR, "cut", "record again")
    ignores = [Ignore(code, "known")]
    assert config.ignore_for(found, ignores, CATALOG, today=date(2026, 1, 1)) == ignores[0]
    assert config.ignore_for(other, ignores, CATALOG, today=date(2026, 1, 1)) is None


def test_an_ignore_expires_after_its_last_day() -> None:
    found = Finding("BOOT001", Severity.ERROR, "slow", "start faster")
    ignores = [Ignore("BOOT001", "known", until=date(2026, 1, 1))]
    assert config.ignore_for(found, ignores, CATALOG, today=date(2026, 1, 1)) is not None
    assert config.ignore_for(found, ignores, CATALOG, today=date(2026, 1, 2)) is None


def test_ignored_findings_are_removed_and_noted(wording: Wording) -> None:
    slow = Finding("BOOT001", Severity.ERROR, "slow", "start faster", impact=0.5)
    cold = Finding("BOOT002", Severity.INFO, "cold", "warm it")
    report = Report(run=drawn_traces.run(), findings=(slow, cold), notes=("n",), inputs=(), tool_version="0")
    ignores = [Ignore("slow-start", "known", date(2027, 1, 31)), Ignore("BOOT002", "so it is", date(2025, 1, 1))]

    filtered = config.apply_ignores(report, ignores, CATALOG, today=date(2026, 1, 1))

    assert filtered.findings == (cold,)
    assert [(one.finding, one.reason, one.until) for one in filtered.ignored] == [(slow, "known", date(2027, 1, 31))]
    wording(*filtered.notes)


@pytest.mark.parametrize("name", ["BOOT001", "slow-start"])
def test_a_rule_is_found_by_code_and_name(name: str) -> None:
    assert settings_file.find_rule(name, CATALOG) is SlowStart


def test_a_rule_that_is_not_there_is_not_found(wording: Wording) -> None:
    with wording.raises(ConfigError):
        settings_file.find_rule("slow-strat", CATALOG)
