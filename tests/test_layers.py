"""Import order between modules, and side effects of imports."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import plurax

ROOT = Path(__file__).parents[1]
# Contents of each folder, lowest layer first: a layer may import those above it in the list; parts of one layer are
# independent.
LAYERS = {
    "": ["transforms", "ensemble"],
    "transforms": [
        "_core",
        "_models",
        "_calls",
        "_files",
        "_convolutions _runs _vmap _grad _dual _taylor",
        "_linear _jacobian",
        "_curvature",
        "modules privacy program",
        "_statistics",
        "curvature",
        "__init__",
    ],
    "transforms.privacy": ["_check_loss", "_per_example", "_clipped_fun _dpsgd", "__init__"],
    "transforms.program": [
        "_ir _compile_cache _stack",
        "_accumulate _aot _bucketed _convolutions _depend _donation _fold _layers _layout _profile _topk",
        "_compile_for",
        "__init__",
    ],
    "ensemble": [
        "_scoring",
        "_members",
        "_step",
        "_execution",
        "_training",
        "_sharing",
        "averages calibration distillation metrics plots",
        "_fleet",
        "fleet sklearn",
        "__init__",
    ],
}
HEAVY = {"flax", "scipy", "matplotlib", "orbax", "tensorstore"}
# It defines an NNX module, and is imported lazily.
LATE = "transforms.program._stack"
# Inside a method, it returns samples as an ensemble.
UPWARD = ("transforms.curvature._laplace.laplace", "ensemble.Ensemble")


def line_of(folder: str, child: str) -> int:
    """Return the line of `LAYERS[folder]` that lists `child`; a folder itself is its `__init__`."""
    found = [i for i, line in enumerate(LAYERS[folder]) if (child or "__init__") in line.split()]
    assert len(found) == 1, f"{child} is in {len(found)} lines of {folder or 'the root'}"
    return found[0]


def is_above(name: str, module: str) -> bool:
    """Whether `name` is in another part of the deepest common folder, and that part is not in a lower layer."""
    theirs, ours = [*name.split("."), ""], [*module.split("."), ""]
    common = next(i for i, (one, other) in enumerate(zip(theirs, ours, strict=False)) if one != other or not one)
    folder, child, own = ".".join(ours[:common]), theirs[common], ours[common]
    if folder not in LAYERS or not own or child == own:
        return False
    if folder and all(child not in line.split() for line in LAYERS[folder]):
        child = ""  # defined in the folder's own `__init__`
    return line_of(folder, child) >= line_of(folder, own)


def imports(module: str, node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield (dotted name, whether the import is relative) for everything one statement imports."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, False) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = module.split(".")[: -node.level] if node.level else []
        for alias in node.names:
            yield ".".join([*base, *filter(None, [node.module]), alias.name]), node.level > 0


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Walk the code that runs at import: no function bodies, nothing under TYPE_CHECKING."""
    yield node
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        children = []
    elif isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        children = list(node.orelse)
    for child in children:
        yield from at_import(child)


# What a version of JAX may change.
OF_ONE_FILE = re.compile(r"jax\.(core|extend|experimental|interpreters)\b")


def violations(module: str, source: str) -> list[str]:
    """Return the import rules that `source`, the code of `module` (as `transforms.privacy._clip`), breaks."""
    found = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax._src":
            found.append("uses jax._src")
        if isinstance(node, ast.Attribute) and OF_ONE_FILE.fullmatch(ast.unparse(node)):
            found.append(f"uses {ast.unparse(node)}")
        for name, relative in imports(module, node):
            top = name.split(".")[0]
            if f"{name}.".startswith("jax._src."):
                found.append("imports jax._src")
            if OF_ONE_FILE.match(name) and module != "transforms._core.compat":
                found.append(f"imports {name}, which is for _core/compat.py")
            if top in {"pickle", "cloudpickle", "dill"}:
                found.append(f"imports {top}")
            if top in {"plurax", "transforms", "ensemble"} and not relative:
                found.append(f"imports {name} by its absolute name")
            if top in {"transforms", "ensemble"} and is_above(name, module) and (module, name) != UPWARD:
                found.append(f"imports {name}, which is not in a lower layer")
    if module.startswith("transforms."):
        names = [name for node in at_import(tree) for name, _ in imports(module, node)]
        heavy = HEAVY - {"flax"} if module.startswith(("transforms.modules.", LATE)) else HEAVY
        found += [f"imports {name} at module level" for name in names if name.split(".")[0] in heavy]
    return found


