"""Arrays of many lengths, against the same function at each length."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.transforms.program import bucketed


def mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, x, 0).sum() / mask.sum()


class Compilations:
    """Count the programs that XLA compiles while active."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> "Compilations":
        jax.monitoring.register_event_duration_secs_listener(self._count)
        return self

    def __exit__(self, *_: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self._count)

    def _count(self, event: str, *_: Any, **__: Any) -> None:
        self.number += event == "/jax/core/compile/backend_compile_duration"


def test_two_hundred_lengths_take_at_most_nine_compilations() -> None:
    lengths = np.random.default_rng(0).integers(1, 257, 200)
    of = bucketed(lambda x, mask: jnp.tanh(jnp.where(mask[:, None], x, 0)).sum(0), out_axes=None)
    each = bucketed(lambda x, mask: jnp.tanh(x), out_axes=0)
    data = np.random.default_rng(1).normal(size=(256, 3)).astype(np.float32)
    with Compilations() as compilations:
        for n in lengths:
            np.testing.assert_allclose(of(data[:n]), np.tanh(data[:n]).sum(0), rtol=1e-4, atol=1e-5)
    assert of.traces == compilations.number <= 9
    with Compilations() as compilations:
        for n in lengths:
            np.testing.assert_allclose(each(data[:n]), np.tanh(data[:n]), rtol=1e-5)
    assert each.traces == compilations.number <= 9


@pytest.mark.parametrize(
    ("sizes", "length", "size"),
    [
        ("pow2", 0, 1),
        ("pow2", 1, 1),
        ("pow2", 5, 8),
        ("pow2", 8, 8),
        ("pow2", 9, 16),
        ((20, 10), 10, 10),
        ([10, 20], 11, 20),
    ],
)
def test_arrays_are_padded_to_the_next_size(sizes: Any, length: int, size: int) -> None:
    found = bucketed(lambda x, mask: (x, mask), sizes=sizes)(np.ones(length, np.float32))
    assert found[0].tolist() == [1.0] * length + [0.0] * (size - length)
    assert found[1].tolist() == [True] * length + [False] * (size - length)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_, jnp.bfloat16])
def test_any_axis_pytrees_and_dtypes(dtype: Any) -> None:
    def fun(scale: Any, batch: Any, mask: jax.Array, *, shift: Any) -> Any:
        assert mask.shape == (8,)
        assert batch["a"].shape == (2, 8)
        assert batch["a"].dtype == dtype
        return batch["a"], (batch["b"] + shift).T * scale

    of = bucketed(fun, axis=(None, {"a": 1, "b": -2}), out_axes=(1, -2))
    batch = {"a": np.arange(10).reshape(2, 5).astype(dtype), "b": jnp.ones((3, 5, 2))}
    a, b = of(2.0, batch, shift=jnp.ones(2))
    assert isinstance(a, np.ndarray)
    assert (a == batch["a"]).all()
    np.testing.assert_array_equal(b, np.full((2, 5, 3), 4.0))


def test_inside_of_other_transforms() -> None:
    of = bucketed(mean)
    x = jnp.arange(5.0)
    np.testing.assert_allclose(jax.grad(lambda x: of(x) ** 2)(x), jax.grad(lambda x: x.mean() ** 2)(x), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(of)(x), 2.0)
    np.testing.assert_allclose(jax.vmap(of)(jnp.ones((3, 5))), jnp.ones(3))
    each = bucketed(lambda x, mask: x**2, out_axes=0)
    np.testing.assert_allclose(jax.jacobian(each)(x), jnp.diag(2 * x))


