"""`derivative`: Taylor mode where it is as accurate as nested forward mode, and nested forward mode elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from plurax.transforms import _taylor as taylor
from plurax.transforms import derivative, vmap

pytestmark = pytest.mark.smoke

X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
POINTS = np.array([-30.0, -2.0, -1.0, -0.5, -1e-8, 0.0, 1e-8, 1e-3, 0.3, 1.0, 2.0, 3.7, 30.0])


def nested(fun: Callable[[Any], Any], order: int) -> Callable[[Any], Any]:
    """The reference: `order` nested `jax.jvp` along ones."""
    for _ in range(order):
        fun = functools.partial(along_ones, fun)
    return fun


def along_ones(fun: Callable[[Any], Any], x: Any) -> Any:
    return jax.jvp(fun, (x,), (jax.tree.map(jnp.ones_like, x),))[1]


def assert_close(actual: Any, expected: Any, rtol: float = 1e-5) -> None:
    """Assert equal structures, shapes and dtypes; values to `rtol` of the largest, including infinities and NaN."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = np.max(np.abs(np.where(np.isfinite(b), b, 0)), initial=1e-3)
        chex.assert_trees_all_close(a, b, rtol=rtol, atol=rtol * scale)


def test_the_helper_detects_differences() -> None:
    with pytest.raises(AssertionError, match="close"):
        assert_close(jnp.ones(2), 1.01 * jnp.ones(2))
    with pytest.raises(AssertionError, match="dtype"):
        assert_close(jnp.ones(2), jnp.ones(2, jnp.bfloat16))
    with pytest.raises(AssertionError, match="close"):
        assert_close(jnp.array([1.0, np.inf]), jnp.array([1.0, np.nan]))


FIRST = taylor._FIRST


@pytest.fixture
def taylor_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Taylor mode for all orders."""
    monkeypatch.setattr(taylor, "_FIRST", 1)


@pytest.fixture(params=[1, FIRST], ids=["Taylor mode", "as by default"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Taylor mode for all orders, or for high ones."""
    monkeypatch.setattr(taylor, "_FIRST", request.param)


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch, taylor_first: None) -> list[str]:
    """Return the list of modes used by calls; Taylor mode serves all orders."""
    taken: list[str] = []
    for mode, name in ((taylor._taylor, "taylor"), (taylor._nested, "nested")):
        monkeypatch.setattr(taylor, mode.__name__, functools.partial(record, taken, name, mode))
    return taken


def record(taken: list[str], name: str, mode: Any, fun: Any, order: int, x: Any) -> Any:
    out = mode(fun, order, x)
    taken.append(name)  # not reached if Taylor mode raises
    return out


# Closed forms.


@pytest.mark.usefixtures("either")
def test_the_numbers_of_mindspore() -> None:
    exp_sin = lambda x: jnp.exp(jnp.sin(x))
    expected = [
        [[1.2533808, -1.0331168], [-1.1400385, -0.3066662]],
        [[-1.2748207, -1.8274734], [0.966121, 0.55551505]],
        [[-4.0515366, 3.6724353], [0.5053504, -0.52061415]],
    ]
    for order, numbers in enumerate(expected, 1):
        chex.assert_trees_all_close(derivative(exp_sin, order)(X), jnp.array(numbers), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("fun", "closed"),
    [
        pytest.param(jnp.sin, lambda x, n: np.sin(x + n * np.pi / 2), id="sin"),
        pytest.param(jnp.exp, lambda x, _: np.exp(x), id="exp"),
        pytest.param(lambda x: x**5, lambda x, n: [5, 20, 60, 120, 120][n - 1] * x ** (5 - n), id="x5"),
        pytest.param(jnp.log, lambda x, n: (-1.0) ** (n - 1) * [1, 1, 2, 6, 24][n - 1] / x**n, id="log"),
        pytest.param(lambda x: 1 / x, lambda x, n: (-1.0) ** n * [1, 2, 6, 24, 120][n - 1] / x ** (n + 1), id="1/x"),
    ],
)
def test_closed_forms(fun: Any, closed: Any) -> None:
    with jax.enable_x64(True):
        x = np.array([0.3, 1.7, 2.0])
        for order in range(1, 6):
            assert_close(derivative(fun, order)(x), jnp.asarray(closed(x, order)), 1e-13)


