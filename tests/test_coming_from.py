"""The pages for users of other libraries: our code gives the values that the other library gave."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("torch", "mindspore")


def script() -> Any:
    """Import the script that runs the other libraries' code."""
    spec = importlib.util.spec_from_file_location("coming_from", ROOT / "benchmarks/_coming_from.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SIDE = script()


def differ(ours: list[Any], theirs: list[Any]) -> str:
    """Describe how the leaves differ from theirs; empty if they do not."""
    if len(ours) != len(theirs):
        return f"{len(ours)} leaves, theirs {len(theirs)}"
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(a, str) or isinstance(b, str):
            if a != b:
                return f"leaf {i}: {a!r}, theirs {b!r}"
            continue
        a, b = np.asarray(a, float), np.asarray(b, float)
        if a.shape != b.shape:
            return f"leaf {i}: shape {a.shape}, theirs {b.shape}"
        if not np.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True):
            return f"leaf {i}: {a.tolist()}, theirs {b.tolist()}"
    return ""


def faults(page: str, kept: dict[str, Any]) -> list[str]:
    """Return the faults of a page: rows without our code, values that differ from theirs, values without a row."""
    namespace: dict[str, Any] = {}
    found, values = [], dict(kept["values"])
    if SIDE.digest(page) != kept["program"]:
        found.append("their code has changed since it was run: python benchmarks/_coming_from.py")
    for piece in SIDE.pieces(page):
        if isinstance(piece, SIDE.Block):
            if not piece.theirs:
                exec(piece.code, namespace)
            continue
        if piece.ours is None:
            found.append(f"no code on the right: {piece.line}")
            continue
        try:
            value = eval(piece.ours, namespace)
        except Exception as error:  # report the other rows too
            found.append(f"{piece.ours} raises {type(error).__name__}: {error}")
            value = None
        if piece.theirs is None:
            continue
        if piece.theirs not in kept["values"]:
            found.append(f"no stored value: {piece.theirs}")
            continue
        values.pop(piece.theirs, None)
        if wrong := differ(jax.tree.leaves(value), kept["values"][piece.theirs]):
            found.append(f"{piece.theirs} is not {piece.ours}: {wrong}")
    return found + [f"a value of no row: {code}" for code in values]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_every_row_gives_what_the_other_library_gave(name: str) -> None:
    page = (ROOT / f"docs/coming-from-{name}.md").read_text()
    kept = json.loads((ROOT / f"tests/coming_from_{name}.json").read_text())
    assert f"{SIDE.TITLES[name]} {kept['version']}" in page
    assert faults(page, kept) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_other_library_gives_the_stored_values(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not a test dependency")
    kept = json.loads((ROOT / f"tests/coming_from_{name}.json").read_text())
    command = [sys.executable, str(ROOT / "benchmarks/_coming_from.py"), name, "--out", str(tmp_path / "new.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    new = json.loads((tmp_path / "new.json").read_text())
    assert new["values"].keys() == kept["values"].keys()
    for code, value in new["values"].items():
        assert differ(value, kept["values"][code]) == "", code


PAGE = """# A page

```python title="PyTorch"
x = [1.0, 2.0]
```

```python
import jax.numpy as jnp
x = jnp.array([1.0, 2.0])
```

| torch.func | Plurax | what differs |
| --- | --- | --- |
| `sum(x)` | `x.sum()` | a \\| b |
| `{"b": x, "a": (1, "word")}` | `[1, "word", *x]` | the structure |
| words, such as `x` | `x + 1` | not run there |
"""
KEPT: dict[str, Any] = {
    "version": "1.0",
    "values": {"sum(x)": [3.0], '{"b": x, "a": (1, "word")}': [1, "word", 1.0, 2.0]},
}


def of(page: str, **values: Any) -> list[str]:
    return faults(page, {**KEPT, "program": SIDE.digest(page), "values": {**KEPT["values"], **values}})


def test_a_page_is_parsed() -> None:
    found: dict[str, Any] = {}
    exec(SIDE.program(PAGE), found)
    assert {code: SIDE.leaves(value) for code, value in found["values"].items()} == KEPT["values"]
    assert of(PAGE) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("`x.sum()`", "`x.sum() + 1e-4`", "sum(x) is not x.sum() + 1e-4: leaf 0: 3.0"),
        ("`x + 1`", "`1 / 0`", "1 / 0 raises ZeroDivisionError: division by zero"),
        ("`x.sum()`", "`x`", "sum(x) is not x: leaf 0: shape (2,), theirs ()"),
        ("`x.sum()`", "`(x, x)`", "sum(x) is not (x, x): 2 leaves, theirs 1"),
        ('`[1, "word", *x]`', '`[1, "other", *x]`', "leaf 1: 'other', theirs 'word'"),
        ("`x.sum()`", "the same", "no code on the right: | `sum(x)` | the same | a \\| b |"),
        ("`x + 1`", "`x` or `x + 1`", "no code on the right: | words, such as `x` | `x` or `x + 1` | not run there |"),
        ("| `x + 1` ", "", "no code on the right: | words, such as `x` | not run there |"),
        ("`sum(x)`", "`max(x)`", "no stored value: max(x)"),
        ("| `sum(x)` | `x.sum()` | a \\| b |\n", "", "a value of no row: sum(x)"),
    ],
)
def test_faults_are_detected(old: str, new: str, said: str) -> None:
    assert old in PAGE
    assert said in "\n".join(of(PAGE.replace(old, new)))


def test_their_code_without_stored_values_is_detected() -> None:
    assert "has changed" in faults(PAGE.replace("x = [1.0", "x = [7.0"), {**KEPT, "program": SIDE.digest(PAGE)})[0]
