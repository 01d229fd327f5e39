"""`decode`: turn values of JSON, and arrays beside them, into dataclasses, by the types of their fields."""

from __future__ import annotations

import math
import reprlib
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

T = TypeVar("T")

# Larger ones fit into no array of JAX.
_LARGEST = 2**63
_NOTHING = memoryview(b"")


def decode(kind: type[T], value: Any, where: str, content: memoryview = _NOTHING) -> T:
    """Return a value of JSON as an object of a type.

    Args:
      kind: a dataclass or a named tuple, whose fields have such types; `int`, `float`, `str`, `bool`, `None`, `Any`, a
        `Literal`, a union, or a `list`, `dict` or `tuple` of such types.
      value: the value. An object must have all fields of the dataclass that have no default, and no others.
      where: where it is, for errors.
      content: the bytes of arrays of NumPy, which `with_arrays` has taken out of the value.

    Raises:
      ValueError: it has another type; the message names the entry.
    """
    return _Decoder(content).decode(kind, value, where)


def with_arrays(value: Any) -> tuple[Any, list[memoryview]]:
    """Return a value with what tells where arrays of NumPy are, in their places, and the bytes of all arrays."""
    pieces: list[memoryview] = []

    def replaced(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: replaced(each) for name, each in x.items()}
        if isinstance(x, (list, tuple)):
            return [replaced(each) for each in x]
        if not isinstance(x, np.ndarray):
            return x
        array = np.ascontiguousarray(x, x.dtype.newbyteorder("<"))
        at = sum(piece.nbytes for piece in pieces)
        pieces.append(memoryview(array.tobytes()))
        return {"dtype": array.dtype.str, "shape": list(x.shape), "at": at}

    return replaced(value), pieces


class _Decoder:
    def __init__(self, content: memoryview) -> None:
        self._content = content

    def decode(self, kind: Any, value: Any, where: str) -> Any:
        origin, of = get_origin(kind), get_args(kind)
        if kind is Any:
            return value
        if is_dataclass(kind):
            return self._object(kind, value, where)
        if kind is np.ndarray:
            return self._array(value, where)
        if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):  # JSON has it as a list
            of_fields, each = _hints(kind), cast(Any, tuple)
            return kind(*self.decode(each[tuple(of_fields[name] for name in kind._fields)], value, where))
        if origin in (Union, types.UnionType):
            for one in of:
                try:
                    return self.decode(one, value, where)
                except ValueError as error:
                    last = error
            raise last
        if origin is Literal and isinstance(value, str) and value in of:
            return value
        if origin is list and isinstance(value, list):
            return [self.decode(of[0], x, f"{where}[{i}]") for i, x in enumerate(value)]
        if origin is tuple and isinstance(value, list):
            each = of[:1] * len(value) if of[-1] is ... else of
            if len(each) == len(value):
                pairs = enumerate(zip(each, value, strict=True))
                return tuple(self.decode(one, x, f"{where}[{i}]") for i, (one, x) in pairs)
        if origin is dict and isinstance(value, dict):
            return {name: self.decode(of[1], x, f"{where}.{name}") for name, x in value.items()}
        if kind in (type(None), None) and value is None:
            return None
        # By `type`, since True is an instance of int.
        if kind is float and type(value) in (int, float) and (type(value) is float or abs(value) < _LARGEST):
            return float(value)
        if kind is int and type(value) is int and abs(value) < _LARGEST:
            return value
        if kind in (str, bool) and type(value) is kind:
            return value
        raise ValueError(f"`{where}` is {reprlib.repr(value)}, but must be of type {getattr(kind, '__name__', kind)}")

    def _object(self, kind: Any, value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"`{where}` is no object")
        types_of, named = _hints(kind), {field.name: field for field in fields(kind)}
        if unknown := value.keys() - named.keys():
            raise ValueError(f"`{where}` has an unknown entry {reprlib.repr(min(unknown))}")
        for name, field in named.items():
            if name not in value and field.default is MISSING and field.default_factory is MISSING:
                raise ValueError(f"`{where}` has no entry {name!r}")
        return kind(**{name: self.decode(types_of[name], x, f"{where}.{name}") for name, x in value.items()})

    def _array(self, value: Any, where: str) -> np.ndarray:
        found = self._object(_Array, value, where)
        dtype = np.dtype(found.dtype)
        size = math.prod(found.shape) * dtype.itemsize
        data = self._content[found.at : found.at + size]
        if len(found.shape) > 2 or min((found.at, *found.shape)) < 0 or len(data) != size:
            raise ValueError(f"`{where}` is beyond the end of the file")
        return np.frombuffer(data, dtype).reshape(found.shape)


@dataclass(frozen=True)
class _Array:
    """Where an array is in the content: its dtype, its shape, and its first byte."""

    dtype: Literal["<u4", "<i4", "<f8"]
    shape: list[int]
    at: int


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
