"""`clipped_grad` as a replacement for `jax_privacy.clipped_grad`: arguments, results, errors, and its tools."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import dp_accounting
import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
import pytest
from jax_privacy.experimental import execution_plan

from plurax.transforms import clipped_grad, privacy

pytestmark = [
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning"),  # in jax-privacy
    pytest.mark.smoke,
]

METHODS = ("vmap", "ghost", "book_keeping")
RELATIONS = list(dp_accounting.NeighboringRelation)
X = np.sin(np.arange(24.0)).reshape(6, 4).astype(np.float32)
Y = np.array([0, 2, 1, 1, 0, 2])
PARAMS = {"w": np.cos(np.arange(12.0)).reshape(4, 3).astype(np.float32), "b": np.array([0.1, -0.2, 0.3], np.float32)}
HALF = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), PARAMS)
PADDED = np.arange(6) % 3 == 1
EVERY = {"return_values": True, "return_grad_norms": True}


def loss(params: Any, x: Any, y: Any) -> Any:
    """The mean cross-entropy of a batch."""
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def scaled(params: Any, x: Any, y: Any, scale: Any) -> Any:
    return jnp.sum(loss(params, x, y) * scale)


def data_first(batch: Any, params: Any) -> Any:
    return loss(params, batch["x"], *batch["rest"])


def with_aux(params: Any, x: Any, y: Any) -> Any:
    logits = x @ params["w"]
    return loss(params, x, y), {"logits": logits, "first": logits[0, :1], "mean": logits.mean(), "x": (x, x[None])}


def of_one(params: Any, x: Any, y: Any) -> Any:
    assert x.ndim == 1
    return loss(params, x[None], y[None])


def aux_of_one(params: Any, x: Any, y: Any) -> Any:
    return of_one(params, x, y), {"x": x[:1], "y": y, "rows": x[None]}


def by_keyword(params: Any, x: Any, *, y: Any, weight: Any) -> Any:
    return loss(params, x, y[None]) * weight["of"] + jnp.sum(params["b"] * weight["on"])


def noisy(params: Any, x: Any, key: Any) -> Any:
    noise = (jax.random.key_data(key) % 1000).astype(jnp.float32) / 1000
    return jnp.sum(params["w"][:2] * noise[:, None]) * x[0, 0] + jnp.sum(params["b"]) * noise[0]


def noisier(params: Any, x: Any, keys: Any) -> Any:
    return noisy(params, x, keys["a"]) + noisy(params, x, keys["b"][1])


def twice(gradient: Any) -> Any:
    return {"twice": 2 * gradient["w"], "and": [gradient["b"][:2]]}


class Case(NamedTuple):
    """A loss, its arguments, and options of `clipped_grad`."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tolerance: float
    options: dict[str, Any]


def case(
    fun: Callable[..., Any] = loss,
    args: tuple[Any, ...] = (PARAMS, X, Y),
    kwargs: Any = None,
    tolerance: float = 1e-5,
    **options: Any,
) -> Case:
    return Case(fun, args, kwargs or {}, tolerance, {"l2_clip_norm": 1.37, "batch_argnums": (1, 2), **options})


GROUPS = (PARAMS, X.reshape(3, 2, 4), Y.reshape(3, 2))
KEY, KEYS = jax.random.key(3), {"a": jax.random.key(0), "b": (jax.random.key(1), jax.random.key(2))}
BY_KEYWORD = {"y": Y, "weight": {"of": np.linspace(0.5, 2, 6, dtype=np.float32), "on": X[:, :3]}}

