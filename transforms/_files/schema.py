"""`decode`: turn values of JSON into dataclasses, by the types of their fields."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

# Larger ones fit into no array of JAX.
_LARGEST = 2**63


def decode(kind: type[T], value: Any, where: str) -> T:
    """Return a value of JSON as an object of a type.

    Args:
      kind: a dataclass or a named tuple, whose fields have such types; `int`, `float`, `str`, `bool`, `None`, `Any`, a
        `Literal`, a union, or a `list`, `dict` or `tuple` of such types.
      value: the value. An object must have all fields of the dataclass that have no default, and no others.
      where: where it is, for errors.

    Raises:
      ValueError: it has another type; the message names the entry.
    """
    return _decode(kind, value, where)


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin, of = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _object(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):  # JSON has it as a list
        of_fields = _hints(kind)
        each: Any = tuple
        return kind(*_decode(each[tuple(of_fields[name] for name in kind._fields)], value, where))
    if origin in (Union, types.UnionType):
        for one in of:
            try:
                return _decode(one, value, where)
            except ValueError as error:
                last = error
        raise last
    if origin is Literal and isinstance(value, str) and value in of:
        return value
    if origin is list and isinstance(value, list):
        if of[0] is int and all(type(x) is int and abs(x) < _LARGEST for x in value):  # of thousands of members
            return list(value)
        return [_decode(of[0], x, f"{where}[{i}]") for i, x in enumerate(value)]
    if origin is tuple and isinstance(value, list):
        each = of[:1] * len(value) if of[-1] is ... else of
        if len(each) == len(value):
            return tuple(_decode(one, x, f"{where}[{i}]") for i, (one, x) in enumerate(zip(each, value, strict=True)))
    if origin is dict and isinstance(value, dict):
        return {name: _decode(of[1], x, f"{where}.{name}") for name, x in value.items()}
    if kind in (type(None), None) and value is None:
        return None
    # By `type`, since True is an instance of int.
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind is int and type(value) is int and abs(value) < _LARGEST:
        return value
    if kind in (str, bool) and type(value) is kind:
        return value
    text = repr(value)
    shown = text if len(text) < 60 else f"{text[:60]}..."
    raise ValueError(f"`{where}` is {shown}, but must be of type {getattr(kind, '__name__', kind)}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"`{where}` is no object")
    types_of, named = _hints(kind), {field.name: field for field in fields(kind)}
    if unknown := value.keys() - named.keys():
        raise ValueError(f"`{where}` has an unknown entry {min(unknown)!r}")
    for name, field in named.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"`{where}` has no entry {name!r}")
    return kind(**{name: _decode(types_of[name], x, f"{where}.{name}") for name, x in value.items()})