class Net(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        self.seen[...] += mask.sum()
        return jnp.where(mask[:, None], self.dense(x), 0).sum(0)


@pytest.mark.parametrize("as_function", [True, False])
def test_modules_and_their_state(as_function: bool) -> None:
    model, x = Net(), np.ones((5, 3), np.float32)
    of = bucketed(model) if as_function else bucketed(lambda model, x, mask: model(x, mask), axis=(None, 0))
    for _ in range(2):
        out = of(x) if as_function else of(model, x)
        np.testing.assert_allclose(out, model.dense(x).sum(0), rtol=1e-5)
    assert (float(model.seen[...]), of.traces) == (10.0, 1)


def test_a_failing_call_changes_nothing() -> None:
    model = Net()
    with pytest.raises(ValueError, match="^bucketed: `output` is .*, without the padded size 8 along out_axes=0"):
        bucketed(model, out_axes=0)(np.ones((5, 3), np.float32))
    assert float(model.seen[...]) == 0.0


def test_a_changed_parameter_is_used() -> None:
    model, x = Net(), np.ones((5, 3), np.float32)
    of = bucketed(model)
    before = of(x)
    model.dense.kernel[...] *= 2
    assert not np.allclose(of(x), before)
    assert of.traces == 1


# Refusals.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"axis": "0"}, TypeError, "axis must hold ints and None, but got '0'"),
        ({"axis": True}, TypeError, "axis must hold ints and None, but got True"),
        ({"axis": (0, 1.5)}, TypeError, "axis must hold ints and None, but got 1.5"),
        ({"out_axes": "a"}, TypeError, "out_axes must hold ints and None, but got 'a'"),
        ({"sizes": "pow3"}, ValueError, "sizes must be \"pow2\" or a list of ints, at least one, but got 'pow3'"),
        ({"sizes": 8}, TypeError, 'sizes must be "pow2" or a list of ints, but got 8'),
        ({"sizes": []}, ValueError, r"sizes must be \"pow2\" or a list of ints, at least one, but got \[\]"),
        ({"sizes": [8, 0]}, ValueError, r"sizes\[1\] must be at least 1, but got 0"),
        ({"sizes": [8.0]}, TypeError, r"sizes\[0\] must be an int, but got 8.0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^bucketed: {message}"):
        bucketed(mean, **options)


def test_a_wrong_function_is_refused() -> None:
    with pytest.raises(TypeError, match="^bucketed: fun must be a function, a bound method or a module, but got 3"):
        bucketed(3)


@pytest.mark.parametrize(
    ("options", "args", "error", "message"),
    [
        (
            {"sizes": [2, 4]},
            (np.ones(5),),
            ValueError,
            r"length 5 is above the largest of sizes=\(2, 4\); add one",
        ),
        ({}, (np.ones(5), np.ones(6)), ValueError, "axis 0 of argument `x` has size 5, but axis 0 of argument `y` has"),
        ({"axis": 1}, (np.ones(5), np.ones(5)), ValueError, "argument `x` cannot be mapped over axis 1"),
        (
            {"axis": (0,)},
            (np.ones(5), np.ones(5)),
            ValueError,
            r"axis=\(0,\) is not a prefix of PyTreeDef.*or one int for all",
        ),
        ({"axis": (None, None)}, (np.ones(5), 1.0), ValueError, "axis selects no axis of any array in the call; pass"),
        ({}, ((), ()), ValueError, "axis selects no axis of any array in the call; pass one, or use jax.jit"),
        (
            {"axis": ({"a": 0}, 0)},
            (np.ones(5), np.ones(5)),
            ValueError,
            r"axis=\({'a': 0}, 0\) is not a prefix of PyTreeDef\(\(\*, \*\)\); use the same containers and keys",
        ),
        ({}, (Net(), np.ones(5)), TypeError, "`x` is a model, which cannot be padded; pass None for it in axis"),
        (
            {"axis": (0, 0)},
            (jax.random.split(jax.random.key(0), 5), np.ones(5)),
            TypeError,
            "`x` is an array of keys, which cannot be padded; pass None",
        ),
        ({"out_axes": (0, 0, 0)}, (np.ones(5), np.ones(5)), ValueError, r"out_axes=\(0, 0, 0\) is not a prefix of Py"),
        (
            {"out_axes": 1},
            (np.ones(5), np.ones(5)),
            ValueError,
            r"`output\[0\]` is an array of .*, without the padded size 8 along out_axes=1",
        ),
    ],
)
def test_wrong_arguments_are_refused(options: Any, args: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^bucketed: {message}"):
        bucketed(lambda x, y, mask: (x, y), **options)(*args)


def test_a_mask_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="^bucketed: mask must not be passed, since bucketed computes it"):
        bucketed(mean)(np.ones(3), mask=np.ones(3, bool))


# Regressions.


class Tied(nnx.Module):
    """One variable under two names."""

    def __init__(self) -> None:
        self.a = self.b = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.a[...] += 1
        self.b[...] += 1
        return x + self.a[...]


def test_variables_under_two_names_stay_shared() -> None:
    def fun(*args: Any, mask: jax.Array) -> jax.Array:
        model, x = (args[0]["m"], args[0]["x"]) if len(args) == 1 else args
        return model(x)

    x = np.ones(3, np.float32)
    for in_a_dict in (False, True):
        model = Tied()
        axis = ({"m": None, "x": 0},) if in_a_dict else (None, 0)
        out = bucketed(fun, axis=axis, out_axes=0)(*([{"m": model, "x": x}] if in_a_dict else [model, x]))
        assert out.tolist() == [3.0, 3.0, 3.0]
        assert float(model.a[...]) == 2.0


def test_a_model_in_a_dict_with_an_axis_is_named() -> None:
    with pytest.raises(TypeError, match=r"^bucketed: `d\['m'\]` is a model, which cannot"):
        bucketed(lambda d, mask: d["x"], axis=0)({"m": Tied(), "x": np.ones(3)})


def test_returned_keys_are_truncated() -> None:
    keys = bucketed(lambda x, mask: jax.random.split(jax.random.key(0), x.shape[0]), out_axes=0)(np.ones(3))
    assert keys.shape == (3,)


def test_a_module_under_another_transform_keeps_its_state() -> None:
    model, x = Net(), jnp.ones((4, 5, 3))
    expected = model.dense(x[0]).sum(0)
    from plurax.transforms.program import accumulate

    out = accumulate(lambda model, x: bucketed(lambda m, x, mask: m(x, mask), axis=(None, 0))(model, x[0]), 4)(model, x)
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    assert float(model.seen[...]) == 20.0


def test_arrays_stay_on_their_device() -> None:
    device = jax.devices()[0]
    out = bucketed(lambda x, mask: x)(jax.device_put(jnp.ones(3), device))
    assert out.devices() == {device}
    assert out.committed


def test_calls_after_the_first_are_checked_like_it() -> None:
    product = bucketed(lambda x, scale, mask: jnp.where(mask[:, None], x * scale[:, None], 0).sum(0))
    x, scale = np.ones((5, 3), np.float32), np.arange(5, dtype=np.float32)
    for given in ((x, scale), (x[:3], scale[:3]), (jnp.asarray(x), scale), (x.astype(np.int32), scale)):
        for _ in range(2):
            np.testing.assert_array_equal(product(*given), given[0].T @ given[1])
    for wrong, message in (((x, scale[:3]), "size"), ((x[0, 0], scale), "axis"), ((x, "scale"), "scale")):
        with pytest.raises((ValueError, TypeError), match=message):
            product(*wrong)
    np.testing.assert_array_equal(product(x, scale), x.T @ scale)
    both = bucketed(lambda x, y, mask: jnp.where(mask, x, 0).sum() + y, axis=(0, None))
    assert [float(both(x[:n, 0], y)) for n, y in ((2, 1), (4, 2.0), (4, 3))] == [3, 6, 7]


def test_a_model_after_an_array_is_split() -> None:
    fun = bucketed(lambda x, model, mask: (x * mask).sum() * model["scale"][...], axis=(0, None))
    assert float(fun(jnp.ones(3), {"scale": np.ones(2)})[0]) == 3
    assert float(fun(jnp.ones(3), {"scale": nnx.Param(jnp.full(2, 2.0))})[0]) == 6


def test_different_lengths_are_refused_alike_in_the_first_call_and_later() -> None:
    total = bucketed(lambda x, y, mask: x.sum() + y.sum(), sizes=[4])
    for _ in range(2):
        with pytest.raises(ValueError, match="size 5, but .* size 3"):
            total(np.ones(5), np.ones(3))
        assert float(total(np.ones(3), np.ones(3))) == 6
