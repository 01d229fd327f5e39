"""Structures are told apart as they are by JAX, and made again from text."""

import collections
import dataclasses
import enum
import functools
import json
import operator
import threading
import types
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

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


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Local(float):
    pass


@dataclasses.dataclass(frozen=True)
class Given:
    n: Any


def local(n: Any) -> Any:
    @dataclasses.dataclass
    class Made:
        m: int = n

        def method(self) -> Any:
            return n

    return Made


def defined(n: int) -> Any:
    class Made:
        if n == 1:

            @property
            def value(self) -> int:
                return 1
        else:

            @property
            def value(self) -> int:
                return 2

    return Made


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
    lambda: np.array([1, "b"], object),
    lambda: np.ma.array([1, 2], mask=[True, False]),
    lambda: np.ma.array([1, 2], mask=[False, True]),
    *(lambda kind=kind, value=value: kind(value) for kind in (np.float32, np.float64, np.int8) for value in (1, 2)),
    lambda: jnp.asarray(1.0),
    lambda: jnp.float32(1.0),
    *(lambda dtype=dtype: np.dtype(dtype) for dtype in ("int16", ">i4", "M8[s]", "M8[ms]", [("a", "i4")])),
    *(lambda dtype=dtype: dtype for dtype in (jnp.float32, jnp.bfloat16)),
    *(lambda n=n, kind=kind: kind(n) for n in (1, 2) for kind in (range, slice, Fraction, Color, Local)),
    *(lambda n=n: Given(n) for n in (1, 2)),
    *(lambda n=n: types.SimpleNamespace(a=n) for n in (1, 2)),
    *(lambda n=n: types.MappingProxyType({"a": n}) for n in (1, 2)),
    *(lambda n=n: collections.OrderedDict(a=n) for n in (1, 2)),
    *(lambda n=n: collections.deque([n]) for n in (1, 2)),
    *(lambda n=n: {Pair(n, Plain(n))} for n in (1, 2)),
    *(lambda n=n: operator.itemgetter(n) for n in (1, 2)),
    *(lambda n=n: functools.lru_cache(scaled(n)) for n in (1, 2)),
    *(lambda n=n: jax.custom_jvp(scaled(n)) for n in (1, 2)),
    *(lambda n=n: jax.checkpoint(scaled(n)) for n in (1, 2)),
    *(lambda n=n: jax.vmap(scaled(1.0), in_axes=n) for n in (1, 2)),
    lambda: jax.jit(scaled(1.0), donate_argnums=0),
    *(lambda n=n: optax.adam(10.0**-n) for n in (1, 2)),
    *(lambda n=n: nnx.Linear(2, n, rngs=nnx.Rngs(0)) for n in (1, 2)),
    *(lambda n=n: nnx.Linear(2, 3, rngs=nnx.Rngs(n)) for n in (1, 2)),
    *(lambda n=n: local(n) for n in (1, 2)),
    *(lambda n=n: local(n)() for n in (1, 2)),
    *(lambda n=n: local(n)().method for n in (1, 2)),
    *(lambda n=n: defined(n) for n in (1, 2)),
    *(lambda n=n: defined(n)() for n in (1, 2)),
    lambda: jax.devices()[0],
    lambda: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    *(lambda a=a: jax.sharding.NamedSharding(jax.make_mesh((1,), ("a",)), a) for a in (P("a"), P())),
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
    lambda: lambda *x: x,
    lambda: lambda x: x,
    lambda: lambda x, /: x,
    lambda: lambda x, y: x,
    lambda: lambda x: [lambda: 1],
    lambda: lambda x: [lambda: 2],
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


def test_where_not_the_whole_is_asked_for_only_what_cannot_be_copied_counts_by_its_type():
    texts = [described(scaled(make()), whole=False) for make in KINDS]
    assert len(set(texts)) == len(KINDS)
    locks = [described(scaled([threading.Lock(), i]), whole=False) for i in (1, 1, 2)]
    assert locks[0] == locks[1] != locks[2]
    assert described(threading.Lock(), whole=False) != described(threading.RLock(), whole=False)


def test_of_the_owner_there_is_only_the_class():
    one, two = Plain(1), Plain(2)
    assert described(scaled(one), owner=one) == described(scaled(two), owner=two) != described(scaled(one))


def test_the_order_in_a_set_does_not_matter():
    ones = [Plain(i) for i in range(9)]
    wanted = described(set(ones))
    assert [described(set(map(Plain, range(i, 9))) | set(map(Plain, range(i)))) for i in range(9)] == 9 * [wanted]


def test_a_module_is_as_before_when_it_has_been_updated():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    before = described(model)
    nnx.jit(lambda model: model(jnp.ones(4)))(model)
    assert described(model) == before
    model.kernel[...] += 1.0
    assert described(model) != before


def test_what_holds_itself_many_times_is_described_in_no_time():
    knots = [Plain([]) for _ in range(200)]
    for knot in knots:
        knot.value.extend(knots)
    twice: Any = [1]
    for _ in range(200):
        twice = [twice, twice]
    chain: Any = None
    for _ in range(5000):
        chain = Plain(chain)
    assert len({described(x) for x in (knots, twice, chain)}) == 3


def test_what_is_nested_too_deeply_is_refused():
    deep: Any = ()
    for _ in range(5000):
        deep = (deep,)
    loop = Plain(None)
    loop.value = {loop}
    for value in (deep, loop):
        with pytest.raises(TypeError, match="something of type .* is nested too deeply to be told from others"):
            described(value, whole=False)


def test_what_has_attributes_of_its_own_making_is_described():
    class Stubborn:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    assert described(Stubborn(), whole=False) == described(Stubborn(), whole=False)


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
