"""Who may import whom, and what an import may do.

ensemble -> transforms.{modules,privacy,program} -> the root files of transforms -> transforms._jaxpr
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import plurax

ROOT = Path(__file__).parents[1]
HEAVY = {"flax", "scipy", "matplotlib", "orbax", "tensorstore"}
# It defines an NNX module, and is imported where one is made.
LATE = "transforms.program._stack"


def layer(module: str) -> int:
    package, child = [*module.split("."), ""][:2]
    if package == "ensemble":
        return 3
    if child in {"modules", "privacy", "program"}:
        return 2
    return 0 if child in {"_jaxpr", "_compat"} else 1


def imports(module: str, node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield (dotted name, whether it was written relative) for all that one statement imports."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, False) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = module.split(".")[: -node.level] if node.level else []
        for alias in node.names:
            yield ".".join([*base, *filter(None, [node.module]), alias.name]), node.level > 0


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs when a module is imported: no function bodies, nothing under TYPE_CHECKING."""
    yield node
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        children = []
    elif isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        children = list(node.orelse)
    for child in children:
        yield from at_import(child)


def violations(module: str, source: str) -> list[str]:
    """Return what `source` does that `module`, such as `transforms.privacy._clip`, must not."""
    found = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax._src":
            found.append("uses jax._src")
        for name, relative in imports(module, node):
            top = name.split(".")[0]
            if f"{name}.".startswith("jax._src."):
                found.append("imports jax._src")
            if top in {"pickle", "cloudpickle", "dill"}:
                found.append(f"imports {top}")
            if top in {"plurax", "transforms", "ensemble"} and not relative:
                found.append(f"imports {name} by its absolute name")
            if top in {"transforms", "ensemble"} and layer(name) > layer(module):
                if module == "transforms.__init__" and name.startswith("transforms.privacy."):
                    continue  # the one exception: it re-exports names of .privacy
                found.append(f"imports {name}, which is a layer above")
    if module.startswith("transforms."):
        names = [name for node in at_import(tree) for name, _ in imports(module, node)]
        heavy = HEAVY - {"flax"} if module.startswith(("transforms.modules.", LATE)) else HEAVY
        found += [f"imports {name} at module level" for name in names if name.split(".")[0] in heavy]
    return found


def test_every_file_keeps_the_layers() -> None:
    files = [path for folder in ("transforms", "ensemble") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 3
    modules = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    found = {module: violations(module, path.read_text()) for path, module in modules.items()}
    assert {module: broken for module, broken in found.items() if broken} == {}


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("transforms._vmap", "from ..ensemble import Ensemble", "ensemble.Ensemble, which is a layer above"),
        ("transforms._vmap", "from .. import ensemble", "ensemble, which is a layer above"),
        ("transforms._vmap", "def f():\n    from .privacy import x", "transforms.privacy.x, which is a layer above"),
        ("transforms._vmap", "from . import modules", "transforms.modules, which is a layer above"),
        ("transforms.__init__", "from .program import profile", "program.profile, which is a layer above"),
        ("transforms.privacy._clip", "from ...ensemble import x", "ensemble.x, which is a layer above"),
        ("transforms._jaxpr._rules", "from .._vmap import vmap", "transforms._vmap.vmap, which is a layer above"),
        ("ensemble._trainer", "import transforms", "transforms by its absolute name"),
        ("ensemble._trainer", "from plurax.transforms import vmap", "plurax.transforms.vmap by its absolute name"),
        ("transforms._vmap", "import ensemble._stack as s", "ensemble._stack by its absolute name"),
        ("ensemble._trainer", "import jax._src.core", "imports jax._src"),
        ("ensemble._trainer", "from jax import _src", "imports jax._src"),
        ("ensemble._trainer", "from jax._src import core", "imports jax._src"),
        ("ensemble._trainer", "import jax\nx = jax._src.core.Jaxpr", "uses jax._src"),
        ("ensemble._trainer", "import pickle", "imports pickle"),
        ("ensemble._trainer", "def f():\n    from pickle import loads", "imports pickle"),
        ("transforms._grad", "from flax import nnx", "flax.nnx at module level"),
        ("transforms._grad", "import matplotlib.pyplot as plt", "matplotlib.pyplot at module level"),
        ("transforms.modules._files", "try:\n    import orbax\nexcept ImportError: ...", "orbax at module level"),
        ("transforms.privacy._clip", "from flax import nnx", "flax.nnx at module level"),
        ("transforms._grad", "class A:\n    import scipy", "scipy at module level"),
        ("transforms._grad", "if TYPE_CHECKING:\n    x = 1\nelse:\n    import flax", "flax at module level"),
    ],
)
def test_each_rule_can_fail(module: str, source: str, message: str) -> None:
    assert message in "; ".join(violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("transforms.__init__", "from ._vmap import vmap\nfrom .privacy import clipped_grad"),
        ("transforms._grad", "def f():\n    from flax import nnx"),
        ("transforms._grad", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flax import nnx"),
        ("transforms._grad", "import jax\nfrom . import _chunk\nfrom ._jaxpr import interpret"),
        ("transforms._jaxpr._rules", "from .._compat import Jaxpr\nfrom . import _walk"),
        ("transforms.privacy._clip", "from .. import vmap\nfrom .._chunk import f\nfrom ..program import profile"),
        ("transforms.modules._freeze", "from flax import nnx\nfrom .._model import is_module"),
        (LATE, "from flax import nnx"),
        ("ensemble._trainer", "import orbax.checkpoint\nfrom ..transforms import vmap\nfrom ._stack import stack"),
        ("ensemble._trainer", "from ..transforms.privacy import clipped_grad"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert violations(module, source) == []


PROBE = """
import json, sys
import jax, jax.numpy
modules, config = set(sys.modules), dict(jax.config.values)
{statement}
print(json.dumps({{
    "loads": sorted({{name.partition(".")[0] for name in set(sys.modules) - modules}}),
    "settings": [name for name, value in jax.config.values.items() if config[name] != value],
}}))
"""


def effects(statement: str) -> dict[str, Any]:
    """Run `statement` where the only platform cannot start, so that touching a device is an error."""
    run = subprocess.run(
        [sys.executable, "-c", PROBE.format(statement=statement)],
        env=os.environ | {"JAX_PLATFORMS": "no_such_platform"},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(run.stderr)
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", ["plurax.transforms", "plurax.transforms.privacy", "plurax.transforms.program"])
def test_importing_transforms_has_no_effects_and_loads_no_other_library(name: str) -> None:
    after = effects(f"import {name}")
    assert set(after["loads"]) - sys.stdlib_module_names == {"jax", "plurax"}
    assert after["settings"] == []


def test_effects_are_seen() -> None:
    after = effects("import scipy; jax.config.update('jax_debug_nans', True)")
    assert "scipy" in after["loads"]
    assert after["settings"] == ["jax_debug_nans"]
    with pytest.raises(RuntimeError, match="no_such_platform"):
        effects("jax.numpy.zeros(3)")


def test_plurax_is_a_namespace_without_an_init() -> None:
    assert getattr(plurax, "__file__", None) is None