@pytest.mark.usefixtures("either")
def test_the_direction_is_one_in_every_leaf() -> None:
    fun = lambda p: {"sum": jnp.sum(p["a"] ** 2 * p["b"][0]), "row": p["a"] * p["b"][0]}
    tree = {"a": jnp.array([1.0, 2.0, 3.0]), "b": [2.0, None]}
    along = lambda t: fun({"a": tree["a"] + t, "b": [2.0 + t, None]})
    for order in (1, 2, 3):
        assert_close(derivative(fun, order)(tree), nested(along, order)(0.0))
    assert jax.tree.leaves(derivative(lambda p: {"a": None}, 2)(tree)) == []


# Every primitive, against nested forward mode.

ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    **{
        name: getattr(lax, name)
        for name in """
        abs acos acosh asin asinh atan atanh cbrt ceil cos cosh digamma erf erfc erf_inv exp exp2 expm1 floor is_finite
        lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh
        """.split()  # noqa: SIM905 (more readable than a list)
        if name != "is_finite"
    },
    "cube": lambda x: lax.integer_pow(x, 3),
    "seventh": lambda x: lax.integer_pow(x, 7) * x,
    "power-0": lambda x: lax.integer_pow(x, 0) * x,
    "power-minus-3": lambda x: lax.integer_pow(x, -3),
    "pow-2.0": lambda x: lax.pow(x, jnp.full_like(x, 2.0)),
    "pow-2.5": lambda x: lax.pow(x, jnp.full_like(x, 2.5)),
    "pow-of-2": lambda x: lax.pow(jnp.full_like(x, 2.0), x),
    "reciprocal": lambda x: 1 / x,
    "thirds": lambda x: x * x / 3.0,
    "rational": lambda x: x / (1 + x * x),
    "atan2-over": lambda x: lax.atan2(x, jnp.full_like(x, -2.0)),
    "atan2-under": lambda x: lax.atan2(jnp.full_like(x, 2.0), x),
    "max": lambda x: lax.max(x * x, x),
    "min": lambda x: lax.min(x * x, x),
    "clamp": lambda x: lax.clamp(-1.0, x, 1.0),
    "rem": lambda x: lax.rem(x, jnp.full_like(x, 2.0)),
    "rem-of-2": lambda x: lax.rem(jnp.full_like(x, 2.0), x),
    "where": lambda x: jnp.where((x > 0) & (x < 2) | ~(x != -1), x**3, jnp.sin(x)),
    "safe-log": lambda x: jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1)), 0),
    "through-integers": lambda x: x.astype(int).astype(x.dtype) * x,
    "through-narrow": lambda x: x.astype(jnp.bfloat16).astype(x.dtype) ** 2,
    "stop_gradient": lambda x: lax.stop_gradient(x) * x,
    "relu": jax.nn.relu,
    "softplus": jax.nn.softplus,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "sinc": jnp.sinc,
    "log2": jnp.log2,
    "polyval": lambda x: jnp.polyval(jnp.arange(1.0, 5), jnp.sin(x)) * x,
    # A primitive from jax 0.11 on.
    "one-minus-square": lambda x: getattr(lax, "one_minus_square", lambda x: 1 - x * x)(jnp.sin(x)) * x,
    "exp-sin": lambda x: jnp.exp(jnp.sin(x)),
    "erf-sin": lambda x: lax.erf(jnp.sin(x)),
    "logistic-sin": lambda x: lax.logistic(2 * jnp.sin(x)),
    "log-tanh": lambda x: jnp.log(jnp.abs(jnp.tanh(x))),
    "log-expm1": lambda x: jnp.log(jnp.abs(jnp.expm1(x))),
}


@pytest.mark.usefixtures("taylor_first")  # by default, low orders are nested
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions_are_those_of_nested_jvp(name: str) -> None:
    fun = ELEMENTWISE[name]
    orders = range(1, 6)
    with jax.enable_x64(True):
        both = jax.jit(lambda x: [(derivative(fun, order)(x), nested(fun, order)(x)) for order in orders])
        for actual, expected in both(POINTS):
            np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.usefixtures("either")
def test_no_digits_are_lost_at_small_arguments() -> None:
    for fun in (jnp.tanh, jnp.expm1, jnp.log1p, jnp.arcsinh, jnp.arctanh, jnp.sinh, lax.erf, jnp.sin):
        slope = derivative(lambda x, fun=fun: fun(x) ** 2 / 2, 1)(jnp.float32(1e-5))
        np.testing.assert_allclose(slope / derivative(fun, 1)(jnp.float32(0.0)) ** 2, 1e-5, rtol=2e-5)


