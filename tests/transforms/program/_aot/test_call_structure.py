"""Structures are distinguished as in JAX, and restored from text."""

import collections
import dataclasses
import json
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from plurax.transforms._models.split_model import split_tree
from plurax.transforms.program._aot.call_structure import described, nodes, read, written

pytestmark = pytest.mark.smoke


def scaled(factor: Any) -> Any:
    return lambda x: x * factor


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


def test_a_description_names_types_and_what_is_static_but_no_addresses():
    kinds: list[Any] = [
        *({"a": [1, None]}, {"a": (1, None)}, {"a": [1, 1]}, {"b": [1, None]}, Pair(1, 2), Data(1, "a"), Data(1, "b")),
        *(Data(1, Plain(0)), Data(1, scaled)),
        *(split_tree(nnx.Linear(2, n, rngs=nnx.Rngs(0))) for n in (1, 2)),
        *(split_tree(nnx.Dropout(rate, rngs=nnx.Rngs(0))) for rate in (0.1, 0.2)),
    ]
    texts = [described(jax.tree.structure(kind)) for kind in kinds]
    assert len(set(texts)) == len(kinds)
    assert described(jax.tree.structure(Data(1, Plain(1)))) == texts[7]  # `Plain` does not expose its value
    assert "0x" not in "".join(texts)


def test_a_module_keeps_its_structure_when_updated():
    linear = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    model = nnx.Sequential(linear, nnx.relu)
    before = described(jax.tree.structure(split_tree(model)))
    nnx.jit(lambda model: model(jnp.ones(4)))(model)
    linear.kernel[...] += 1.0
    assert described(jax.tree.structure(split_tree(model))) == before


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
def test_a_structure_is_restored_from_text(tree):
    structure = jax.tree.structure(tree)
    again = read(json.loads(json.dumps(written(structure, []))), [])
    assert again == structure
    assert str(again) == str(structure)


def test_static_parts_of_an_argument_may_be_in_a_result():
    function = scaled(1.0)
    known = nodes(jax.tree.structure([{"a": 1}, Data(1, function)]))
    structure = jax.tree.structure({"out": (Data([1, 2], function), None)})
    text = json.loads(json.dumps(written(structure, known)))
    assert read(text, known) == structure
    with pytest.raises(TypeError, match="another process cannot rebuild a Data with .*function scaled"):
        written(structure, nodes(jax.tree.structure(Data(1, scaled(1.0)))))


def test_local_classes_need_an_argument_of_their_class():
    class Local(NamedTuple):
        x: Any

    structure = jax.tree.structure(Local(1))
    with pytest.raises(TypeError, match="another process cannot rebuild a Local with None"):
        written(structure, [])
    assert read(written(structure, [structure]), [structure]) == structure