def modules_of(root: Path) -> dict[str, Path]:
    paths = [path for folder in ("transforms", "ensemble") for path in (root / folder).rglob("*.py")]
    return {".".join(path.relative_to(root).with_suffix("").parts): path for path in paths}


def test_every_file_keeps_the_layers() -> None:
    modules = modules_of(ROOT)
    assert len(modules) > 100
    found = {module: violations(module, path.read_text()) for module, path in modules.items()}
    assert {module: broken for module, broken in found.items() if broken} == {}


def circles(sources: Mapping[str, str]) -> list[set[str]]:
    """Return the sets of parts (files, folders) of a folder that import each other in a cycle."""
    needs: dict[str, set[str]] = {}
    for module, source in sources.items():
        own = module.split(".")
        for node in ast.walk(ast.parse(source)):  # including late and type-only imports
            for name, relative in imports(module, node):
                theirs = name.split(".")
                common = next((i for i, pair in enumerate(zip(own, theirs, strict=False)) if len({*pair}) > 1), 0)
                if relative and common:
                    needs.setdefault(".".join(own[: common + 1]), set()).add(".".join(theirs[: common + 1]))
    reached = {part: set(direct) for part, direct in needs.items()}
    for middle in needs:
        for direct in reached.values():
            if middle in direct:
                direct |= reached[middle]
    together = {part: frozenset(x for x in direct if part in reached.get(x, ())) for part, direct in reached.items()}
    return [set(parts) for parts in sorted({parts for parts in together.values() if len(parts) > 1}, key=sorted)]


def test_no_two_files_or_folders_need_each_other() -> None:
    assert circles({module: path.read_text() for module, path in modules_of(ROOT).items()}) == []


