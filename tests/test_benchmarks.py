"""The page of benchmarks, its plots, and the files that they are rendered from."""

import argparse
import importlib
import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from PIL import Image

HERE = Path(__file__).parents[1] / "benchmarks"


def module(name: str) -> Any:
    """Import a module of the benchmarks, as their scripts do."""
    sys.path.insert(0, str(HERE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(HERE))


render = module("render")


@pytest.fixture
def here(tmp_path):
    """Return a copy of the files and the page."""
    for path in (*HERE.glob("*.json"), *(HERE / name for name in render.PAGES)):
        shutil.copy(path, tmp_path)
    return tmp_path


@pytest.fixture
def measure(monkeypatch, here):
    """Return the measuring module, set to write into the copy."""
    found = module("_measure")
    monkeypatch.setattr(found.render, "HERE", here)
    return found


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**({"smoke": False, "only": ""} | given))


def texts(here: Path) -> dict[str, str]:
    return {name: (here / name).read_text() for name in render.PAGES}


def test_the_pages_match_the_files():
    assert render.pages() == texts(HERE)
    assert set(render.PAGES) == {path.name for path in HERE.glob("*.md")}


def test_a_page_that_differs_is_detected(here):
    page = here / "compile.md"
    page.write_text(page.read_text().replace("## Frozen parameters", "## Thawed parameters"))
    assert render.pages(here) != texts(here)
    assert render.pages(here) == texts(HERE)


@pytest.mark.parametrize("name", render.PICTURES)
def test_a_picture_matches_its_file_and_is_small(name):
    path = HERE / f"{name}.png"
    with Image.open(path) as picture:
        assert picture.info["Source"] == render.digest(name), "render it: python benchmarks/render.py"
    assert path.stat().st_size < 100 * 1024
    assert f"]({name}.png)" in (HERE / f"{render.PICTURES[name][1]}.md").read_text()


@pytest.mark.parametrize("name", render.PICTURES)
def test_a_picture_is_drawn(name, here):
    file = here / f"{render.PICTURES[name][1]}.json"
    file.write_text(file.read_text() + "\n")
    render.draw(name, here)
    with Image.open(here / f"{name}.png") as picture:
        assert picture.info["Source"] == render.digest(name, here) != render.digest(name)


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (7, "7"),
        (44616, "44,616"),
        (4.6512, "4.65"),
        (1382.09, "1,382"),
        (0.03692, "0.0369"),
        (8.7e-8, "9e-08"),
        (0.0, "0"),
        (-2.5, "-2.50"),
        ("map", "map"),
        (None, ""),
        ({"median": 1.5}, "1.50"),
        ({"median": 1.5, "quartiles": [1.25, 20.0], "turns": 5}, "1.50 (1.25 to 20.0)"),
    ],
)
def test_the_text_of_a_cell(cell, said):
    assert render.shown(cell) == said


def test_a_table_has_every_column():
    rows = [{"": "a", "ms": 1.0}, {"": "b", "why": "none"}]
    assert render.table(rows).splitlines() == [
        "|  | ms | why |",
        "| --- | --- | --- |",
        "| a | 1.00 |  |",
        "| b |  | none |",
    ]


def test_what_is_slower_is_counted_and_shown_with_the_largest_gains():
    def claim(ratio: dict[str, Any], what: str) -> dict[str, Any]:
        return {"what": what, "ours": "it", "fastest other": "another", "ours / other": ratio}

    claims = [
        claim({"median": 0.5, "quartiles": [0.4, 0.6]}, "won"),
        claim({"median": 0.7, "quartiles": [0.6, 0.8]}, "won less"),
        claim({"median": 1.2, "quartiles": [1.05, 1.3]}, "about as quick"),
        claim({"median": 3.0}, "lost"),
    ]
    rows = render.claims({"a.gpu": {"tables": {"A table": {"rows": [], "claims": claims}}}})
    assert [line.split(" | ")[:2] for line in render.table(rows).splitlines()[2:]] == [
        ["| a.gpu", "A table; lost"],
        ["| a.gpu", "A table; about as quick"],
        ["| a.gpu", "A table; won less"],
        ["| a.gpu", "A table; won"],
    ]
    assert [row["what"] for row in render.slower(rows)] == ["A table; lost"]
    assert render.topics(rows, {"a": "A", "b": "B"}).splitlines() == [
        "### A",
        "",
        "4 comparisons: 2 faster, 1 about as fast, 1 slower; [all tables, and what limits them](a.md).",
        "",
        "| what | ours | fastest other | ours / other |",
        "| --- | --- | --- | --- |",
        "| A table; won | it | another | 0.500 (0.400 to 0.600) |",
        "| A table; lost | it | another | 3.00 |",
    ]