EXACT: dict[str, Callable[[Any], Any]] = {  # of a (3, 4) array
    "add": lambda x: x + x,
    "add_any": lambda x: jax.grad(lambda y: jnp.sum(jnp.sin(y) * jnp.cos(y)))(x),
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x[:, None], (3, 2, 4)) ** 2,
    "complex": lambda x: jnp.real(lax.complex(x, x * x) ** 2),
    "concatenate": lambda x: jnp.concatenate([x, x * x], 1),
    "conj": lambda x: jnp.imag(lax.complex(x, x * x) * jnp.conj(lax.complex(x * x, x))),
    "conv_general_dilated": lambda x: lax.conv(x[None, None] ** 2, x[None, None, :2, :3], (1, 1), "SAME"),
    "convert_element_type": lambda x: (x.astype(complex) ** 2).real * x,
    "copy": lambda x: jnp.copy(x) ** 3,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "cumprod": lambda x: jnp.cumprod(x, 1),
    "cumsum": lambda x: jnp.cumsum(x**2, 0),
    "dot_general": lambda x: x @ jnp.sin(x.T),
    "dynamic_slice": lambda x: lax.dynamic_slice(x**2, (jnp.sum(x > 9), 1), (3, 2)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x**2, x[:2, :2] ** 3, (jnp.sum(x > 9), 1)),
    "erf": lax.erf,
    "exp": jnp.exp,
    "fft": lambda x: jnp.fft.fft(x**2).real,
    "imag": lambda x: jnp.imag(lax.complex(x, x * x) ** 2),
    "logistic": lax.logistic,
    "mul": lambda x: x * x * x,
    "neg": lambda x: -(x**2),
    "pad": lambda x: jnp.pad(x**2, ((1, 0), (0, 2)), constant_values=3.0),
    "real": lambda x: jnp.real(lax.complex(x, x * x) ** 2),
    "reduce_max": lambda x: jnp.max(jnp.sin(x), 1),
    "reduce_min": lambda x: jnp.min(x**2, (0, 1)),
    "reduce_sum": lambda x: jnp.sum(x**3, 0),
    "reduce_window_sum": lambda x: lax.reduce_window(x**2, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
    "reshape": lambda x: (x**2).reshape(2, 6),
    "rev": lambda x: x * x[::-1],
    "scatter-add": lambda x: (x**2).at[jnp.array([0, 2, 0])].add(x**3),
    "select_n": lambda x: jnp.where(x > 0, x**3, jnp.sin(x)),
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "slice": lambda x: x[1:, ::2] ** 2,
    "split": lambda x: lax.split(x**2, (1, 3), 1),
    "square": jnp.square,
    "squeeze": lambda x: jnp.squeeze(x[:, :1] ** 2),
    "stack": lambda x: jnp.stack([x, x**2]),
    "sub": lambda x: x**2 - x,
    "transpose": lambda x: (x**2).T,
    "unstack": lambda x: jnp.unstack(x**2),
}
GRID = np.array([[0.0, -1.0, 0.5, 2.0], [1.0, 1.0, -0.3, 0.0], [-2.0, 0.7, 0.7, 0.1]])


def names_in(jaxpr: Any) -> set[str]:
    """Return the primitives of a program and of nested programs."""
    inner = [getattr(x, "jaxpr", x) for eqn in jaxpr.eqns for x in eqn.params.values() if hasattr(x, "eqns")]
    return {eqn.primitive.name for eqn in jaxpr.eqns}.union(*map(names_in, inner))


@pytest.mark.parametrize("name", sorted(taylor._EXACT))
def test_trusted_rules_are_exact(name: str, modes: list[str]) -> None:
    fun = EXACT[name]
    with jax.enable_x64(True):
        if name not in {"split", "stack", "unstack"}:  # other primitives in some versions of JAX
            assert name in names_in(jax.make_jaxpr(fun)(GRID).jaxpr)
        for order in (1, 2, 5):
            functions = derivative(fun, order), derivative(jax.jit(fun), order), nested(fun, order)
            *actual, expected = jax.jit(lambda x, functions=functions: [f(x) for f in functions])(GRID)
            for values in actual:
                assert_close(values, expected, 1e-12)
    assert set(modes) == {"taylor"}


# Which mode runs.


def two_layers(x: Any) -> Any:
    w = jnp.sin(jnp.arange(12.0).reshape(3, 4)).astype(x.dtype)
    return jax.nn.sigmoid(x @ w) @ jnp.cos(w.T)


@jax.custom_jvp
def doubled(x: Any) -> Any:
    return x**2


doubled.defjvp(lambda primals, tangents: (primals[0] ** 2, 5 * tangents[0] * primals[0]))


