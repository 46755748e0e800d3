"""Plotly's script without the kinds of traces that a page does not draw."""

import base64
import gzip
import re

import pytest
from plotly.offline import get_plotlyjs

from tests.support.cli_runner import ROOT
from tracekit.ingest import loader
from tracekit.report import html, plotly_script
from tracekit.rules import engine

HELPERS = "var m=(e,t)=>()=>(t||e((t={exports:{}}).exports,t),t.exports),x=(e,t)=>{for(var r in t)d(e,r,{get:t[r]})};"
BAR = (
    'var bar=m((e,t)=>{t.exports={moduleType:"trace",name:"bar",draw:helps}});',
    "var index=m((e,t)=>{t.exports=bar()});",
    "function helps(){return'}'}",
    "var radius,turn,init=m(()=>{radius=1});",
    "var first=m(()=>{}),second=2;",
    "var core=m((e,t)=>{t.exports={register:init}});",
)
GLOBE = (
    'var globe=m((e,t)=>{t.exports={moduleType:"trace",name:"globe",draw:sphere()}});',
    "var sphere=m((e,t)=>{t.exports=/[/}'\"]+\\/}/g.test(`}${map({a:`)`})}\\``)/2});",
    "function map(e){return e}",
    "x(shapes,{cube:()=>sphere});",
)
MAIN = "var main=m((e,t)=>{var p=core();p.register([index(),globe()]);t.exports=p});return main();"


def bundle(*statements):
    return "/* head */var Plotly=(()=>{" + HELPERS + "".join(statements) + MAIN + "})();/* licences */"


def test_definitions_that_only_other_kinds_need_are_left_out():
    without_globe = bundle(*BAR).replace(",globe()", "")
    assert plotly_script.script_of_kinds(bundle(*BAR, *GLOBE), frozenset({"bar"})) == without_globe


def test_a_kind_keeps_what_it_needs_in_turn():
    both = plotly_script.script_of_kinds(bundle(*GLOBE, *BAR), frozenset({"bar", "globe"}))
    assert both == bundle(*GLOBE[:-1], *BAR)


def test_without_any_kind_none_is_registered():
    assert "register([])" in plotly_script.script_of_kinds(bundle(*BAR, *GLOBE), frozenset())


@pytest.mark.parametrize(
    "script",
    [
        "",
        "var Plotly=(()=>{",
        bundle(*BAR, *GLOBE)[: -len("})();/* licences */")],
        bundle(*BAR, *GLOBE, "function map(){}"),
        bundle(*BAR, *GLOBE).replace("return main()", "return other()"),
        bundle(*BAR, *GLOBE).replace(".register([", ".add(["),
        bundle(*BAR, *GLOBE).replace(HELPERS, ""),
        bundle(*BAR, *GLOBE).replace("return main();", "`return"),
    ],
    ids=["empty", "cut", "open", "two-definitions", "entry", "registration", "helpers", "template"],
)
def test_a_script_with_another_layout_is_not_reduced(script):
    with pytest.raises(plotly_script.LayoutError):
        plotly_script.script_of_kinds(script, frozenset({"bar"}))


def test_a_kind_that_the_script_does_not_have_keeps_the_whole_script():
    assert plotly_script.script(frozenset({"bar", "no such kind"})) == get_plotlyjs()


def test_the_installed_script_is_reduced_to_a_third():
    whole = get_plotlyjs()
    reduced = plotly_script.script(frozenset({"bar", "scatter", "heatmap", "icicle"}))
    assert len(reduced) < len(whole) / 3
    assert not re.search('moduleType:"trace",name:"(?!bar|scatter|heatmap|icicle)', reduced)
    assert reduced.rstrip().endswith("return Plotly;\n}));")


def test_a_report_has_the_script_for_its_figures():
    run = loader.load(str(ROOT / "sample_traces" / "faults" / "slow-rank"))
    page = html.render(engine.check(run), run)
    packed = re.search(r'id="plotly">([A-Za-z0-9+/=]+)<', page)[1]
    script = gzip.decompress(base64.b64decode(packed)).decode()
    assert {'name:"bar"', 'name:"heatmap"'} <= set(re.findall(r'name:"(?:bar|heatmap|mesh3d)"', script))
    assert 'name:"mesh3d"' not in script
    assert len(page) < 1_500_000