def test_every_comparison_of_the_files_is_on_the_pages():
    rows = [
        claim for file in render.read(HERE).values() for table in file["tables"].values() for claim in table["claims"]
    ]
    every = (HERE / "comparisons.md").read_text().split("<!-- comparisons -->")[1].split("<!-- /comparisons -->")[0]
    assert every.count("\n| ") == len(rows) + 2
    losses = [claim for claim in rows if (claim["ours / other"].get("quartiles") or [0])[0] > 1.1]
    page = (HERE / "README.md").read_text().split("<!-- topics -->")[1].split("<!-- /topics -->")[0]
    for claim in losses:
        assert f"{claim['ours']} | {claim['fastest other']} | {render.shown(claim['ours / other'])} |" in page


def test_an_accelerator_has_separate_tables(here):
    found = json.loads((here / "sparse.json").read_text())
    found["device"] = {"platform": "gpu", "kind": "H200", "cores": 16}
    found["tables"] = {"The trace of a Hessian": {"rows": [{"": "laplacian", "ms": 0.125}], "claims": []}}
    before = render.pages(here)["sparse.md"]
    (here / "sparse.gpu.json").write_text(json.dumps(found))
    after = render.pages(here)["sparse.md"]
    added = "## The trace of a Hessian, on gpu\n\n|  | ms |\n| --- | --- |\n| laplacian | 0.125 |\n"
    assert added in after
    assert "gpu (H200), 16 cores." in after
    kept = after.partition("<!-- sparse -->")[2].replace(added, "")
    assert kept.startswith(before.partition("<!-- sparse -->")[2].partition("\n<!-- /sparse -->")[0])


def test_a_page_without_markers_is_refused(here):
    (here / "ensemble.md").write_text("# Ensembles\n<!-- ensemble -->\n")
    with pytest.raises(ValueError, match="ensemble.md has no marks for ensemble; add the lines"):
        render.pages(here)


def test_spreads_are_over_rounds(measure):
    times = {
        name: {"turns": turns, "ms": measure.spread(turns)}
        for name, turns in {"a": [1.0, 2.0, 6.0], "b": [1.0, 4.0, 3.0], "c": [9.0, 9.0, 9.0]}.items()
    }
    assert times["a"]["ms"] == {"median": 2.0, "quartiles": [1.5, 4.0], "turns": 3}
    assert measure.ratio(times, "a", "b") == {"median": 1.0, "quartiles": [0.75, 1.5], "turns": 3}
    claim = measure.claim(times, "a", ["c", "b"], "so")
    assert (claim["what"], claim["ours"], claim["fastest other"]) == ("so", "a", "b")
    assert claim["ours / other"] == measure.ratio(times, "a", "b")


def test_candidates_alternate_in_another_order_each_round(measure):
    called = []
    times = measure.interleaved({x: lambda x=x: called.append(x) for x in "abc"}, rounds=20, seconds=0.0)
    first, rounds = "".join(called[:6]), ["".join(called[i : i + 3]) for i in range(6, len(called), 3)]
    assert first == "aabbcc"
    assert [sorted(one) for one in rounds] == [list("abc")] * 20
    assert len(set(rounds)) == 6  # all orders; the seed is fixed
    assert [len(times[x]["turns"]) for x in "abc"] == [20] * 3


