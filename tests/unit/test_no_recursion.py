"""No function calls itself on what a file contains: nesting of user data must not reach the stack's limit."""

import ast
from collections.abc import Iterator
from pathlib import Path

import tracekit

ROOMS = ("ingest", "report/render", "conventions")
ALLOWED = {
    "conventions/redaction.py:_inspect": "JSON within a string, at most 6 levels",
    "conventions/redaction.py:_redact_json_within": "JSON within a string, at most 6 levels",
    "conventions/redaction.py:redact": "JSON within a string, at most 6 levels",
    "conventions/redaction.py:redact_strings": "JSON within a string, at most 6 levels",
    "conventions/redaction.py:redact_text": "JSON within a string, at most 6 levels",
    "ingest/checkpoint_files/__init__.py:_folders": "folders, to a depth that is counted",
    "ingest/file_states.py:_in_folder": "folders, to a depth that is counted",
    "ingest/files.py:_find_files": "the files that a pattern matches",
    "ingest/readers/execution_trace.py:_text": "JSON, read with at most 100 levels",
    "ingest/readers/normalize/collectives.py:_product": "JSON, read with at most 100 levels",
    "ingest/readers/normalize/host_slices.py:_at": "once, for the second choice",
    "ingest/readers/perfetto/pytorch_slices.py:_nested_value": "messages, to a depth that is counted",
    "report/render/json.py:to_json_value": "results of tracekit; those of a query have the depth of its types",
}


def test_functions_that_call_themselves_have_a_reason():
    root = Path(tracekit.__file__).parent
    paths = (path for room in ROOMS for path in root.joinpath(room).rglob("*.py"))
    recursive = {f"{path.relative_to(root)}:{name}" for path in paths for name in recursive_functions(path.read_text())}
    assert recursive == ALLOWED.keys()


def test_direct_and_mutual_recursion_are_recognized():
    text = """
def direct(x): return direct(x)
def mapped(x): return map(mapped, x)
def first(x): return second(x)
def second(x): return first(x)
def local(x):
    other = 1
    return other
def other(x): return local(x)
class A:
    def method(self): return self.helper()
    def helper(self): return self.method()
    def read(self): return read()
def read(): return A().read()
"""
    assert set(recursive_functions(text)) == {"direct", "mapped", "first", "second", "method", "helper"}


def recursive_functions(text: str) -> set[str]:
    """Names of functions that reach themselves through functions of the module or methods of their class."""
    tree = ast.parse(text)
    scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    return {name for scope in scopes for name in _recursive_in(scope)}


def _recursive_in(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    definitions = {node.name: node for node in scope.body if isinstance(node, ast.FunctionDef)}
    is_class = isinstance(scope, ast.ClassDef)
    references = {name: _references(node, is_class=is_class) & definitions.keys() for name, node in definitions.items()}
    for name in definitions:
        reached, waiting = set(), [name]
        while waiting:
            fresh = references[waiting.pop()] - reached
            reached |= fresh
            waiting += fresh
        if name in reached:
            yield name
    for node in definitions.values():
        inner = ast.Module(
            [part for part in ast.walk(node) if isinstance(part, ast.FunctionDef) and part is not node], []
        )
        if inner.body:
            yield from _recursive_in(inner)


def _references(function: ast.FunctionDef, *, is_class: bool) -> set[str]:
    """Names that a function uses and does not bind; in a class, attributes of `self` and `cls`."""
    nodes = list(ast.walk(function))
    if is_class:
        attributes = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
        return {node.attr for node in attributes if node.value.id in ("self", "cls")}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return {node.id for node in names if isinstance(node.ctx, ast.Load)} - bound