CASES: dict[str, Case] = {
    "values and norms": case(**EVERY),
    "an integer bound below some norms": case(l2_clip_norm=1, return_values=True),
    "an array bound above all norms": case(l2_clip_norm=jnp.float32(10), return_grad_norms=True),
    "normalized": case(normalize_by=6),
    "rescaled and normalized": case(rescale_to_unit_norm=True, normalize_by=0.25),
    # Arguments and transforms.
    "several arguments": case(scaled, (PARAMS, X, Y, np.float32(0.7)), argnums=(3, 0), **EVERY),
    "one in a tuple": case(argnums=(0,)),
    "a number": case(scaled, (PARAMS, X, Y, 2.5), argnums=3, **EVERY),
    "the second one": case(data_first, ({"x": X, "rest": [Y]}, PARAMS), argnums=1, batch_argnums=0, **EVERY),
    "complex parameters": case(
        lambda p, x, y: jnp.abs(jnp.sum(p["c"] * x) + 1j) + jnp.sum(jnp.cos(p["c"]).imag * p["r"]),
        ({"c": jnp.exp(1j * jnp.arange(4.0)), "r": np.ones(4, np.float32)}, X, Y),
        **EVERY,
    ),
    "an empty leaf": case(args=({**PARAMS, "n": None, "e": np.ones((0, 2), np.float32)}, X, Y)),
    "parameters without data": case(lambda p, x, y: jnp.sum(p["w"]) * jnp.sum(x), **EVERY),
    "a transform": case(pre_clipping_transform=lambda g: jax.tree.map(jnp.sin, g), microbatch_size=2, **EVERY),
    "a transform to another structure": case(pre_clipping_transform=twice, **EVERY),
    "a transform of several arguments": case(
        scaled,
        (PARAMS, X, Y, 0.7),
        argnums=(0, 3),
        pre_clipping_transform=lambda g: (g[1], g[0]["b"]),
        normalize_by=3.0,
    ),
    "a transform to an empty tree": case(pre_clipping_transform=lambda g: {}, **EVERY),
    "a transform to None": case(pre_clipping_transform=lambda g: None, **EVERY),
    # Auxiliary outputs and batch arguments.
    "auxiliary arrays": case(with_aux, has_aux=True, microbatch_size=2, **EVERY),
    "auxiliary numbers": case(
        lambda p, x, y: (loss(p, x, y), {"n": 3, "f": 0.5, "of": np.arange(2), "j": jnp.arange(3), "none": None}),
        has_aux=True,
    ),
    "without an axis": case(of_one, keep_batch_dim=False, **EVERY),
    "auxiliary arrays without an axis": case(aux_of_one, has_aux=True, keep_batch_dim=False),
    "groups": case(args=GROUPS, keep_batch_dim=False, l2_clip_norm=0.5, **EVERY),
    "groups of samples": case(lambda p, x, y: loss(p, x[0], y[0]), GROUPS, l2_clip_norm=0.5, microbatch_size=1),
    "one sample": case(args=(PARAMS, X[:1], Y[:1]), **EVERY),
    "keywords": case(by_keyword, (PARAMS, X), BY_KEYWORD, batch_argnums=1, microbatch_size=2, **EVERY),
    "padding": case(kwargs={"is_padding_example": PADDED}, **EVERY),
    "padding in microbatches": case(kwargs={"is_padding_example": PADDED}, microbatch_size=2),
    "padding without an axis": case(
        of_one, kwargs={"is_padding_example": PADDED}, keep_batch_dim=False, nan_safe=False
    ),
    # Keys, microbatches and other options.
    "a key": case(noisy, (PARAMS, X, KEY), batch_argnums=1, prng_argnum=2, **EVERY),
    "a key in microbatches": case(noisy, (PARAMS, X, KEY), batch_argnums=1, prng_argnum=2, microbatch_size=2, **EVERY),
    "a legacy key": case(noisy, (PARAMS, X, jax.random.PRNGKey(3)), batch_argnums=1, prng_argnum=-1),
    "keys": case(noisier, (PARAMS, X, KEYS), batch_argnums=1, prng_argnum=2),
    "a shared key": case(noisy, (PARAMS, X, KEY), batch_argnums=1),
    "nan_safe=False without NaN": case(nan_safe=False, microbatch_size=6, **EVERY),
    "spmd_axis_name": case(spmd_axis_name="data", microbatch_size=3),
    "a sum in low precision": case(dtype=jnp.bfloat16, tolerance=2e-2, **EVERY),
    "a low-precision sum in microbatches": case(
        dtype="float16", tolerance=2e-3, microbatch_size=2, rescale_to_unit_norm=True
    ),
    "a high-precision sum of low-precision gradients": case(args=(HALF, X, Y), dtype=jnp.float32, tolerance=2e-2),
    "low-precision gradients": case(args=(HALF, X, Y), tolerance=2e-2, normalize_by=6.0),
}


