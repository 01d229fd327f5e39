"""Remedies of derivatives: selected arguments, dtypes, cotangents, tangents."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from plurax.transforms import (
    Dual,
    batch_jacobian,
    derivative,
    dual,
    gnvp,
    grad,
    hessian,
    hessian_trace,
    hutchinson_trace,
    hvp,
    jacfwd,
    jacobian,
    jacrev,
    jvp,
    laplacian,
    linearize,
    per_sample_grad,
    value_and_grad,
    vhp,
    vjp,
)

from ._registry import Fails, remedy

X = jnp.array([1.0, 2.0, 3.0])


def equal(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@remedy("{}: {} is empty; name at least one positional argument.")
def no_argument(fails: Fails) -> None:
    fails(lambda: grad(jnp.sum, argnums=()))
    equal(grad(jnp.sum, argnums=(0,))(X)[0], 1)
    fails(lambda: per_sample_grad(jnp.vdot, batch_argnums=()))
    equal(per_sample_grad(lambda w, x: (w * x).sum(), batch_argnums=(1,))(1.0, X), X)


@remedy("{}: {}={} names an argument twice; name each once.")
def argument_twice(fails: Fails) -> None:
    fails(lambda: grad(jnp.vdot, argnums=(0, 0)))
    equal(grad(jnp.vdot, argnums=(0, 1))(X, 2 * X)[0], 2 * X)


@remedy("{}: {}={} names argument `{}` twice in this call; name each once.")
def argument_twice_in_a_call(fails: Fails) -> None:
    fails(grad(jnp.vdot, argnums=(1, -1)), X, 2 * X)
    equal(grad(jnp.vdot, argnums=(0, -1))(X, 2 * X)[0], 2 * X)


@remedy(
    "selects argument {}, but the call has {} positional argument(s)",
    "name one of them; an argument can only be selected if it is passed by position, not by keyword",
)
def argument_by_keyword(fails: Fails) -> None:
    scaled = lambda x, scale: (x * scale).sum()
    fails(grad(scaled, argnums=1), X, scale=2.0)
    equal(grad(scaled, argnums=1)(X, 2.0), 6)
    fails(grad(scaled, argnums=2), X, 2.0)
    equal(grad(scaled, argnums=0)(X, 2.0), 2)


@remedy("{}: the arguments of batch_argnums hold no array, so there are no examples; pass some.")
def no_examples(fails: Fails) -> None:
    loss = lambda w, batch: sum(((x - w) ** 2).sum() for x in batch.values())
    fails(per_sample_grad(loss), 1.0, {})
    equal(per_sample_grad(loss)(1.0, {"x": X}), 2 * (1 - X))


@remedy("{}: `{}` {}; pass it in another argument.")
def no_axis_of_examples(fails: Fails) -> None:
    loss = lambda w, batch: (batch["x"] * w * batch["scale"]).sum()
    for scale in (2.0, jnp.array(2.0)):
        fails(per_sample_grad(loss), 1.0, {"x": X, "scale": scale})
        equal(per_sample_grad(lambda w, x, scale: (x * w * scale).sum())(1.0, X, scale), 2 * X)


@remedy("{}: `{}` has {} examples, but `{}` has {}; pass the same number.")
def numbers_of_examples(fails: Fails) -> None:
    loss = lambda w, x, y: (w * x * y).sum()
    of_both = per_sample_grad(loss, batch_argnums=(1, 2))
    fails(of_both, 1.0, X, X[:2])
    equal(of_both(1.0, X, X), X**2)


@remedy("{}: fun must return a number or arrays to differentiate, but it returned {}.")
def no_output(fails: Fails) -> None:
    for transform in (partial(grad, cotangent=1.0), jacfwd, jacrev, jacobian, hessian):
        fails(transform(lambda x: None), X)
    fails(grad(lambda x: {}), X)
    equal(grad(lambda x: x.sum())(X), 1)


@remedy("{}: with has_aux=True, fun must return a pair (output, aux), not {}.")
def no_pair(fails: Fails) -> None:
    for transform in (grad, jacfwd, jacrev, hessian, partial(batch_jacobian, in_axes=0)):
        fails(transform(jnp.sum, has_aux=True), X)
    fails(partial(hvp, jnp.sum, has_aux=True), X, X)
    fails(partial(vjp, jnp.sum, has_aux=True), X)
    fails(partial(jvp, jnp.sum, has_aux=True), (X,), (X,))
    gradient, aux = grad(lambda x: (x.sum(), "aux"), has_aux=True)(X)
    equal(gradient, 1)
    assert aux == "aux"


@remedy(
    "pass its real and imaginary parts as separate arguments",
    ", pass holomorphic=True if fun is holomorphic",
    "leave it out of argnums",
    "let the function close over it",
)
def undifferentiable_arguments(fails: Fails) -> None:
    z = X + 1j
    # Integers are converted, or left out.
    scaled = lambda x, n: (x * n).sum()
    transform: Any
    for transform in (grad, jacfwd, jacrev, jacobian):
        fails(transform(scaled, argnums=(0, 1)), X, 2)
        equal(transform(scaled, argnums=(0, 1))(X, 2.0)[1], X.sum())
        equal(transform(scaled)(X, 2), 2)
    fails(hessian(scaled, argnums=(0, 1)), X, 2)
    equal(hessian(scaled, argnums=(0, 1))(X, 2.0)[0][1], 1)
    equal(hessian(scaled)(X, 2), 0)
    # Of complex arguments there are three remedies, of which forward mode has only two.
    square = lambda z: z * z
    for transform in (jacfwd, partial(jacobian, mode="forward")):
        fails(transform(square), z)
        equal(transform(square, holomorphic=True)(z), jnp.diag(2 * z))
        parts = transform(lambda re, im: jnp.real(square(re + 1j * im)), (0, 1))(z.real, z.imag)
        equal(parts[0], jnp.diag(2 * z.real))
    real = lambda z: jnp.abs(z).sum()
    for call, at_parts in [
        (hessian_trace(real), hessian_trace(lambda re, im: real(re + 1j * im), (0, 1))),
        (laplacian(real), laplacian(lambda re, im: real(re + 1j * im), (0, 1))),
    ]:
        assert "holomorphic" not in fails(call, z)
        equal(at_parts(z.real, z.imag), (1 / jnp.abs(z)).sum())
    # Without `argnums`, all arguments are differentiated.
    for call in (partial(hvp, scaled), partial(vhp, scaled)):
        assert "argnums" not in fails(call, (X, 2), (X, 2))
        equal(call((X, 2.0), (X, 0.0))[1], X.sum())
        equal(hvp(lambda x: scaled(x, 2), X, X), 0)
    assert "argnums" not in fails(gnvp, scaled, jnp.square, (X, 2), (X, 2))
    equal(gnvp(lambda x: scaled(x, 2), jnp.square, X, X), 8 * X.sum())


@remedy("{}: argnums has an nnx.DiffState for `{}`, which is not an NNX module; pass {} instead.")
def filter_of_no_module(fails: Fails) -> None:
    fails(grad(jnp.sum, argnums=nnx.DiffState(0, nnx.Param)), X)
    equal(grad(jnp.sum, argnums=0)(X), 1)


@remedy("{}: `{}` {}; let fun close over it.")
def text_as_argument(fails: Fails) -> None:
    scaled = lambda x, options: x * {"double": 2.0}[options["name"]]
    options = {"name": "double"}
    fails(partial(vjp, scaled), X, options)
    fails(partial(linearize, scaled), X, options)
    fails(partial(jvp, scaled), (X, options), (X, options))
    equal(vjp(lambda x: scaled(x, options), X)[1](X)[0], 2 * X)
    equal(linearize(lambda x: scaled(x, options), X)[1](X), 2 * X)
    equal(jvp(lambda x: scaled(x, options), (X,), (X,))[1], 2 * X)


@remedy("{}: `{}` is {}, which has no derivative; convert it to floating point.")
def tangent_of_an_integer(fails: Fails) -> None:
    fails(partial(jvp, jnp.multiply), (X, 2), (X, 1))
    equal(jvp(jnp.multiply, (X, 2.0), (X, 1.0))[1], 3 * X)


@remedy("{}: the tangent of `{}` {}; pass an array of that shape and dtype.")
def tangent_of_another_shape(fails: Fails) -> None:
    for tangent in (X[:2], 1.0, X.astype(jnp.float16), X[None]):
        fails(partial(jvp, jnp.square), (X,), (tangent,))
        fails(hvp, lambda x: (x**3).sum(), X, tangent)
    equal(jvp(jnp.square, (X,), (X,))[1], 2 * X**2)
    equal(hvp(lambda x: (x**3).sum(), X, X), 6 * X**2)


@remedy("{}: {} of `{}` {}; pass one array for each of its arrays.")
def tangent_of_another_structure(fails: Fails) -> None:
    total = lambda tree: tree["a"] * tree["b"]
    tree = {"a": X, "b": 2 * X}
    for tangent in ({"a": X}, [X, X], X):
        fails(partial(jvp, total), (tree,), (tangent,))
    equal(jvp(total, (tree,), ({"a": X, "b": X},))[1], 3 * X**2)
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    fails(partial(jvp, lambda model: model(X)), (model,), ({"kernel": jnp.ones((3, 2))},))
    ones = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}
    equal(jvp(lambda model: model(X), (model,), (ones,))[1], [7, 7])


@remedy("only floating-point arrays have derivatives; convert it, or return it as aux with has_aux=True")
def integers_as_output(fails: Fails) -> None:
    two = lambda x: (x**2, 3)
    transform: Any
    for transform in (jacfwd, jacrev, jacobian):
        fails(transform(two), X)
        equal(transform(lambda x: (x**2, 3.0))(X)[0], jnp.diag(2 * X))
        jacobians, aux = transform(two, has_aux=True)(X)
        equal(jacobians, jnp.diag(2 * X))
        assert aux == 3
    count = lambda x: (x > 1.5).sum()
    for transform in (grad, value_and_grad, partial(grad, cotangent=1.0)):
        fails(transform(count), X)
    _, aux = grad(lambda x: (x.sum(), count(x)), has_aux=True)(X)
    assert aux == 2
    equal(grad(lambda x: count(x).astype(jnp.float32))(X), 0)
    out, pull = vjp(lambda x: (x**2, 3), X)
    fails(pull, 1.0)
    out, pull, aux = vjp(lambda x: (x**2, 3), X, has_aux=True)
    equal(pull(1.0)[0], 2 * X)
    (out,) = (aux,)
    assert out == 3


@remedy(
    "holomorphic=True needs complex outputs; convert it, or {}",
    "leave holomorphic out (forward mode and Hessians then need real and imaginary parts as separate arguments)",
)
def holomorphic_with_real_outputs(fails: Fails) -> None:
    z = X + 1j
    norm = lambda z: (jnp.abs(z) ** 2).sum()
    as_complex = lambda z: (z * z).sum().astype(jnp.complex64)
    for transform in (grad, jacrev, jacobian):
        fails(transform(norm, holomorphic=True), z)
        equal(transform(norm)(z), 2 * jnp.conj(z))
        equal(transform(as_complex, holomorphic=True)(z), 2 * z)
    of_parts = lambda re, im: norm(re + 1j * im)
    fails(jacfwd(norm, holomorphic=True), z)
    equal(jacfwd(of_parts, (0, 1))(z.real, z.imag)[1], 2 * z.imag)
    fails(hessian(norm, holomorphic=True), z)
    equal(hessian(of_parts, (0, 1))(z.real, z.imag)[1][1], 2 * jnp.eye(3))
    equal(hessian(as_complex, holomorphic=True)(z), 2 * jnp.eye(3))
    equal(jacfwd(as_complex, holomorphic=True)(z), 2 * z)


@remedy(
    "pass cotangent=1.0 to seed every element with one, an array like the output, or has_aux=True if it ",
)
def output_without_cotangent(fails: Fails) -> None:
    fails(grad(jnp.square), X)
    equal(grad(jnp.square, cotangent=1.0)(X), 2 * X)
    equal(grad(jnp.square, cotangent=X)(X), 2 * X**2)
    pair = lambda x: (x.sum(), {"square": x**2})
    fails(value_and_grad(pair), X)
    (_, aux), gradient = value_and_grad(pair, has_aux=True)(X)
    equal(gradient, 1)
    equal(aux["square"], X**2)
    # A complex output.
    turned = lambda x: (x * 1j + x).sum()
    fails(grad(turned), X)
    equal(grad(turned, cotangent=1.0)(X), 1)
    fails(grad(lambda z: z * z, holomorphic=True), X + 1j)
    equal(grad(lambda z: z * z, holomorphic=True, cotangent=1.0)(X + 1j), 2 * (X + 1j))


@remedy("{}: cotangent has the structure {}, but the output {}; make them match.")
def structure_of_cotangents(fails: Fails) -> None:
    two = lambda x: {"a": x, "b": x**2}
    fails(grad(two, cotangent={"a": X}), X)
    equal(grad(two, cotangent={"a": X, "b": X})(X), X + 2 * X**2)


@remedy("{}: the cotangent of {} is {}, which does not match it; pass {}.")
def shape_of_cotangents(fails: Fails) -> None:
    fails(grad(jnp.square, cotangent=jnp.ones(())), X)
    fails(grad(jnp.square, cotangent="a"), X)
    fails(grad(jnp.square, cotangent=jnp.ones(3, int)), X)
    equal(grad(jnp.square, cotangent=1)(X), 2 * X)
    equal(grad(jnp.square, cotangent=jnp.ones(3))(X), 2 * X)
    with_count = lambda x: (x**2, (x > 0).sum())
    fails(grad(with_count, cotangent=(X, jnp.ones(()))), X)
    equal(grad(with_count, cotangent=(X, np.zeros((), jax.dtypes.float0)))(X), 2 * X**2)


@remedy("{}: cotangent={} is complex, but {} is real; pass a real number.")
def complex_cotangent(fails: Fails) -> None:
    fails(grad(jnp.square, cotangent=1j), X)
    equal(grad(jnp.square, cotangent=1.0)(X), 2 * X)


@remedy("vjp: pass one cotangent, with the structure of the output, but got {}.")
def several_cotangents(fails: Fails) -> None:
    _, pull = vjp(lambda x: (x, x**2), X)
    fails(pull, X, X)
    equal(pull((X, X))[0], X + 2 * X**2)


@remedy("vjp: the cotangent is None; pass one of the structure of the output, or a Python number.")
def no_cotangent(fails: Fails) -> None:
    _, pull = vjp(jnp.square, X)
    fails(pull, None)
    equal(pull(X)[0], 2 * X**2)
    equal(pull(1.0)[0], 2 * X)


@remedy("dual: no argument is a Dual; wrap one, as in dual(fun)(Dual(x, tangent), y).")
def no_dual(fails: Fails) -> None:
    fails(dual(jnp.multiply), X, 2.0)
    equal(dual(jnp.multiply)(Dual(X, X), 2.0).tangent, 2 * X)


@remedy("derivative: the call has no positional argument; pass the first argument by position.")
def derivative_by_keyword(fails: Fails) -> None:
    fails(derivative(lambda x: x**3, 2), x=X)
    equal(derivative(lambda x: x**3, 2)(X), 6 * X)


@remedy("convert it, or keep it out of the first argument and the output")
def derivative_of_integers(fails: Fails) -> None:
    power = lambda x, n=3: x**n
    fails(derivative(power, 2), 2)
    equal(derivative(power, 2)(2.0), 12)
    fails(derivative(lambda tree: tree["x"] ** tree["n"], 2), {"x": X, "n": 3})
    equal(derivative(power, 2)(X, 3), 6 * X)
    fails(derivative(lambda x: (x**3, 3), 2), X)
    equal(derivative(lambda x: x**3, 2)(X), 6 * X)


@remedy("use its evaluation mode: {}{})")
def derivative_with_state(fails: Fails) -> None:
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    batch = jnp.stack([X, 2 * X])
    fails(derivative(model, 1), batch)
    frozen = nnx.view(model, use_running_average=True)
    equal(derivative(frozen, 1)(batch), jnp.full_like(batch, 1 / jnp.sqrt(1 + 1e-5)))
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    fails(derivative(dropout, 1), batch)
    equal(derivative(nnx.view(dropout, deterministic=True), 1)(batch), 1)


@remedy(
    "reduce it to a real number",
    "convert it to a real number",
    ", or return other values with has_aux=True",
)
def hessian_of_several_outputs(fails: Fails) -> None:
    cubes = lambda x: x**3
    pair = lambda x: (cubes(x).sum(), x)
    for product in (hvp, vhp):
        fails(product, cubes, X, X)
        equal(product(lambda x: cubes(x).sum(), X, X), 6 * X**2)
        fails(product, pair, X, X)
        fails(product, lambda x: cubes(x).sum() * 1j, X, X)
        fails(product, lambda x: (cubes(x) > 1).sum(), X, X)
        equal(product(lambda x: (cubes(x).sum() * 1j).imag, X, X), 6 * X**2)
        equal(product(pair, X, X, has_aux=True)[0], 6 * X**2)
    for trace in (hessian_trace, laplacian):
        fails(trace(cubes), X)
        equal(trace(lambda x: cubes(x).sum())(X), 36)
        fails(trace(pair), X)
        equal(trace(pair, has_aux=True)(X)[0], 36)
    estimate = hutchinson_trace(cubes, samples=2)
    fails(estimate, jax.random.key(0), X)
    equal(hutchinson_trace(lambda x: cubes(x).sum(), samples=2)(jax.random.key(0), X)[0], 36)
    # A loss has no auxiliary output.
    assert "has_aux" not in fails(gnvp, cubes, lambda out: out, X, X)
    equal(gnvp(cubes, lambda out: (out**2).sum() / 2, X, X), 9 * X**5)
