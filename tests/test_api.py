"""The public interface matches tests/api.txt, is documented, and is shown in the reference."""

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests/api.txt"
MODULES = (
    "plurax.transforms",
    "plurax.transforms.curvature",
    "plurax.transforms.privacy",
    "plurax.transforms.program",
    "plurax.transforms.modules",
    "plurax.ensemble",
    "plurax.ensemble.metrics",
    "plurax.ensemble.averages",
    "plurax.ensemble.distillation",
    "plurax.ensemble.fleet",
    "plurax.ensemble.sklearn",
    "plurax.ensemble.calibration",
    "plurax.ensemble.plots",
)

SPECIAL = ("__call__", "__getitem__", "__iter__", "__len__")


def default(value: Any) -> str:
    """Format a default as in code."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{default(k)}: {default(v)}" for k, v in value.items()) + "}"
    return getattr(value, "__name__", None) or repr(value)


class Text(str):
    """Text shown verbatim."""

    __slots__ = ()
    __repr__ = str.__str__


def signature(fun: Any) -> str:
    """Format parameter names, kinds and defaults, without types."""
    empty = inspect.Parameter.empty
    given = [parameter for name, parameter in inspect.signature(fun).parameters.items() if name != "self"]
    shown = [
        x.replace(annotation=empty, default=empty if x.default is empty else Text(default(x.default))) for x in given
    ]
    return str(inspect.Signature(shown))


def section(value: Any, title: str) -> list[str]:
    """Return the names that a section of a docstring explains, such as "Args"."""
    text = re.search(rf"^{title}:\n((?:  .*\n?|\n)*)", inspect.getdoc(value) or "", flags=re.MULTILINE)
    lines = re.findall(r"^  (\S[^:\n]*):", text[1], flags=re.MULTILINE) if text else []
    return [name.strip("*` ") for line in lines for name in line.split(",")]


def members(cls: type) -> dict[str, Any]:
    """Return the public methods and properties of a class of the package, including inherited ones."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("plurax."):
            found |= vars(base)
    hidden = {*getattr(cls, "__dataclass_fields__", ()), *getattr(cls, "_fields", ())}
    public = [name for name in sorted(found) if (name[0] != "_" and name not in hidden) or name in SPECIAL]
    return {name: found[name] for name in public}


def lines_of(name: str, value: Any) -> Iterator[str]:
    """Return the lines for one public name of a module."""
    if isinstance(value, ModuleType):
        yield f"module {name}"
    elif not inspect.isclass(value):
        yield f"{name}{signature(value)}"
    else:
        yield f"class {name}{signature(value)}"
        attributes = {x for x in members(value) if not callable(getattr(value, x))} | {*section(value, "Attributes")}
        if attributes:
            yield f"    {' '.join(f'.{attribute}' for attribute in sorted(attributes))}"
        for method in sorted({*members(value)} - attributes):
            of = getattr(value, method)
            yield f"    .{method}{signature(of)}" + (" of the class" if inspect.ismethod(of) else "")


def interface(modules: tuple[str, ...] = MODULES) -> str:
    """Return the public interface as text."""
    text = ""
    for name in modules:
        module = importlib.import_module(name)
        text += f"{name}\n"
        text += "".join(f"    {line}\n" for each in module.__all__ for line in lines_of(each, getattr(module, each)))
        deprecated = getattr(module, "_DEPRECATED", {})
        text += "".join(f"    {old} (deprecated: {new})\n" for old, new in deprecated.items())
        text += "\n"
    return text.rstrip() + "\n"


def difference(listed: str, found: str) -> str:
    """Return the added, removed and changed lines, or an empty string."""
    lines = difflib.unified_diff(listed.splitlines(), found.splitlines(), "tests/api.txt", "the package", "", "", 1, "")
    return "\n".join(lines)


def test_the_interface_is_the_listed_one() -> None:
    found = difference(LIST.read_text(), interface())
    assert not found, (
        "the interface differs from the listed one. If intended, list it (python tests/test_api.py >tests/api.txt) "
        f"and note it in CHANGELOG.md; CONTRIBUTING.md defines breaking changes.\n{found}"
    )