def method_of(number: int, options: dict[str, Any]) -> str:
    """Return a supported method, alternating; test_clipped.py compares them."""
    if "pre_clipping_transform" in options:
        return ("vmap", "auto")[number % 2]
    return ("book_keeping", "vmap", "ghost" if "dtype" not in options else "auto")[number % 3]


def jitted(of: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call under `jit`; other arguments stay concrete, as a float is not an array."""
    return jax.jit(lambda kwargs: of(*args, **kwargs))(kwargs)


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Assert the same structure, shapes, dtypes and values; an `Aux` of either library counts as the same type."""
    as_tuples = lambda tree: (tree[0], tuple(tree[1])) if type(tree) is tuple and has_fields(tree[-1]) else tree
    actual, expected = as_tuples(actual), as_tuples(expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


def has_fields(x: Any) -> bool:
    return getattr(x, "_fields", None) == ("values", "grad_norms", "aux")


def test_the_helper_detects_differences() -> None:
    one = (jnp.ones(2), jax_privacy.clipping.AuxiliaryOutput(jnp.ones(3), None, None))
    assert_same(one, one)
    for other in (
        (1.001 * one[0], one[1]),
        (one[0].astype(jnp.bfloat16), one[1]),
        (one[0], one[1]._replace(values=None)),
        (one[0], one[1]._replace(values=None, aux=one[1].values)),
        one[0],
    ):
        with pytest.raises(AssertionError):
            assert_same(other, one)


def described(parameters: Any) -> list[Any]:
    return [(p.name, p.kind, p.default) for p in parameters.values()]


# Keyword arguments that the installed jax-privacy does not have; its development version has `grid_scale`.
OURS = {"method": "auto", "memory_budget": None, "automatic": None, "grid_scale": None}


@pytest.mark.parametrize("name", ["clipped_grad", "clipped_fun"])
def test_the_signature_is_the_same(name: str) -> None:
    ours = dict(inspect.signature(getattr(privacy, name)).parameters)
    theirs = inspect.signature(getattr(jax_privacy.clipping, name)).parameters
    more = {key: ours.pop(key) for key in [*ours] if key not in theirs}
    assert all(OURS[key] == x.default and x.kind == x.KEYWORD_ONLY for key, x in more.items())
    if name == "clipped_grad":
        assert more.keys() == OURS.keys()
        identity = theirs["pre_clipping_transform"].default
        assert identity("anything") == "anything"
        ours["pre_clipping_transform"] = ours["pre_clipping_transform"].replace(default=identity)  # None in ours
    assert described(ours) == described(theirs)


@pytest.mark.parametrize(
    ("name", "method"), [(name, method_of(number, case.options)) for number, (name, case) in enumerate(CASES.items())]
)
def test_the_results_are_the_same(name: str, method: str) -> None:
    fun, args, kwargs, tolerance, options = CASES[name]
    of, theirs = clipped_grad(fun, **options, method=method), jax_privacy.clipped_grad(fun, **options)
    found, expected = jitted(lambda *args, **kwargs: (of(*args, **kwargs), theirs(*args, **kwargs)), args, kwargs)
    assert of.has_aux == theirs.has_aux == (type(expected) is tuple and has_fields(expected[-1]))
    assert_same(found, expected, tolerance)


def of_each_method(**options: Any) -> list[Any]:
    """Return jax-privacy's `clipped_grad` of `loss`, followed by ours for each method."""
    options = {"l2_clip_norm": 1.37, "batch_argnums": (1, 2), **options}
    return [jax_privacy.clipped_grad(loss, **options), *(clipped_grad(loss, **options, method=m) for m in METHODS)]


@pytest.mark.parametrize("rescale", [False, True])
def test_every_bound_means_the_same(rescale: bool) -> None:
    """Bounds may also be traced, and then negative."""

    def sums(bound: Any) -> Any:
        every = of_each_method(l2_clip_norm=bound, rescale_to_unit_norm=rescale, normalize_by=2.0)
        return [(of(PARAMS, X, Y), jnp.asarray(of.sensitivity())) for of in every]

    bounds = np.array([-1.0, 0.0, 0.01, 0.7, 1.37, 10.0, np.inf], np.float32)
    expected, *found = jax.jit(jax.vmap(sums))(bounds)
    for each in found:
        assert_same(each, expected)


def test_its_derivatives_are_the_same() -> None:
    def derivative(of: Any) -> Any:
        return jax.grad(lambda p: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(of(p, X, Y))))(PARAMS)

    expected, *found = jax.jit(lambda: [derivative(of) for of in of_each_method()])()
    for each in found:
        assert_same(each, expected, 1e-4)


def test_padding_is_excluded_as_in_jax_privacy() -> None:
    """Padding has the values and norms of its data; jax-privacy gives zeros for microbatches of padding only."""
    padding = np.arange(6) % 2 == 1
    every = of_each_method(microbatch_size=3, **EVERY)
    (total, there), *found = jax.jit(lambda: [of(PARAMS, X, Y, is_padding_example=padding) for of in every])()
    (_, of_all) = jitted(
        jax_privacy.clipped_grad(loss, l2_clip_norm=1.37, batch_argnums=(1, 2), **EVERY), (PARAMS, X, Y), {}
    )
    assert there.values[padding].tolist() == [0, 0, 0]
    for sums, aux in found:
        assert_same(sums, total)
        for mine, theirs, without_padding in zip(aux[:2], there[:2], of_all[:2], strict=True):
            assert_same(mine[~padding], theirs[~padding])
            assert_same(mine, without_padding)


def test_non_finite_gradients_are_excluded_as_a_whole() -> None:
    """A gradient with a non-finite entry is left out as a whole; jax-privacy zeroes only that entry."""
    fun = lambda p, x: jnp.sum(p["w"] * x[0, 0]) + jnp.sum(p["b"] * x[0, 1:])
    broken = X.copy()
    broken[2, 0], broken[4, 0] = np.nan, np.inf
    whole = np.array([0, 1, 3, 5])

    def sums(of: Any, **options: Any) -> Any:
        of = partial(of, fun, l2_clip_norm=0.7, **options)
        # In the last case the entries are finite and the norm is not: it contributes nothing in both libraries.
        first = of()(PARAMS, X[whole]), of(return_grad_norms=True)(PARAMS, broken), of(nan_safe=False)(PARAMS, broken)
        return *first, of()(PARAMS, 1e20 * X)

    ways = [jax_privacy.clipped_grad, *(partial(clipped_grad, method=method) for method in METHODS)]
    (without, (there, _), loose_there, overflown), *found = jax.jit(lambda: [sums(of) for of in ways])()
    zeroed = np.where(np.isfinite(broken), broken, 0)
    assert_same(there, jitted(jax_privacy.clipped_grad(fun, l2_clip_norm=0.7), (PARAMS, zeroed), {}))
    assert float(jnp.abs(without["b"] - there["b"]).max()) > 0.1
    assert np.isnan(loose_there["w"]).all()
    assert np.isfinite(loose_there["b"]).all()
    for mine, (left_out, aux), loose, overflowing in found:
        assert_same(mine, without)
        assert_same(left_out, without)
        assert np.isfinite(aux.grad_norms).tolist() == [i in whole for i in range(6)]
        assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(loose))
        assert_same(overflowing, overflown)


