"""Parameters by their names: the oracle is the attribute that one would write in code."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.ensemble import Ensemble
from plurax.transforms.modules import Frozen, freeze, named_parameters
from plurax.transforms.modules._places import places


class Child(nnx.Module):
    """It knows its parent."""

    def __init__(self, parent: Any) -> None:
        self.parent, self.scale = parent, nnx.Param(jnp.ones(2))


class Model(nnx.Module):
    """Lists, dicts, other state, something shared, and a parameter that holds a pytree."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(7, 3, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(1 + i % 3, 2, rngs=rngs) for i in range(11)])
        self.parts = nnx.Dict(norm=nnx.BatchNorm(2, rngs=rngs), again=self.blocks[10])
        self.loose = nnx.data({"x": [nnx.LoRAParam(jnp.ones(1))]})
        self.tree = nnx.Param({"w": jnp.ones((2, 3)), "b": [jnp.zeros(3), jnp.ones(())]})
        self.head = self.embed.embedding
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.child = Child(self)


def follow(model: Any, name: str) -> Any:
    """What the code `model.name` stands for."""
    for part in name.split("."):
        model = model[int(part)] if part.isdigit() else model[part] if isinstance(model, dict) else getattr(model, part)
        model = model.get_value() if isinstance(model, nnx.Variable) else model
    return model


def test_names_are_those_that_code_gives() -> None:
    model = Model(nnx.Rngs(0))
    found = named_parameters(model)
    expected = {f"blocks.{i}.{name}" for i in range(11) for name in ("bias", "kernel")}
    expected |= {"embed.embedding", "loose.x.0", "parts.norm.bias", "parts.norm.scale", "child.scale"}
    assert found.keys() == expected | {"tree.b.0", "tree.b.1", "tree.w"}
    for name, array in found.items():
        assert array is follow(model, name)
    assert sum(array.size for array in found.values()) == sum(
        x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))
    )


def test_frozen_ones_keep_their_names() -> None:
    model = Model(nnx.Rngs(0))
    found = named_parameters(freeze(model, ["embed", "tree"]))
    assert [*found] == [*named_parameters(model)]
    assert all(x is y for x, y in zip(found.values(), named_parameters(model).values(), strict=True))


def test_an_ensemble_has_those_of_all_members() -> None:
    ensemble = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0)
    found = named_parameters(ensemble)
    assert {name: x.shape for name, x in found.items()} == {"bias": (2, 3), "kernel": (2, 4, 3)}
    np.testing.assert_array_equal(found["kernel"][1], ensemble[1].kernel[...])


def test_there_may_be_none() -> None:
    assert named_parameters(nnx.Dropout(0.5)) == {}


def test_shapes_suffice() -> None:
    abstract = nnx.eval_shape(lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    assert named_parameters(abstract)["kernel"] == jax.ShapeDtypeStruct((4, 3), jnp.float32)


def test_two_of_one_name_are_refused() -> None:
    model = nnx.Dict({"a.b": nnx.Param(jnp.ones(1)), "a": nnx.Dict(b=nnx.Param(jnp.ones(2)))})
    with pytest.raises(
        ValueError, match=r"named_parameters: two arrays of the model are called `a\.b`; leave dots out"
    ):
        named_parameters(model)


@pytest.mark.parametrize("other", [{"a": jnp.ones(2)}, None, nnx.Linear, nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))])
def test_what_is_no_module_is_refused(other: Any) -> None:
    with pytest.raises(TypeError, match=r"named_parameters: model must be a Flax NNX module, but got .*nnx\.bridge"):
        named_parameters(other)


@pytest.mark.parametrize("kind", ["hijax", "ref"])
def test_experimental_variables_are_refused(kind: str) -> None:
    model = nnx.with_vars(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), **{kind: True})
    with pytest.raises(TypeError, match="named_parameters: `bias` is a variable of Flax's experimental kinds; make it"):
        named_parameters(model)
    assert named_parameters(nnx.with_vars(model, hijax=False, ref=False))["bias"].shape == (3,)


def test_all_places_of_what_is_shared_are_known() -> None:
    model = Model(nnx.Rngs(0))
    found = places(model)
    paths = [".".join(map(str, path)) for path, x in found.items() if x is model.blocks[10].kernel]
    assert paths == ["blocks.10.kernel", "parts.again.kernel"]
    assert [path for path, x in found.items() if x is model.embed.embedding] == [("embed", "embedding"), ("head",)]
    nested: Any = nnx.Dict(a=nnx.Dict(x=nnx.Dict(w=nnx.Param(jnp.ones(1)))))
    nested.b, nested.c = nested.a, nested.a.x
    paths = [".".join(path) for path, x in places(nested).items() if isinstance(x, nnx.Variable)]
    assert paths == ["a.x.w", "b.x.w", "c.w"]


def test_frozen_is_no_parameter_to_flax() -> None:
    assert not issubclass(Frozen, nnx.Param)
