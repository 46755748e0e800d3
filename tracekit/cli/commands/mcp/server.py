"""The server: each tool asks `Answers` one question. Errors say what to call instead."""

import functools
import logging
from collections.abc import Callable

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from tracekit import __version__
from tracekit.cli.commands.mcp import quoting
from tracekit.cli.commands.mcp.answers import QUESTIONS, Answer, Answers
from tracekit.errors import TracekitError
from tracekit.report import explanations
from tracekit.report.render import json as render_json
from tracekit.rules import documents
from tracekit.sql import table_documents

INSTRUCTIONS = f"""\
tracekit says why a distributed PyTorch training is slow, from torch.profiler traces: cause, place, cost and fix.
1. list_runs names the runs.
2. check(run) gives the findings, the costliest first: saving_ns and saving_ratio are what the mean step saves without
   the cause; saving_is says how that is known.
3. finding(run, finding) has the evidence; what_if(run) predicts the step; compare(reference, candidate) says why a run
   became slower; hang(run) and memory(run) read flight recorder dumps and memory snapshots.
4. explain(name) says what a rule, table, cause, metric or term means.
Keys have their units: ns, bytes, ratio (0 to 1). Where data.is_trusted is false, read data.doubts first. An answer is
bounded: left_out and next_offset say what is missing. {quoting.NOTICE}
"""
_READS_ONLY = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
_LOG = logging.getLogger(__name__)


def build(answers: Answers) -> MCPServer:
    """A server whose tools answer about the runs of `answers`, and whose resources are schema, rules and glossary."""
    server = MCPServer("tracekit", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    for question in QUESTIONS:
        server.add_tool(_tool(answers, question), annotations=_READS_ONLY, structured_output=False)

    @server.resource("tracekit://schema", mime_type="text/markdown")
    def schema() -> str:
        """Tables of a run: rows, columns, units."""
        return explanations.schema_page(table_documents.own_documents())

    @server.resource("tracekit://rules", mime_type="application/json")
    def rules() -> str:
        """Rules: what each reports, by code."""
        return render_json.render(explanations.rules_document(documents.all_documents()))

    @server.resource("tracekit://glossary", mime_type="application/json")
    def glossary() -> str:
        """Terms that answers use."""
        return render_json.render(explanations.meanings_document(explanations.terms()))

    return server


def _tool(answers: Answers, question: Callable[..., Answer]) -> Callable[..., str]:
    """A function with the question's name, parameters and documentation, which gives its answer as JSON."""
    bound = question.__get__(answers)

    @functools.wraps(bound)
    def ask(**arguments: object) -> str:
        try:
            return answers.ask(lambda: bound(**arguments))
        except TracekitError as error:
            raise ToolError(quoting.quote(str(error), quoting.MAX_SENTENCE)) from None
        except Exception as error:  # noqa: BLE001 the agent gets an answer, and the server goes on
            _LOG.exception("tracekit mcp: %s", question.__name__)
            name = type(error).__name__
            raise ToolError(f"internal error ({name}); its traceback is on stderr of tracekit mcp") from None

    return ask