@pytest.mark.parametrize("method", [*METHODS, "auto"])
def test_an_empty_batch_sums_to_zero(method: str) -> None:
    """Poisson sampling may give one; jax-privacy raises an error."""
    options = {"l2_clip_norm": 1.0, "batch_argnums": (1, 2), **EVERY}
    with pytest.raises(ValueError, match="must be positive"):
        jax.eval_shape(jax_privacy.clipped_grad(loss, **options), PARAMS, X[:0], Y[:0])
    found, aux = jitted(clipped_grad(loss, **options, method=method), (PARAMS, X[:0], Y[:0]), {})
    assert_same(found, jax.tree.map(jnp.zeros_like, PARAMS))
    assert aux.values.shape == aux.grad_norms.shape == (0,)


OPTIONS: list[dict[str, Any]] = [
    {"l2_clip_norm": 2.0},
    {"l2_clip_norm": 3},
    {"l2_clip_norm": 2.0, "rescale_to_unit_norm": True, "has_aux": True},
    {"l2_clip_norm": 2.0, "normalize_by": 8, "return_values": True},
    {"l2_clip_norm": 0.0, "normalize_by": 8.0, "rescale_to_unit_norm": True, "return_grad_norms": True},
    {"l2_clip_norm": np.inf},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results_have_the_same_attributes(options: dict[str, Any]) -> None:
    ours, theirs = clipped_grad(loss, **options), jax_privacy.clipped_grad(loss, **options)
    assert (ours.has_aux, ours.l2_norm_bound) == (theirs.has_aux, theirs.l2_norm_bound)
    assert ours.sensitivity() == theirs.sensitivity()
    for relation in RELATIONS:
        assert ours.sensitivity(relation) == theirs.sensitivity(neighboring_relation=relation)
        assert type(ours.sensitivity(relation)) is type(theirs.sensitivity(relation))
        assert ours.sensitivity(neighboring_relation=relation) == ours.sensitivity(relation)
    for of in (ours, theirs):
        with pytest.raises(ValueError, match="neighboring_relation must be|Unsupported"):
            of.sensitivity("ADD_OR_REMOVE_ONE")
    fields = {field.name for field in dataclasses.fields(theirs)}
    assert fields == {"fun", "l2_norm_bound", "has_aux"}
    assert fields <= {field.name for field in dataclasses.fields(ours)}
    assert dataclasses.replace(ours, l2_norm_bound=7.0).sensitivity() == 7.0


# Wrong usage: the loss, its arguments, options, and keyword arguments.
Wrong = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], dict[str, Any]]


