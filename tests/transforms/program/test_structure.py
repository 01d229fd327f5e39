"""Structures are told apart as they are by JAX, and made again from text."""

import collections
import dataclasses
import json
import threading
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.transforms.program._structure import described, nodes, read, written


def scaled(factor: Any) -> Any:
    return lambda x: x * factor


def shifted(offset: Any) -> Any:
    def shift(x: Any, offset: Any = offset) -> Any:
        return x + offset

    return shift


class Pair(NamedTuple):
    first: Any
    second: Any


@partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["n"])
@dataclasses.dataclass
class Data:
    x: Any
    n: Any


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


def lazily() -> Any:
    def recursive(n: int) -> Any:
        return later(n), recursive

    given = recursive
    if given is None:
        later: Any = given
    return given


def itself() -> Any:
    loop: list[Any] = [1]
    loop.append(loop)
    return loop


# Each twice is the same, and no two of them are.
KINDS: list[Any] = [
    *(lambda value=value: value for value in (None, True, 1, 1.0, 1j, "1", b"1", ..., float("inf"))),
    *(lambda value=value: value for value in ((), [], {}, set(), (1,), [1], {"a": 1}, {1}, frozenset({1}), ((1,),))),
    lambda: {"a": 1, "b": 2},
    lambda: {"b": 2, "a": 1},
    lambda: np.arange(3),
    lambda: np.arange(3.0),
    lambda: np.arange(3)[None],
    lambda: np.array([1, "a"], object),
    lambda: jnp.arange(3),
    lambda: jax.random.key(1),
    lambda: jax.random.key(2),
    lambda: np.float32(1.0),
    lambda: np.float64(1.0),
    lambda: np.dtype("int8"),
    lambda: jnp.sin,
    lambda: np.sin,
    lambda: jnp.cos,
    lambda: jnp,
    lambda: nnx.Param,
    lambda: scaled(1.0),
    lambda: scaled(2.0),
    lambda: scaled(jnp.arange(3)),
    lambda: scaled(jnp.arange(4)),
    lambda: scaled(scaled(1.0)),
    lambda: jax.jit(scaled(1.0)),
    lambda: shifted(1.0),
    lambda: shifted(2.0),
    lambda: lambda x: x + 1,
    lambda: lambda x: x + 2,
    lambda: lambda x: x - 2,
    lambda: lambda x, *, y=1: x,
    lambda: lambda x, *, y=2: x,
    lambda: partial(scaled, 1.0),
    lambda: partial(scaled, factor=1.0),
    lambda: partial(shifted, 1.0),
    lambda: Plain(1),
    lambda: Plain(2),
    lambda: Plain(1).__init__,
    lambda: Pair(1, 2),
    lambda: lazily(),
    lambda: itself(),
    lambda: jax.tree.structure({"a": [1, None]}),
    lambda: jax.tree.structure({"a": (1, None)}),
    lambda: jax.tree.structure({"a": [1, 1]}),
    lambda: jax.tree.structure({"b": [1, None]}),
    lambda: jax.tree.structure(Pair(1, 2)),
    lambda: jax.tree.structure(Data(1, "a")),
    lambda: jax.tree.structure(Data(1, "b")),
]


def test_what_is_the_same_has_one_description_and_no_two_have():
    texts = [described(make()) for make in KINDS]
    assert texts == [described(make()) for make in KINDS]
    alike = [(i, texts.index(text)) for i, text in enumerate(texts) if texts.index(text) != i]
    assert alike == []


def test_a_wrong_description_is_noticed():
    assert described(Plain(1), whole=False) == described(Plain(2), whole=False)


def test_where_not_the_whole_is_asked_for_functions_are_still_told_apart():
    for one, other in ((scaled(1.0), scaled(2.0)), (scaled(np.arange(3)), scaled(np.arange(4))), (jnp.sin, jnp.cos)):
        assert described(one, whole=False) != described(other, whole=False)
    assert described(scaled(threading.Lock()), whole=False) == described(scaled(threading.Lock()), whole=False)


def test_what_cannot_be_copied_is_refused():
    with pytest.raises(TypeError, match="lock .* of type _thread:lock cannot be told from others: cannot pickle"):
        described([scaled(threading.Lock())])


def model_and_state() -> Any:
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    return nnx.state(model, nnx.Param)


TREES: list[Any] = [
    1,
    None,
    (),
    [],
    {},
    {"b": [1, (2, None)], "a": {3: 1, 4: []}},
    collections.OrderedDict(b=1, a=2),
    Pair(1, [2]),
    *(Data([1], n) for n in (1, True, 1.0, "a'\"\n", (1, None), {"k": [1]})),
    optax.adam(1e-2).init({"w": jnp.ones(2)}),
    model_and_state(),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_a_structure_is_made_again_from_text(tree):
    structure = jax.tree.structure(tree)
    again = read(json.loads(json.dumps(written(structure, []))), [])
    assert again == structure
    assert described(again) == described(structure)


def test_what_is_static_in_an_argument_may_be_in_a_result():
    function = scaled(1.0)
    known = nodes(jax.tree.structure([{"a": 1}, Data(1, function)]))
    structure = jax.tree.structure({"out": (Data([1, 2], function), None)})
    text = json.loads(json.dumps(written(structure, known)))
    assert read(text, known) == structure
    with pytest.raises(TypeError, match="a Data with .*function scaled.* cannot be made again by another process"):
        written(structure, nodes(jax.tree.structure(Data(1, scaled(1.0)))))


def test_classes_without_a_name_need_an_argument_of_them():
    class Local(NamedTuple):
        x: Any

    structure = jax.tree.structure(Local(1))
    with pytest.raises(TypeError, match="a Local with None cannot be made again by another process"):
        written(structure, [])
    assert read(written(structure, [structure]), [structure]) == structure