@pytest.mark.parametrize(
    ("fun", "mode"),
    [
        pytest.param(two_layers, "taylor", id="layers"),
        pytest.param(jax.jit(two_layers), "taylor", id="jitted"),
        pytest.param(lambda x: jnp.mean(x**2), "taylor", id="mean"),
        pytest.param(lambda x: x * jnp.tanh(2.0) + jnp.sort(jnp.arange(3.0)), "taylor", id="constants-may-be-anything"),
        pytest.param(lambda x: x[jnp.array([2, 0])] ** 2, "taylor", id="indexing"),
        pytest.param(lambda x: x * (x > 0), "taylor", id="mask"),
        pytest.param(lambda x: jnp.take(x**2, jnp.array([1, 7])), "nested", id="take-out-of-bounds"),
        pytest.param(lambda x: jax.random.normal(jax.random.key(0), (3,)) * x**2, "taylor", id="noise"),
        pytest.param(lambda x: jnp.sort(x**2), "nested", id="sort"),
        pytest.param(lambda x: jnp.linalg.solve(jnp.eye(3) + jnp.outer(x, x), x), "nested", id="solve"),
        pytest.param(lambda x: lax.scan(lambda c, r: (c * r, c + r), x[0], x)[1], "nested", id="scan"),
        pytest.param(lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, x))[1], "nested",
                     id="while"),
        pytest.param(lambda x: lax.fori_loop(0, 3, lambda _, c: c * x, x), "nested", id="fori"),
        pytest.param(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), "nested", id="cond"),
        pytest.param(jax.checkpoint(lambda x: jnp.sin(x)), "nested", id="checkpoint"),
        pytest.param(doubled, "nested", id="custom_jvp"),
        pytest.param(jax.jit(doubled), "nested", id="jitted-custom_jvp"),
        pytest.param(lambda x: x * doubled(2.0), "taylor", id="custom_jvp-of-a-constant"),
        pytest.param(jax.nn.relu, "nested", id="relu"),
        pytest.param(lambda x: jax.nn.softmax(x**2), "nested", id="softmax"),
        pytest.param(lambda x: (x if x[0] > 0 else -x) ** 2, "nested", id="branch"),
        pytest.param(lambda x: x[x > 1] ** 2, "nested", id="boolean-mask"),
        pytest.param(lambda x: 3.0, "taylor", id="constant"),
    ],
)  # fmt: skip
def test_the_mode_changes_nothing(fun: Any, mode: str, modes: list[str]) -> None:
    x = jnp.array([0.5, 2.0, -1.0])
    for order in (1, 2, 3):
        modes.clear()
        assert_close(derivative(fun, order)(x), nested(fun, order)(x))
        assert modes[0] == mode


@pytest.mark.parametrize(
    ("dtype", "order", "mode"),
    [
        (jnp.bfloat16, 2, "nested"),
        (jnp.float16, 2, "nested"),
        (jnp.float32, 5, "taylor"),
        (jnp.float64, 12, "taylor"),
        (jnp.complex64, 3, "taylor"),
        (jnp.complex128, 3, "taylor"),
    ],
)
def test_every_dtype(dtype: Any, order: int, mode: str, modes: list[str]) -> None:
    with jax.enable_x64(True):
        x = jnp.array([[0.5, -1.0, 2.0]], dtype)
        fun = lambda x: jnp.exp(2 * x) * x
        actual = derivative(fun, order)(x)
        assert modes[0] == mode
        exact = (2.0**order * x.astype(jnp.result_type(dtype, jnp.float64)) + order * 2.0 ** (order - 1)) * jnp.exp(
            2.0 * x
        )
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual.astype(exact.dtype), exact, rtol=50 * float(jnp.finfo(dtype).eps))
    assert derivative(jnp.square, 1)(jnp.ones((2, 0))).shape == (2, 0)
    assert float(derivative(lambda x: x**3, 2)(2.0)) == 12


def test_low_orders_are_nested(monkeypatch: pytest.MonkeyPatch, modes: list[str]) -> None:
    monkeypatch.setattr(taylor, "_FIRST", FIRST)
    for order, mode in ((5, "nested"), (6, "taylor")):
        modes.clear()
        assert_close(derivative(jnp.sin, order)(X), nested(jnp.sin, order)(X))
        assert modes[0] == mode


def test_high_orders_that_would_underflow_are_nested(modes: list[str]) -> None:
    for order, mode in ((20, "taylor"), (21, "nested")):
        modes.clear()
        assert_close(derivative(lambda x: x * x, order)(X), jnp.zeros_like(X))
        assert modes[0] == mode


@pytest.mark.usefixtures("either")
def test_the_function_is_traced_once() -> None:
    calls = []

    def counted(x: Any) -> Any:
        calls.append(x)
        return jnp.sin(x)

    derivative(counted, 4)(X)
    derivative(lambda x: jnp.tanh(counted(x)), 3)(X)
    assert len(calls) == 2