def wrong(fun: Any = loss, args: Any = (PARAMS, X, Y), kwargs: Any = None, **options: Any) -> Wrong:
    return fun, args, {"l2_clip_norm": 1.0, "batch_argnums": (1, 2), **options}, kwargs or {}


def error_of(of: Any, fun: Any, args: tuple[Any, ...], options: dict[str, Any], kwargs: dict[str, Any]) -> type | None:
    """Return the type of the error from making or calling the function."""
    try:
        jax.eval_shape(lambda: as_leaves(of(fun, **options)(*args, **kwargs)))
    except Exception as error:
        return type(error)
    return None


def as_leaves(tree: Any) -> Any:
    return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]


REFUSED_BY_BOTH: dict[str, Wrong] = {
    "argnums empty": wrong(argnums=()),
    "argnums negative": wrong(argnums=-1),
    "argnums not an int": wrong(argnums=1.0),
    "argnums None": wrong(argnums=None),
    "batch_argnums empty": wrong(batch_argnums=()),
    "batch_argnums negative": wrong(batch_argnums=-2),
    "batch_argnums not an int": wrong(batch_argnums="1"),
    "argnums and batch_argnums overlap": wrong(argnums=(0, 1)),
    "the bound negative": wrong(l2_clip_norm=-1.0),
    "the bound a negative integer": wrong(l2_clip_norm=-1),
    "the bound a negative NumPy number": wrong(l2_clip_norm=np.float32(-1.0)),
    "the bound None": wrong(l2_clip_norm=None),
    "normalize_by zero": wrong(normalize_by=0.0),
    "normalize_by negative": wrong(normalize_by=-1),
    "normalize_by None": wrong(normalize_by=None),
    "microbatch_size not an int": wrong(microbatch_size=2.0),
    "prng_argnum not a key": wrong(noisy, (PARAMS, X, 3), batch_argnums=1, prng_argnum=2),
    "prng_argnum with keys": wrong(noisy, (PARAMS, X, jax.random.split(KEY, 6)), batch_argnums=1, prng_argnum=2),
    "unknown dtype": wrong(dtype="floatish"),
    "a transform that is not callable": wrong(pre_clipping_transform=3),
    "different batch sizes": wrong(args=(PARAMS, X, Y[:5])),
    "an argument without an axis": wrong(args=(PARAMS, X, np.int32(3))),
    "a batch that is a number": wrong(args=(PARAMS, X, 3)),
    "a missing batch": wrong(of_one, (PARAMS, X), keep_batch_dim=False),
    "an extra argument": wrong(args=(PARAMS, X, Y, Y)),
    "an unknown keyword": wrong(kwargs={"z": X}),
    "a keyword of another size": wrong(by_keyword, (PARAMS, X), {**BY_KEYWORD, "y": Y[:5]}, batch_argnums=1),
    "a keyword without an axis": wrong(
        by_keyword, (PARAMS, X), {"y": Y, "weight": {"of": 2.0, "on": X[:, :3]}}, batch_argnums=1
    ),
    "padding of another size": wrong(kwargs={"is_padding_example": np.zeros(5, bool)}),
    "not a scalar": wrong(lambda p, x, y: x @ p["w"]),
    "an array with one entry": wrong(lambda p, x, y: loss(p, x, y)[None]),
    "an integer": wrong(lambda p, x, y: 3),
    "a complex number": wrong(lambda p, x, y: loss(p, x, y) * 1j),
    "nothing": wrong(lambda p, x, y: None),
    "a pair without has_aux": wrong(with_aux),
    "not a pair": wrong(has_aux=True),
    "three": wrong(lambda p, x, y: (loss(p, x, y), 1, 2), has_aux=True),
}