def test_import_cycles_are_detected() -> None:
    sources = {
        "transforms._a.x": "from .y import f",
        "transforms._a.y": "from .z import g\nfrom .._b import h",
        "transforms._a.z": "from ..._b.x import h\nfrom . import x",
        "transforms._b.x": "from .._a.y import f",
        "transforms._c": "from ._a.x import f",
    }
    together = [{"transforms._a", "transforms._b"}, {"transforms._a.x", "transforms._a.y", "transforms._a.z"}]
    assert circles(sources | {"transforms._a.z": "from .._b.x import h\nfrom . import x"}) == together
    assert circles(sources | {"transforms._a.z": "", "transforms._b.x": "import jax"}) == []
    late = {"transforms._a.z": "", "transforms._b.x": "def f():\n    from .._a import y"}
    assert circles(sources | late) == [{"transforms._a", "transforms._b"}]


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("transforms._vmap", "from ..ensemble import Ensemble", "ensemble.Ensemble, which is not in a lower layer"),
        ("transforms._vmap", "from .. import ensemble", "ensemble, which is not in a lower layer"),
        (
            "transforms._vmap",
            "def f():\n    from .privacy import x",
            "transforms.privacy.x, which is not in a lower layer",
        ),
        ("transforms._vmap", "from . import modules", "transforms.modules, which is not in a lower layer"),
        ("transforms._vmap", "from ._grad import grad", "transforms._grad.grad, which is not in a lower layer"),
        ("transforms._vmap", "from . import vmap", "transforms.vmap, which is not in a lower layer"),
        ("transforms.privacy._dpsgd.fit", "from ....ensemble import x", "ensemble.x, which is not in a lower layer"),
        ("transforms.privacy._dpsgd.fit", "from ...program import f", "program.f, which is not in a lower layer"),
        ("transforms.privacy._per_example.f", "from .._dpsgd import fit", "_dpsgd.fit, which is not in a lower layer"),
        ("transforms._core.jaxpr", "from .._vmap import vmap", "transforms._vmap.vmap, which is not in a lower layer"),
        ("ensemble._members.rows", "from .._step.state import x", "_step.state.x, which is not in a lower layer"),
        ("ensemble._training.trainer", "import transforms", "transforms by its absolute name"),
        (
            "ensemble._training.trainer",
            "from plurax.transforms import vmap",
            "plurax.transforms.vmap by its absolute name",
        ),
        ("transforms._vmap", "import ensemble._stack as s", "ensemble._stack by its absolute name"),
        ("ensemble._training.trainer", "import jax._src.core", "imports jax._src"),
        ("ensemble._training.trainer", "from jax import _src", "imports jax._src"),
        ("ensemble._training.trainer", "from jax._src import core", "imports jax._src"),
        ("ensemble._training.trainer", "import jax\nx = jax._src.core.Jaxpr", "uses jax._src"),
        ("transforms._grad", "from jax.extend.core import Jaxpr", "jax.extend.core.Jaxpr, which is for _core/compat"),
        ("transforms._core.jaxpr", "from jax import core", "jax.core, which is for _core/compat.py"),
        ("transforms._grad", "def f():\n    import jax.experimental.jet as j", "jet, which is for _core/compat.py"),
        ("transforms._grad", "import jax\nx = jax.core.Tracer", "uses jax.core"),
        ("ensemble._training.trainer", "import pickle", "imports pickle"),
        ("ensemble._training.trainer", "def f():\n    from pickle import loads", "imports pickle"),
        ("transforms._grad", "from flax import nnx", "flax.nnx at module level"),
        ("transforms._grad", "import matplotlib.pyplot as plt", "matplotlib.pyplot at module level"),
        ("transforms.modules._files", "try:\n    import orbax\nexcept ImportError: ...", "orbax at module level"),
        ("transforms.privacy._dpsgd.fit", "from flax import nnx", "flax.nnx at module level"),
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
        ("transforms._grad", "import jax\nfrom ._calls import chunk\nfrom ._core.jaxpr import interpret"),
        ("transforms._core.compat", "from jax.extend.core import Jaxpr\nx = 'jax.core'"),
        ("transforms._core.jaxpr", "from .compat import Jaxpr\nfrom . import axes"),
        ("transforms.privacy._dpsgd.fit", "from .._per_example.clipped import f\nfrom . import step"),
        ("transforms.modules._parameters", "from flax import nnx\nfrom .._models.split_model import is_module"),
        (LATE, "from flax import nnx"),
        (
            "ensemble._training.trainer",
            "import orbax.checkpoint\nfrom ...transforms import vmap\nfrom .fit import stack",
        ),
        ("ensemble._training.trainer", "from ...transforms.privacy import clipped_grad"),
    ],
)
def test_allowed_code_passes(module: str, source: str) -> None:
    assert violations(module, source) == []


PROBE = """
import json, sys
import jax, jax.numpy
modules, config = set(sys.modules), dict(jax.config.values)
{statement}
print(json.dumps({{
    "loads": sorted({{name.partition(".")[0] for name in set(sys.modules) - modules}}),
    "settings": [name for name, value in jax.config.values.items() if config.get(name, value) != value],
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


def test_effects_are_detected() -> None:
    after = effects("import scipy; jax.config.update('jax_debug_nans', True)")
    assert "scipy" in after["loads"]
    assert after["settings"] == ["jax_debug_nans"]
    with pytest.raises(RuntimeError, match="no_such_platform"):
        effects("jax.numpy.zeros(3)")


def test_plurax_is_a_namespace_without_an_init() -> None:
    assert getattr(plurax, "__file__", None) is None
