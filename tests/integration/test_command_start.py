"""The start-up time of `tracekit --help`."""

import resource
import subprocess
import sys

import pytest


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"]], ids=" ".join)
def test_help_loads_nothing_heavy(arguments):
    script = (
        f"import sys; sys.argv = ['tracekit', *{arguments}]\n"
        "from tracekit.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'plotly', 'streamlit', 'polars', 'duckdb', 'numpy', 'rich', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "check" in done.stdout
    assert done.stderr.strip() == "[]"


def test_help_takes_less_than_a_third_of_a_second():
    used_s = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "tracekit", "--help"], stdout=subprocess.DEVNULL, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(used_s) < 0.3  # CPU time: other processes do not affect it