@pytest.mark.parametrize("name", REFUSED_BY_BOTH)
def test_common_errors_have_the_same_type(name: str) -> None:
    assert error_of(jax_privacy.clipped_grad, *REFUSED_BY_BOTH[name]) in (TypeError, ValueError, IndexError)
    assert error_of(clipped_grad, *REFUSED_BY_BOTH[name]) is error_of(jax_privacy.clipped_grad, *REFUSED_BY_BOTH[name])


def test_a_missing_bound_is_a_type_error() -> None:
    for of in (clipped_grad, jax_privacy.clipped_grad):
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'l2_clip_norm'"):
            of(loss)  # type: ignore[call-arg]  # tests the missing argument


# jax-privacy fails late on these, with incidental errors; ours name the problem and have the documented types.
REFUSED_OTHERWISE: dict[str, tuple[Wrong, type | None, type | None]] = {
    "microbatch_size does not divide": (wrong(microbatch_size=4), TypeError, ValueError),
    "microbatch_size zero": (wrong(microbatch_size=0), ZeroDivisionError, ValueError),
    "microbatch_size negative": (wrong(microbatch_size=-1), TypeError, ValueError),
    "argnums out of range": (wrong(argnums=5), TypeError, ValueError),
    "argnums twice": (
        wrong(argnums=(0, 0)),
        TypeError if jax.__version_info__ >= (0, 10, 2) else StopIteration,
        ValueError,
    ),
    "batch_argnums out of range": (wrong(batch_argnums=(1, 5)), IndexError, ValueError),
    "batch_argnums None": (wrong(batch_argnums=None), ValueError, TypeError),
    "prng_argnum out of range": (wrong(prng_argnum=3), IndexError, ValueError),
    "a batch by keyword": (wrong(args=(PARAMS, X), kwargs={"y": Y}), IndexError, ValueError),
    "a string in the batch": (wrong(args=(PARAMS, X, "abc")), TypeError, ValueError),
    "a keyword that is not an array": (
        wrong(lambda p, x, mode: jnp.sum(p["b"]), (PARAMS, X), {"mode": "a"}, batch_argnums=1),
        TypeError,
        ValueError,
    ),
    "not an array": (wrong(lambda p, x, y: jnp.sum(p["b"]), (PARAMS, None, None)), IndexError, ValueError),
    "padding of another rank": (wrong(kwargs={"is_padding_example": np.zeros((6, 1), bool)}), TypeError, ValueError),
    "padding of floats": (wrong(kwargs={"is_padding_example": np.zeros(6)}), TypeError, ValueError),
}
# Accepted by jax-privacy and refused by ours, and the reverse.
REFUSED_HERE: dict[str, Wrong] = {
    "the bound NaN": wrong(l2_clip_norm=np.nan),
    "normalize_by NaN": wrong(normalize_by=np.nan),
    "batch_argnums twice": wrong(batch_argnums=(1, 1)),
    "a dtype of integers": wrong(dtype=jnp.int32),
    "padding of integers": wrong(kwargs={"is_padding_example": np.zeros(6, int)}),
}
REFUSED_THERE: dict[str, Wrong] = {
    "integer parameters": wrong(args=({"w": np.ones((4, 3), int), "b": PARAMS["b"]}, X, Y)),
    "argnums a list": wrong(argnums=[0]),
    "batch_argnums a list": wrong(batch_argnums=[1, 2]),
    "argnums a NumPy integer": wrong(argnums=np.int64(0)),
    "microbatch_size larger than the batch": wrong(microbatch_size=8),
    "transform None": wrong(pre_clipping_transform=None),
    "padding as a list": wrong(kwargs={"is_padding_example": [False] * 6}),
    "a batch whose first argument is empty": wrong(lambda p, x, y: jnp.sum(p["b"]) * y[0], (PARAMS, None, Y)),
    "a string as auxiliary output": wrong(lambda p, x, y: (loss(p, x, y), "aux"), has_aux=True),
}


