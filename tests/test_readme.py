"""The README's code runs and prints the output shown."""

import ast
import contextlib
import importlib
import io
import re
import tomllib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from plurax.ensemble import Ensemble

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MODULES = re.findall(r"^(plurax\.[\w.]+)$", (ROOT / "tests/api.txt").read_text(), flags=re.MULTILINE)
FIRST = README.split("```python\n")[1].split("```")[0].splitlines()

# One worker trains the models that several tests share.
pytestmark = pytest.mark.xdist_group("the README")


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    found: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(blocks[0], found)
    for block in blocks[1:]:
        exec(block, found)
    return found | {"shown": shown.getvalue()}


def test_the_first_example_prints_the_output_shown(namespace):
    printed = [ast.literal_eval(line.removeprefix("# ").replace("...", "")) for line in FIRST if line[:3] == "# {"]
    rows = [ast.literal_eval(line) for line in namespace["shown"].splitlines()]
    assert [{**row, "loss": None} for row in rows] == [{**row, "loss": None} for row in printed]
    # The page has three or four digits. No gradient is zero by symmetry, which Adam would turn into steps of noise.
    np.testing.assert_allclose([row["loss"] for row in rows], [row["loss"] for row in printed], rtol=5e-3)


def test_the_first_example_learns_a_sine(namespace):
    prediction = namespace["state"].ensemble.predict(namespace["x"], kind="regression")
    assert prediction.mean.shape == prediction.variance.shape == (64, 1)
    assert abs(prediction.mean - jnp.sin(3 * namespace["x"])).mean() < 0.2
    assert type(namespace["state"].ensemble[1]).__name__ == "Sequential"


def test_the_second_example_trains_every_member(namespace):
    assert isinstance(namespace["ensemble"], Ensemble)
    assert namespace["losses"].shape == (3,)


def test_the_first_example_is_eight_lines_that_fit():
    code = [line for line in FIRST if line and line[0] != "#" and not re.match("import|from", line)]
    assert len(code) == 8
    assert max(map(len, FIRST)) <= 80


def test_the_badges_are_true():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    jax = next(x for x in project["project"]["dependencies"] if re.match(r"jax\W", x))
    assert "build/types/plurax" in project["tool"]["mypy"]["files"]
    expected = {
        "python": project["project"]["requires-python"].replace(">=", "≥ "),
        "jax": jax.removeprefix("jax").replace(">=", "≥ "),
        "license": project["project"]["license"],
        "typed": "mypy",
    }
    for name, said in expected.items():
        assert f">{said}</text>" in (ROOT / f"docs/badges/{name}.svg").read_text()
        assert f"](docs/badges/{name}.svg)" in README


def test_every_command_is_a_target_of_make():
    targets = re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    known = {name for line in targets for name in line.split()}
    assert {"demo", "test", "bench", "bench-smoke"} <= known
    assert set(re.findall(r"make ([a-z-]+)", README)) <= known
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    commands = [re.sub(r'\w+=("[^"]*"|\S+)', "", line) for line in re.findall(r"run: make (.*)", workflow)]
    assert {word for command in commands for word in command.split()} <= known


def names_listed(page: str) -> dict[str, set[str]]:
    """Return the names in the first column of each module's table, on a page like docs/names.md."""
    _, *sections = re.split(r"^## `([\w.]+)`$", page, flags=re.MULTILINE)
    found = {}
    for module, text in zip(sections[::2], sections[1::2], strict=True):
        cells = re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE)
        found[module] = {name for cell in cells for name in re.findall(r"`([A-Za-z_]+)", cell)} - {"ens"}
    return found


def test_the_page_of_names_lists_exactly_the_public_names():
    listed = names_listed((ROOT / "docs/names.md").read_text())
    assert listed == {module: set(importlib.import_module(module).__all__) for module in MODULES}


def test_the_chart_of_functions_shows_public_names():
    chart = (ROOT / "docs/which_function.svg").read_text()
    shown = " ".join(re.findall(r'font-family="DejaVu Sans Mono[^>]*>([^<]*)', chart))
    words = set(re.findall(r"[A-Za-z_]\w+", re.sub(r'\.\w+|"\w+"', "", shown))) - {
        "ens",
        "of",
        "the",
        "step",
        "sparsity",
    }
    assert len(words) > 30
    assert words <= {name for module in MODULES for name in importlib.import_module(module).__all__}


def test_a_name_is_found_under_its_module():
    page = "## `a.b`\n\n| name | does |\n| --- | --- |\n| `f(x)`, `G` | `h` |\n\n## `a.c`\n\n| `ens[i]`, `k` | |\n"
    assert names_listed(page) == {"a.b": {"f", "G"}, "a.c": {"k"}}
