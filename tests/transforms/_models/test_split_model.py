"""Models: NNX modules, and any class that implements the protocol, with or without Flax installed."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.ensemble import Ensemble
from plurax.transforms import clipped_grad, grad, per_sample_grad, vmap
from plurax.transforms._models.mutation import passing_through
from plurax.transforms._models.split_model import by_value, is_model, is_module, named_arrays, split, split_tree
from plurax.transforms.modules import freeze, save_params

pytestmark = pytest.mark.smoke

WITHOUT_FLAX = """
import sys, jax.numpy as jnp
from plurax.transforms import grad, vmap
assert vmap(jnp.sin, chunk_size=2)(jnp.ones((3, 2))).shape == (3, 2)
assert float(grad(lambda tree: tree["x"] ** 2)({"x": 3.0})["x"]) == 6
print("flax" in sys.modules)
import flax
print("flax" in sys.modules)
"""


@pytest.mark.slow
def test_flax_is_not_imported_without_modules() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_FLAX], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]


@dataclass(frozen=True)
class LineStructure:
    """The static part of a `Line`: the name of its slope."""

    name: str

    def merge(self, trainable: Any, rest: Any) -> Line:
        return Line(self.name, trainable[self.name], rest["seen"])

    def gradient(self, trainable: Any, rest: Any) -> Any:
        return trainable


class Line:
    """A custom model: a trainable slope, and a running sum of its inputs."""

    def __init__(self, name: str, slope: Any, seen: Any) -> None:
        self.name, self.slope, self.seen = name, slope, seen

    def __call__(self, x: Any) -> Any:
        self.seen = self.seen + jnp.sum(x)
        return self.slope * x

    def __plurax_split__(self) -> tuple[LineStructure, Any, Any]:
        return LineStructure(self.name), {self.name: self.slope}, {"seen": self.seen}

    def __plurax_update__(self, rest: Any) -> None:
        self.seen = rest["seen"]


def test_a_model_needs_no_library() -> None:
    line = Line("slope", jnp.asarray(2.0), jnp.asarray(0.0))
    x = np.arange(3, dtype=np.float32)
    assert is_model(line)
    assert not is_module(line)
    gradient = grad(lambda line, x: jnp.sum(line(x)))(line, x)
    assert {name: float(value) for name, value in gradient.items()} == {"slope": 3.0}
    assert float(line.seen) == 3
    with pytest.raises(
        ValueError, match=r"changes the state of Line \(`seen`\), which would be lost; return the model"
    ):
        vmap(line)(x)
    many = vmap(lambda line, x: (line(x), line)[1], (None, 0), chunk_size=2)(line, x)
    assert isinstance(many, Line)
    np.testing.assert_array_equal(many.seen, 3 + x)


def test_other_objects_are_not_models() -> None:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    for other in (nnx.state(model), model.kernel, nnx.Linear, Line, {"a": model}, jnp.ones(2), None, "model"):
        assert not is_model(other)
    assert all(is_model(x) for x in (model, nnx.Rngs(0), nnx.Dict(a=model)))


def test_arrays_are_named_by_their_attributes() -> None:
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    parts = split_tree({"a": [model]})["a"][0]
    assert sorted(named_arrays(parts.trainable)) == [
        f"layers.{name}" for name in ("0.bias", "0.kernel", "1.bias", "1.scale")
    ]
    assert sorted(parts.arrays()) == sorted([*named_arrays(parts.trainable), "layers.1.mean", "layers.1.var"])


def test_a_name_that_ends_in_value_is_kept() -> None:
    assert sorted(named_arrays({"attn": {"query": 1.0, "value": 2.0}})) == ["attn.query", "attn.value"]
    model = nnx.Dict(value=nnx.Param(jnp.ones(2)), query=nnx.Param(jnp.ones(2)))
    assert sorted(split(model).arrays()) == ["query", "value"]


class Held(nnx.Module):
    """A module whose variables hold pytrees: parameters and statistics."""

    def __init__(self) -> None:
        self.weights: Any = nnx.Param({"w": jnp.full((2, 3), 0.5), "b": [jnp.zeros(3), jnp.ones(())]})
        self.seen: Any = nnx.BatchStat((jnp.zeros(2), {"count": jnp.zeros((), jnp.int32)}))
        self.empty: Any = nnx.Variable({})

    def __call__(self, x: Any) -> Any:
        total, counted = self.seen.get_value()
        self.seen.set_value((total + x.sum(0), {"count": counted["count"] + 1}))
        weights = self.weights.get_value()
        return (x @ weights["w"] + weights["b"][0]) * weights["b"][1]


def test_a_variable_may_hold_a_pytree() -> None:
    model, x = Held(), np.arange(8, dtype=np.float32).reshape(4, 2)
    parts = split(model)
    assert sorted(parts.arrays()) == ["seen.0", "seen.1.count", "weights.b.0", "weights.b.1", "weights.w"]
    for again in (parts.merge(), jax.tree.map(lambda leaf: leaf, parts).merge()):
        assert jax.tree.structure(again) == jax.tree.structure(model)
        jax.tree.map(np.testing.assert_array_equal, split(again), parts)

    gradient = grad(lambda model, x: (model(x) ** 2).sum())(model, x)
    weights = {"w": jnp.full((2, 3), 0.5), "b": [jnp.zeros(3), jnp.ones(())]}
    expected = jax.grad(lambda p: (((x @ p["w"] + p["b"][0]) * p["b"][1]) ** 2).sum())(weights)
    jax.tree.map(np.testing.assert_array_equal, gradient["weights"].get_value(), expected)
    np.testing.assert_array_equal(model.seen.get_value()[0], x.sum(0))
    assert model.seen.get_value()[1]["count"] == 1


def test_a_variable_with_a_computed_value_is_split_by_its_stored_value() -> None:
    class Doubled(nnx.Param):
        def get_value(self, **options: Any) -> Any:
            return super().get_value(**options) * 2

    parts = split(nnx.Dict(w=Doubled(jnp.array(3.0))))
    assert [float(x) for x in parts.arrays().values()] == [3.0]
    assert float(parts.merge()["w"].get_value()) == 6.0


def test_arrays_go_back_to_their_places() -> None:
    rngs = nnx.Rngs(0)
    layers = nnx.List([nnx.Linear(1 + i % 3, 2, rngs=rngs) for i in range(12)])
    model = nnx.Dict(layers=layers, tied=layers[11], norm=nnx.BatchNorm(2, rngs=rngs), plain=jnp.ones(3))
    again = split(model).merge()
    assert again.tied is again.layers[11]
    assert jax.tree.structure(nnx.split(again)) == jax.tree.structure(nnx.split(model))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(again)), nnx.to_pure_dict(nnx.state(model)))


class Two(nnx.Module):
    def __init__(self) -> None:
        self.a, self.b, self.c = nnx.Param(jnp.ones(2)), nnx.Param(jnp.zeros(2)), nnx.BatchStat(jnp.ones(2))


def swap(two: Any) -> None:
    two.a[...], two.b[...] = two.b[...], two.a[...]


def leave(two: Any) -> None:
    two.a[...] = two.a[...]


def add(two: Any) -> None:
    two.c[...] = two.c[...] + 0 * two.a[...]


def repeat(two: Any) -> None:
    two.c[...] = jax.lax.scan(lambda c, _: (-c, None), two.c[...], None, length=2)[0]


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit, nnx.remat, lambda f: nnx.remat(nnx.jit(f))])
@pytest.mark.parametrize(("fun", "kept"), [(swap, "c"), (leave, "abc"), (add, "ab"), (repeat, "ab")])
def test_an_array_passes_through_if_the_program_returns_it(wrap: Any, fun: Any, kept: str) -> None:
    arguments = split_tree((None, ({"two": Two()}, "text", 3), {"other": Two()}))
    unchanged = passing_through(lambda _, tree, text, number, other: wrap(fun)(tree["two"]), arguments)
    assert unchanged == [set(kept), set("abc")]


def test_structures_are_equal_for_one_architecture() -> None:
    first, second = (split_tree(nnx.Linear(2, 3, rngs=nnx.Rngs(seed))).structure for seed in (0, 1))
    other = split_tree(nnx.Linear(2, 4, rngs=nnx.Rngs(0))).structure
    assert first == second
    assert hash(first) == hash(second)
    assert first != other
    assert repr(first) == "Linear"


def test_partials_are_equal_by_value() -> None:
    def of(*args: Any, **keywords: Any) -> Any:
        return by_value(partial(nnx.gelu, *args, **keywords))

    assert of(approximate=False) == of(approximate=False)
    assert hash(of(approximate=False)) == hash(of(approximate=False))
    assert by_value((partial(of, 1), "a")) == by_value((partial(of, 1), "a"))
    assert of(x=partial(of, 1)) == of(x=partial(of, 1))
    for other in (of(approximate=True), of(approximate=0), of(False), of(), by_value(partial(nnx.relu))):
        assert of(approximate=False) != other
    assert of([1]) != of([1])  # not hashable, so compared by identity
    assert by_value("a") == "a"


def test_structures_with_equal_partials_are_equal() -> None:
    first, second = (
        split(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), partial(nnx.gelu, approximate=False))).structure
        for _ in range(2)
    )
    other = split(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), partial(nnx.gelu, approximate=True))).structure
    assert first == second
    assert hash(first) == hash(second)
    assert first != other


def test_a_copied_structure_is_equal() -> None:
    structure = split(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)).structure
    for again in (copy.copy(structure), copy.deepcopy(structure)):
        assert again == structure
        assert hash(again) == hash(structure)
    parts = split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    again = pickle.loads(pickle.dumps(parts))
    assert jax.tree.structure(again) == jax.tree.structure(parts)
    assert isinstance(again.merge(), nnx.Linear)


class Holder(nnx.Module):
    """A module with something else inside."""

    def __init__(self, inner: Any) -> None:
        self.inner = nnx.data({"a": [inner]})
        self.out = nnx.Linear(2, 1, rngs=nnx.Rngs(0))


def test_an_ensemble_inside_a_module_is_refused() -> None:
    # Flax finds no variables in it: it would have no gradient, and nothing would train it.
    ens = Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 4, seed=0)
    functional = Ensemble.from_apply(lambda v, x: v["w"] * x, [{"w": np.ones(2)}])[0]
    loss = lambda model, *_: model.out(jnp.ones(2)).sum()
    x = np.ones((3, 2), np.float32)
    for inner, remedy in ((ens, "stacked module"), (functional, "pass it as an argument of its own")):
        model = Holder(inner)
        what = rf"^`inner\.a\.0` of Holder is of the class {type(inner).__name__}, in which Flax finds .*{remedy}"
        for met in (
            lambda model: grad(loss)(model),
            lambda model: per_sample_grad(loss)(model, x),
            lambda model: clipped_grad(loss, l2_clip_norm=1.0)(model, x),
            lambda model: vmap(loss, (None, 0))(model, x),
            lambda model: Ensemble.stack([model]),
            lambda model: Ensemble.create(lambda rngs: nnx.clone(model), 2, seed=0),
            lambda model: freeze(model, nnx.Linear),
            lambda model: save_params("unused.safetensors", model),
        ):
            with pytest.raises(TypeError, match=what):
                met(model)


class Stacked(nnx.Module):
    """The remedy: members as one stacked module, and a layer on top."""

    def __init__(self, ensemble: Any) -> None:
        self.members = jax.tree.map(lambda *x: jnp.stack(x), *ensemble)
        self.out = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.out(vmap(lambda member, x: member(x), (0, None))(self.members, x))


def test_members_train_as_one_stacked_module() -> None:
    ens = Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 4, seed=0)
    model, x = Stacked(ens), np.ones((5, 3), np.float32)
    np.testing.assert_allclose(model(x), model.out(ens(x)), rtol=1e-5)
    gradient = grad(lambda model, x: model(x).sum())(model, x)
    bias: Any = ens[2].bias
    expected = jax.grad(lambda kernel: model.out(x @ kernel + bias[...]).sum())(ens[2].kernel[...])
    np.testing.assert_allclose(gradient["members"]["kernel"][...][2], expected, rtol=1e-5)
