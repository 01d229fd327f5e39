"""The README's code runs, and says what it says."""

import re
from pathlib import Path
from typing import Any

import pytest

from plurax.ensemble import Ensemble

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

# One worker trains what several tests look at.
pytestmark = pytest.mark.xdist_group("the README")


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    found: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        exec(block.replace("* 500", "* 150"), found)
    return found


def test_the_first_example_learns_a_sine(namespace):
    assert namespace["prediction"].mean.shape == (64, 1)
    error = abs(namespace["prediction"].mean[:, 0] - namespace["jnp"].sin(3 * namespace["x"][:, 0])).mean()
    assert error < 0.2
    assert type(namespace["alone"]) is namespace["nnx"].Sequential


def test_the_second_example_trains_every_member(namespace):
    assert isinstance(namespace["ensemble"], Ensemble)
    assert namespace["losses"].shape == (3,)


def test_the_first_example_is_ten_lines():
    first = README.split("```python\n")[1].split("```")[0]
    assert len([line for line in first.splitlines() if line]) <= 10


def test_every_command_is_a_target_of_make():
    targets = re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    known = {name for line in targets for name in line.split()}
    assert {"demo", "test", "bench", "bench-smoke"} <= known
    assert set(re.findall(r"make ([a-z-]+)", README)) <= known


def test_every_name_of_the_tables_exists(namespace):
    import plurax.ensemble
    import plurax.transforms.modules
    import plurax.transforms.privacy
    import plurax.transforms.program

    transforms = (plurax.transforms, *(getattr(plurax.transforms, x) for x in ("modules", "privacy", "program")))
    modules = (plurax.ensemble, *transforms)
    public = {name for module in modules for name in module.__all__}
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/names.md").read_text(), flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([A-Za-z_]+)", row)} - {"ens", "plurax"}
    assert named <= public
    results = {"Candidate", "Capture", "CompileCache", "Difference", "FoldReport", "Operation", "Profile", "TraceDiff"}
    assert public - named <= {"Prediction", "Selection", "MemberStatus", "TrainState", *results}