@pytest.mark.parametrize("name", REFUSED_OTHERWISE)
def test_errors_with_another_type(name: str) -> None:
    case, theirs, ours = REFUSED_OTHERWISE[name]
    assert error_of(jax_privacy.clipped_grad, *case) is theirs
    assert error_of(clipped_grad, *case) is ours


@pytest.mark.parametrize("name", REFUSED_HERE)
def test_usage_that_only_plurax_refuses(name: str) -> None:
    assert error_of(jax_privacy.clipped_grad, *REFUSED_HERE[name]) is None
    assert error_of(clipped_grad, *REFUSED_HERE[name]) in (TypeError, ValueError)


@pytest.mark.parametrize("name", REFUSED_THERE)
def test_usage_that_only_jax_privacy_refuses(name: str) -> None:
    assert error_of(jax_privacy.clipped_grad, *REFUSED_THERE[name]) in (TypeError, AttributeError, IndexError)
    assert error_of(clipped_grad, *REFUSED_THERE[name]) is None


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_may_be_a_number(method: str) -> None:
    constant = lambda p, x, y: 2.0
    options = {"l2_clip_norm": 1.0, "batch_argnums": (1, 2), **EVERY}
    expected = jitted(jax_privacy.clipped_grad(constant, **options), (PARAMS, X, Y), {})
    assert_same(jitted(clipped_grad(constant, **options, method=method), (PARAMS, X, Y), {}), expected)


def test_noise_is_added_to_it() -> None:
    def noised(of: Any) -> Any:
        of = of(loss, l2_clip_norm=0.5, normalize_by=6.0, batch_argnums=(1, 2))
        privatizer = jax_privacy.noise_addition.gaussian_privatizer(stddev=1.1 * of.sensitivity(), prng_key=7)
        return jax.jit(lambda: privatizer.update(of(PARAMS, X, Y), privatizer.init(PARAMS))[0])()

    ours = noised(clipped_grad)
    assert_same(ours, noised(jax_privacy.clipped_grad))
    assert float(optax.tree.norm(ours)) > 0.1


@pytest.mark.parametrize("relation", RELATIONS)
def test_an_accountant_accepts_its_sensitivity(relation: Any) -> None:
    accountant = dp_accounting.pld.PLDAccountant(relation)
    epsilon = {}
    for of in (clipped_grad, jax_privacy.clipped_grad):
        stddev = 6.0
        multiplier = stddev / of(loss, l2_clip_norm=2.0).sensitivity(accountant.neighboring_relation)
        event = dp_accounting.GaussianDpEvent(multiplier)
        epsilon[of] = dp_accounting.pld.PLDAccountant(relation).compose(event).get_epsilon(1e-5)
    assert epsilon[clipped_grad] == epsilon[jax_privacy.clipped_grad] > 0


