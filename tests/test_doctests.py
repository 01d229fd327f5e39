"""Every example in a docstring runs, and every public function and class has one."""

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import plurax.ensemble
import plurax.transforms

PACKAGES = (plurax.transforms, plurax.ensemble)
NAMES = [
    name
    for package in PACKAGES
    for name in [
        package.__name__,
        *(found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")),
    ]
]
PUBLIC = [name for name in NAMES if "._" not in name]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def failures(module: ModuleType) -> int:
    return doctest.testmod(module, optionflags=FLAGS).failed


def examples(module: ModuleType) -> set[str]:
    """Return the full names of the objects in `module` that have an example."""
    return {test.name for test in doctest.DocTestFinder().find(module) if test.examples}


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name: str) -> None:
    assert failures(importlib.import_module(name)) == 0


def test_a_wrong_example_fails() -> None:
    module = ModuleType("made_up", ">>> 1 + 1\n3\n")
    assert examples(module) == {"made_up"}
    assert failures(module) == 1
    module.__doc__ = ">>> 1 + 1\n2\n"
    assert failures(module) == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_examples(name: str) -> None:
    module = importlib.import_module(name)
    documented = set().union(*(examples(importlib.import_module(other)) for other in NAMES))
    values = [getattr(module, public) for public in module.__all__]
    wanted = {f"{v.__module__}.{v.__qualname__}" for v in values if inspect.isroutine(v) or inspect.isclass(v)}
    assert wanted - documented == set()