@pytest.mark.slow
def test_a_report_is_written_and_rendered(measure, here, monkeypatch):
    monkeypatch.setattr(render, "PICTURES", {})
    report = measure.Report("sparse", options(), "flax", "no-such-library")
    report.measure({"A title": lambda: ([{"": "x", "ms": measure.spread([1.0, 2.0])}], [])})
    found = json.loads((here / "sparse.json").read_text())
    assert found["versions"]["no-such-library"] is None
    assert list(found["versions"]) == ["Python", "jax", "flax", "no-such-library"]
    page = (here / "sparse.md").read_text()
    assert "## A title\n\n|  | ms |\n| --- | --- |\n| x | 1.50 (1.25 to 1.75) |" in page
    assert "without no-such-library" in page

    again = measure.Report("sparse", options(only="another"), "flax", "no-such-library")
    again.measure({"A title": lambda: 1 / 0, "Another": lambda: ([{"": "y"}], [])})
    assert list(json.loads((here / "sparse.json").read_text())["tables"]) == ["A title", "Another"]

    found["versions"]["flax"] = "0.0"
    (here / "sparse.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="sparse.json has other versions or another device; measure all"):
        again.publish()
    with pytest.raises(SystemExit, match="no table has 'nothing' in its title"):
        measure.Report("sparse", options(only="nothing")).measure({"A title": lambda: 1 / 0})


def test_small_runs_are_not_written(measure, here):
    before = (here / "sparse.json").read_text()
    measure.Report("sparse", options(smoke=True)).measure({"A title": lambda: ([{"": "x"}], [])})
    assert (here / "sparse.json").read_text() == before


def test_an_accelerator_writes_a_separate_file(measure, monkeypatch):
    monkeypatch.setattr(measure, "PLATFORM", "gpu")
    report = measure.Report("sparse", options(), "torch")
    assert report.path.name == "sparse.gpu.json"
    assert report.about["device"]["platform"] == "gpu"
    assert report.about["versions"]["torch"] is None
    assert measure.peer("torch") is None


def test_a_peer_is_left_out_only_where_it_is_absent(measure, monkeypatch, tmp_path):
    (tmp_path / "halfpeer.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    assert measure.peer("no_such_library") is None
    assert measure.peer("json") is json
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        measure.peer("halfpeer")


def test_another_process_takes_a_step_on_request(measure, tmp_path):
    script = tmp_path / "script"
    script.write_text("echo hello; echo name of it; read x; echo a warning; echo done; read x; echo not done\n")
    with measure.another_process("sh", str(script)) as (name, step):
        assert name == "of it"
        step()
        with pytest.raises(RuntimeError, match="sh: the process ended before it printed 'done'"):
            step()
    with (
        pytest.raises(RuntimeError, match="sh: the process ended before it printed 'name'"),
        measure.another_process("sh", "-c", "echo other"),
    ):
        pass


def test_available_peers_are_installed(monkeypatch, capsys):
    peers, asked = module("_peers"), []

    def install(*what: str) -> bool:
        asked.append(what)
        return not (what[-1].startswith("opacus") or what == ("--editable", ".[bench]"))

    monkeypatch.setattr(peers, "install", install)
    peers.main()
    assert "so the tables lack their rows: opacus==" in capsys.readouterr().out
    assert asked[1][0] == "--editable"
    assert asked[1][1].startswith(".[examples,")
    assert {re.split("[<=>]", what[0])[0] for what in asked[2:]} == {
        "asdex",
        "jax",
        "torch",
        "opacus",
        "backpack-for-pytorch",
        "curvlinops-for-pytorch",
        "laplace-torch",
        "sparsejac",
        "folx",
    }
    monkeypatch.setattr(peers, "install", lambda *_: False)
    with pytest.raises(SystemExit, match="the extras that the benchmarks need could not be installed"):
        peers.main()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["layers in a list", "list, each layer rematerialised", "scan, rematerialised"])
def test_the_losses_that_are_compiled_for_accelerators(form):
    of = module("accelerators")
    shape = lambda *axes: jax.ShapeDtypeStruct(axes, jnp.float32)
    layers = of.layers(2, 64, form.startswith("scan"))
    p = {"table": shape(11, 64), "positions": shape(7, 64), "norm": (shape(64), shape(64)), "layers": layers}
    tokens = jax.ShapeDtypeStruct((3, 8), jnp.int32)
    for fun in of.gradients(partial(of.language_model, form=form)).values():
        assert jax.tree.map(jnp.shape, jax.eval_shape(fun, p, tokens)) == jax.tree.map(jnp.shape, p)
    stacked = of.layers(2, 64, True)
    for fun in of.gradients(of.stack).values():
        assert jax.tree.map(jnp.shape, jax.eval_shape(fun, stacked, shape(3, 5, 64))) == jax.tree.map(
            jnp.shape, stacked
        )