def test_a_plan_trains_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train with jax-privacy's plan: sampling, padding, clipping, and correlated noise."""
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return clipped_grad(*args, **kwargs)

    def trained() -> Any:
        config = execution_plan.BandMFExecutionPlanConfig(
            iterations=4,
            strategy=np.array([1.0, 0.5]),
            epsilon=None,
            delta=None,
            noise_multiplier=0.3,
            l2_clip_norm=0.5,
            normalize_by=3.0,
            sampling_prob=0.8,
            noise_seed=5,
        )
        plan = config.plan
        gradient = plan.clipped_grad(loss, batch_argnums=(1, 2), has_aux=False)
        noise = plan.noise_addition_transform
        state, params = noise.init(PARAMS), PARAMS
        step = jax.jit(lambda params, x, y, padding: gradient(params, x, y, is_padding_example=padding))
        for indices in plan.batch_selection_strategy.batch_iterator(6, rng=np.random.default_rng(0)):
            (indices,) = jax_privacy.batch_selection.split_and_pad_global_batch(indices, 6)
            total = step(params, X[indices], Y[indices], indices == -1)
            noisy, state = noise.update(total, state)
            params = jax.tree.map(lambda p, g: p - 0.5 * g, params, noisy)
        return params

    theirs = trained()
    monkeypatch.setattr(jax_privacy.clipping, "clipped_grad", counted)
    assert_same(trained(), theirs)
    assert len(calls) == 2  # once for the sensitivity, once for the loss
    assert float(optax.tree.norm(jax.tree.map(jnp.subtract, theirs, PARAMS))) > 0.1


def test_a_trainer_of_the_newer_version_trains_with_it() -> None:
    """A stand-in for the step of jax-privacy's `DPTrainer` (2.2), which the installed version lacks: what it passes."""

    def trained(of: Any) -> Any:
        def step(params: Any, batch: Any, key: Any, padding: Any) -> Any:
            gradient = of(
                lambda params, batch, key: with_aux(params, *batch),
                has_aux=True,
                return_values=True,
                return_grad_norms=True,
                pre_clipping_transform=lambda gradients: gradients,  # of an optimizer without one
                prng_argnum=2,
                l2_clip_norm=0.5,
                normalize_by=3.0,
                rescale_to_unit_norm=True,
                dtype=np.float32,
                microbatch_size=None,
                spmd_axis_name=None,
                keep_batch_dim=True,
            )
            sums, aux = gradient(params, batch, key, is_padding_example=padding)
            return jax.tree.map(lambda p, g: p - 0.5 * g, params, sums), aux

        params, step = PARAMS, jax.jit(step)
        for number in range(3):
            params, aux = step(params, (X, Y), jax.random.key(number), np.arange(6) == number)
        return params, aux

    (ours, aux), (theirs, their_aux) = trained(clipped_grad), trained(jax_privacy.clipped_grad)
    assert_same(ours, theirs)
    assert_same(aux._asdict(), their_aux._asdict())


def test_a_transform_that_changes_nothing_does_not_need_each_gradient() -> None:
    usual = clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2)).explain(PARAMS, X, Y)
    of = clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), pre_clipping_transform=lambda g: dict(g))
    assert of.explain(PARAMS, X, Y) == usual

    def of_name(path: Any, x: Any) -> Any:
        return jnp.zeros_like(x) if "b" in jax.tree_util.keystr(path) else x

    transforms = (
        lambda g: jax.tree.map(jnp.negative, g),
        lambda g: [g],
        lambda g: {"w": g["b"], "b": g["w"]},
        lambda g: {"w": g["w"]},
        lambda g: jax.tree.map(lambda x: 2 * x if isinstance(x, jax.Array) else x, g),
        lambda g: jax.tree.map_with_path(of_name, g),
    )
    for transform in transforms:
        of = clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), pre_clipping_transform=transform)
        assert of.explain(PARAMS, X, Y).why == "pre_clipping_transform needs each gradient"