# Composition.


@pytest.mark.usefixtures("either")
def test_other_arguments_are_constant() -> None:
    fun = lambda x, y, *rest, scale, names=(): x**3 * y * scale + sum(rest)
    assert_close(
        derivative(fun, 2)(jnp.array(2.0), 3.0, 7.0, scale=jnp.array([1.0, 2.0]), names="ab"), jnp.array([36.0, 72.0])
    )
    assert derivative(fun, 2).__name__ == "derivative(<lambda>)"


@pytest.mark.slow
@pytest.mark.usefixtures("either")
def test_it_composes() -> None:
    x = jnp.array([0.3, -1.2, 2.0])
    for fun in (lambda x: jnp.exp(jnp.sin(x)), lambda x: jnp.tanh(x)):
        second, third = nested(fun, 2), nested(fun, 3)
        assert_close(jax.jit(derivative(fun, 2))(x), second(x))
        assert_close(vmap(derivative(fun, 2), chunk_size=2)(x), second(x))
        assert_close(jax.grad(lambda x, fun=fun: jnp.sum(derivative(fun, 2)(x)))(x), third(x), 1e-4)
        assert_close(derivative(derivative(fun, 1), 2)(x), third(x), 1e-4)
        assert_close(lax.map(derivative(fun, 2), x), second(x))
        assert_close(derivative(jax.vmap(jax.grad(fun)), 2)(x), third(x), 1e-4)
    scaled = lambda x, y: derivative(lambda z: jnp.sin(y * z), 2)(x)
    assert_close(
        jax.vmap(jax.grad(scaled, 1))(x, 2 * x), jax.vmap(jax.grad(lambda x, y: -(y**2) * jnp.sin(y * x), 1))(x, 2 * x)
    )


@pytest.mark.usefixtures("either")
def test_modules() -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    x = jnp.array([0.5, 1.0, -1.0])
    assert_close(derivative(model, 1)(x), jnp.sum(model.kernel[...], 0))
    assert_close(derivative(lambda x, m: m(x) ** 2, 2)(x, model), 2 * jnp.sum(model.kernel[...], 0) ** 2)


# Refusals.


@pytest.mark.parametrize(
    ("fun", "order", "error", "match"),
    [
        (
            "f",
            1,
            TypeError,
            r"^derivative: fun must be a function, a bound method or a module, but got 'f' of",
        ),
        (jnp.sin, 1.0, TypeError, r"^derivative: order must be an int, but got 1\.0 of type float\.$"),
        (jnp.sin, True, TypeError, r"^derivative: order must be an int, but got True of type bool\.$"),
        (jnp.sin, None, TypeError, r"^derivative: order must be an int, but got None\.$"),
        (jnp.sin, -1, ValueError, r"^derivative: order must be at least 0, but got -1\.$"),
    ],
)
def test_orders_are_refused_at_once(fun: Any, order: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        derivative(fun, order)


def test_order_zero_is_the_function() -> None:
    assert derivative(jnp.sin, 0) is derivative(jnp.sin, np.int64(0)) is jnp.sin


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (3, r"^derivative: `x` is 3 of type int, but only floating-point .* first argument and the output\.$"),
        (True, r"`x` is True of type bool"),
        ("a", r"`x` is 'a' of type str"),
        (np.arange(3), r"`x` is an array of shape \(3,\) and dtype int64"),
        ({"a": [X, jnp.array([True])]}, r"`x\['a'\]\[1\]` is an array of shape \(1,\) and dtype bool"),
        (jax.random.key(0), r"`x` is an array of shape \(\) and dtype key<fry>"),
    ],
)
def test_arguments_without_derivatives_are_refused(x: Any, match: str) -> None:
    calls: list[Any] = []
    with pytest.raises(TypeError, match=match):
        derivative(lambda x: calls.append(x), 2)(x)
    assert calls == []


@pytest.mark.parametrize(
    ("fun", "match"),
    [
        (
            lambda x: jnp.argmax(x),
            r"^derivative: `output` is an array of shape \(\) and dtype int32, .* keep it out",
        ),
        (lambda x: {"a": [x, x > 0]}, r"`output\['a'\]\[1\]` is an array of shape \(2, 2\) and dtype bool"),
        (lambda x: (x, "name"), r"`output\[1\]` is 'name' of type str"),
    ],
)
def test_outputs_without_derivatives_are_refused(fun: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        derivative(fun, 2)(X)


def test_the_first_argument_is_positional() -> None:
    with pytest.raises(ValueError, match=r"^derivative: the call has no positional argument; pass the first"):
        derivative(lambda x: x, 1)(x=1.0)