SOURCE = """
def first(x, *, scale=1.0): ...
def second(x): ...
class Third:
    def method(self, a=None): ...
    @property
    def value(self): ...
    def _private(self, b): ...
__all__ = ["Third", "first", "second"]
"""


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        (', "second"', "", ["-    second(x)"]),
        ('["Third"', '["SOURCE", "Third"', ["+    SOURCE"]),
        ("scale=1.0", "scale=2.0", ["-    first(x, *, scale=1.0)", "+    first(x, *, scale=2.0)"]),
        ("(x, *, scale", "(x, scale", ["-    first(x, *, scale=1.0)", "+    first(x, scale=1.0)"]),
        ("second(x)", "second(y)", ["-    second(x)", "+    second(y)"]),
        ("a=None", "a=None, b=0", ["-        .method(a=None)", "+        .method(a=None, b=0)"]),
        ("def value", "def values", ["-        .value", "+        .values"]),
        ("_private(self, b)", "_private(self)", []),
    ],
)
def test_each_change_is_detected(old: str, new: str, shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def of(source: str) -> str:
        module = ModuleType("plurax.made_up")
        found: dict[str, Any] = {}
        exec(source, vars(module) | {"__name__": module.__name__}, found)
        vars(module).update(found, SOURCE=ModuleType("plurax.other"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return interface((module.__name__,))

    assert old in SOURCE
    lines = difference(of(SOURCE), of(SOURCE.replace(old, new))).splitlines()
    changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert [line.replace("module ", "") for line in changed] == shown


@pytest.mark.parametrize("name", MODULES)
def test_a_star_imports_the_public_names(name: str) -> None:
    found: dict[str, Any] = {}
    exec(f"from {name} import *", found)
    public = importlib.import_module(name).__all__
    assert set(found) - {"__builtins__"} == set(public)
    assert len(public) == len(set(public))


def test_the_listed_modules_are_the_public_ones() -> None:
    files = [path for folder in ("transforms", "ensemble") for path in (ROOT / folder).rglob("*.py")]
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in files]
    public = {".".join(["plurax", *(x for x in part if x != "__init__")]) for part in parts if not private(part)}
    assert public == set(MODULES)


def private(parts: tuple[str, ...]) -> bool:
    return any(part.startswith("_") and part != "__init__" for part in parts)


def test_the_reference_has_a_page_for_each_module() -> None:
    pages = {path.name: path.read_text() for path in (ROOT / "docs/api").glob("*.md")}
    shown = {name: re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE) for name, text in pages.items()}
    assert sorted(module for modules in shown.values() for module in modules) == sorted(MODULES)
    listed = (ROOT / "mkdocs.yml").read_text()
    assert [name for name in pages if f"docs/api/{name}" not in listed] == []


ORDER = ["Args", "Attributes", "Returns", "Raises", "Warns", "Privacy", "Cost", "Rounding", "Source", "Examples"]


def undocumented(name: str, value: Any, example: bool = True) -> list[str]:
    """Return what the docstring of a function, a class or a method lacks."""
    text = inspect.getdoc(value) or ""
    found = []
    if not re.match(r".*[^.]\.(\n\n|$)", text):
        found.append(f"{name}: the docstring does not begin with one sentence on a separate line")
    titles = re.findall(r"^(\w+):$", text, flags=re.MULTILINE)
    if titles != [title for title in ORDER if title in titles]:
        found.append(f"{name}: the sections {titles} are not in the order {ORDER}")
    if example and "Examples" not in titles:
        found.append(f"{name}: there is no example")
    function = inspect.isroutine(value)
    parameters = inspect.signature(value).parameters if callable(value) else {}
    explained = {*section(value, "Args"), *section(value, "Attributes")}
    made = {"args", "kwargs"} >= set(parameters)  # a constructor of Python's or another library's
    if not made and (example or explained):
        missing = set(parameters) - explained - {"self"}
        found += [f"{name}: the argument {parameter} is not explained" for parameter in sorted(missing)]
    gives = function and str(inspect.signature(value).return_annotation) != "None"
    if example and gives and "Returns" not in titles:
        found.append(f"{name}: the return value is not explained")
    return found


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    found = [] if module.__doc__ else [f"{name} has no docstring"]
    for public in module.__all__:
        value = getattr(module, public)
        if isinstance(value, ModuleType):
            continue
        found += undocumented(public, value)
        if inspect.isclass(value):
            for member in sorted({*members(value)} - {*SPECIAL}):
                found += undocumented(f"{public}.{member}", getattr(value, member), example=False)
    assert found == []


def test_missing_documentation_is_detected() -> None:
    def right(x: Any) -> Any:
        """Do it.

        Args:
          x: a number.

        Returns:
          Another.

        Examples:
          >>> 1
          1
        """

    text = inspect.getdoc(right) or ""
    assert undocumented("f", right) == []
    for old, new, lacks in (
        ("Do it.", "Do it", "does not begin with one sentence"),
        ("Do it.", "Do\nit.", "does not begin with one sentence"),
        ("x: a", "y: a", "the argument x is not explained"),
        ("Returns:", "Result:", "the return value is not explained"),
        ("Examples:", "Note:", "there is no example"),
        ("Args:", "Examples:\n  no\n\nArgs:", "are not in the order"),
    ):
        right.__doc__ = text.replace(old, new)
        assert lacks in "; ".join(undocumented("f", right)), lacks


if __name__ == "__main__":
    sys.stdout.write(interface())
