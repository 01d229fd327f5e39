"""JSON as dataclasses."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import pytest

from plurax.transforms._files.schema import decode


class Pair(NamedTuple):
    name: str
    number: int | None = None


@dataclass(frozen=True)
class Inner:
    numbers: tuple[float, ...]
    two: tuple[int, str]

    def __post_init__(self) -> None:
        if not self.numbers:
            raise ValueError("there are no numbers")


@dataclass(frozen=True)
class Outer:
    inner: list[Inner]
    named: dict[str, Pair]
    kind: Literal["a", "b"]
    anything: Any
    flag: bool
    more: int | None = None


VALUE: dict[str, Any] = {
    "inner": [{"numbers": [1, 2.5], "two": [3, "x"]}],
    "named": {"p": ["q", 4], "r": ["s", None]},
    "kind": "b",
    "anything": {"a": [None]},
    "flag": False,
}


def test_values_become_objects_and_back() -> None:
    found = decode(Outer, VALUE, "outer")
    assert found == Outer([Inner((1.0, 2.5), (3, "x"))], {"p": Pair("q", 4), "r": Pair("s")}, "b", {"a": [None]}, False)
    assert isinstance(found.inner[0].numbers[0], float)
    assert decode(Outer, json.loads(json.dumps(asdict(found))), "outer") == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": {}}, "`outer.inner` is {}, but must be of type list"),
        ({"inner": [{"numbers": []}]}, r"`outer.inner\[0\]` has no entry 'two'"),
        ({"inner": [{"numbers": [], "two": [1, "x"]}]}, "there are no numbers"),
        ({"inner": [{"numbers": [True], "two": [1, "x"]}]}, r"`outer.inner\[0\].numbers\[0\]` is True, but"),
        ({"inner": [{"numbers": [1], "two": [1]}]}, r"`outer.inner\[0\].two` is \[1\], but must be of type tuple"),
        (
            {"inner": [{"numbers": [1], "two": [1.0, "x"]}]},
            r"`outer.inner\[0\].two\[0\]` is 1.0, but must be",
        ),
        ({"named": {"p": ["q"]}}, r"`outer.named.p` is \['q'\], but must be of type tuple"),
        ({"named": {"p": ["q", "4"]}}, r"`outer.named.p\[1\]` is '4'"),
        ({"kind": "c"}, "`outer.kind` is 'c'"),
        ({"flag": 0}, "`outer.flag` is 0, but must be of type bool"),
        ({"more": 2**63}, "`outer.more` is 9223372036854775808"),
        ({"more": True}, "`outer.more` is True"),
        ({"other": 1}, "`outer` has an unknown entry 'other'"),
    ],
)
def test_another_type_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(Outer, VALUE | change, "outer")


def test_an_entry_without_a_default_must_be_there() -> None:
    with pytest.raises(ValueError, match="`outer` has no entry 'flag'"):
        decode(Outer, {name: x for name, x in VALUE.items() if name != "flag"}, "outer")
    with pytest.raises(ValueError, match="`outer` is no object"):
        decode(Outer, [VALUE], "outer")
