"""Gates -> workflow commands, which GitHub Actions shows as annotations at the lines of a pull request.

The syntax and its escaping are those of "Workflow commands for GitHub Actions" (docs.github.com) and of GitHub's own
toolkit, packages/core/src/command.ts: %, CR and LF are percent-encoded in messages, ':' and ',' in properties too.
The runner obeys the older form ##[command] too, anywhere in a line. GitHub shows at most ten errors, ten warnings and
ten notices of a step.
"""

from collections.abc import Sequence

from tracekit.model import escaping
from tracekit.regression.gate import CheckResult
from tracekit.report.ci import results
from tracekit.report.ci.code_locations import Checkout, LocationKind
from tracekit.report.ci.results import CheckItem, Level
from tracekit.report.text import headline

MAX_OF_LEVEL = 10
_MAX_TITLE = 200
_MAX_MESSAGE = 3000


def render(gates: Sequence[CheckResult], checkout: Checkout) -> str:
    """Return one summary line per run and the annotations: failures as errors, known findings as notices."""
    by_name = results.gates_by_name(gates)
    lines = [
        escaping.without_commands(f"tracekit: {escaping.inert(f'{name}: {headline(gate)}')}") for name, gate in by_name
    ]
    several = len(gates) > 1
    items = [(f"{name}: " if several else "", gate, item) for name, gate in by_name for item in results.items(gate)]
    for level in Level:
        lines += _of_level(level, [entry for entry in items if entry[2].level is level], checkout)
    return "\n".join(lines) + "\n"


def _of_level(level: Level, entries: Sequence[tuple[str, CheckResult, CheckItem]], checkout: Checkout) -> list[str]:
    annotated = entries if len(entries) <= MAX_OF_LEVEL else entries[: MAX_OF_LEVEL - 1]
    lines = [_annotation(run, gate, item, checkout) for run, gate, item in annotated]
    rest = entries[len(annotated) :]
    if rest:
        names = ", ".join(f"{run}{item.title}" for run, _, item in rest)
        lines.append(_command(level, {"title": f"tracekit: {len(rest)} more"}, names))
    return lines


def _annotation(run: str, gate: CheckResult, item: CheckItem, checkout: Checkout) -> str:
    properties: dict[str, str] = {}
    location = checkout.locate(gate.report.run, item.finding)
    if location.kind is not LocationKind.TRACE:  # GitHub has no line of a trace to show
        properties |= {"file": location.path, "line": str(location.line)}
    properties["title"] = f"tracekit: {run}{item.title}"
    return _command(item.level, properties, item.message)


def _command(level: Level, properties: dict[str, str], message: str) -> str:
    texts = {name: _data(escaping.inert(value, _MAX_TITLE)) for name, value in properties.items()}
    fields = ",".join(f"{name}={text.replace(':', '%3A').replace(',', '%2C')}" for name, text in texts.items())
    return f"::{level} {fields}::{_data(escaping.inert(message, _MAX_MESSAGE))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
