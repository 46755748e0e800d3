import polars as pl
import pytest

from tracekit.model import escaping
from tracekit.report import summary_tables
from tracekit.report.render import text as render_text

ROWS = pl.DataFrame(
    {
        "name": [f"void at::native::kernel_{i}<float, {'long, ' * 20}{i}>(Parameters)" for i in range(30)],
        "kind": ["compute"] * 30,
        "count": range(30),
        "total_ns": [10**9 - i for i in range(30)],
        "mean_ns": [10**6] * 30,
        "p50_ns": [10**5] * 30,
        "p95_ns": [10**6] * 30,
        "max_ns": [10**7] * 30,
        "spread_ratio": [0.5] * 30,
        "most_rank": [1016001] * 30,
        "time_ratio": [0.02] * 30,
    }
)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_table_fits_and_cuts_no_number(width):
    lines = render_text.render(summary_tables.totals(ROWS, 3), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert all(line.startswith("kernel_") and line.endswith("2.0%") for line in lines[-4:-1])
    assert lines[-1] == "and 27 more, 54.0% together: --top 30"
    if width == 160:
        assert "1016001" in lines[-2]


def test_names_that_begin_alike_are_cut_so_that_they_still_differ():
    names = [f"triton_red_fused__log_softmax_div_mul_{i}" for i in (1, 2)] + ["nccl" + "AllGather" * 9]
    text = render_text.render(summary_tables.totals(ROWS.head(3).with_columns(name=pl.Series(names)), 3), width=80)
    shown = [line.split()[0] for line in text.splitlines()[-3:]]
    assert [name[-6:] for name in shown[:2]] == ["_mul_1", "_mul_2"]
    assert shown[2].startswith("ncclAllGatherAllGat")
    assert shown[2].endswith("…")


def test_a_column_without_any_value_is_left_out():
    assert "rank" not in render_text.render(
        summary_tables.totals(ROWS.with_columns(spread_ratio=None, most_rank=None), 3), width=200
    )


def test_no_rows_is_said():
    assert render_text.render(summary_tables.totals(ROWS.clear(), 3), width=80) == "The traces contain no kernels.\n"


def test_names_are_inert():
    text = render_text.render(
        summary_tables.totals(ROWS.head(1).with_columns(name=pl.lit("\x1b[31m[red]")), 3), width=80
    )
    assert "\x1b" not in text
    assert escaping.inert("\x1b[31m[red]") in text
