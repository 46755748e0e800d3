import subprocess
import sys


def test_help_loads_nothing_heavy():
    script = (
        "import sys; sys.argv = ['tracekit', '--help']\n"
        "from tracekit.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'plotly', 'streamlit', 'polars', 'duckdb'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "check" in done.stdout
    assert done.stderr.strip() == "[]"
