"""Functions of `jax.numpy`, `jax.nn`, `jax.lax` and `jax.scipy`, each with arguments, and the primitives they use.

Used by `test_surfaces.py`. Arguments are found by trying: the first that a function can be traced and, where possible,
differentiated with. `OTHERS` has calls that trying does not find.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plurax.transforms._core.jaxpr import with_inner
from plurax.transforms._jacobian._sparse.detect import dependence
from plurax.transforms._jacobian._sparse.index_sets import UNKNOWN, matrix_at

MODULES = """
    jax.numpy jax.numpy.linalg jax.numpy.fft jax.nn jax.lax jax.lax.linalg jax.random jax.scipy.special jax.scipy.linalg
    jax.scipy.signal jax.scipy.ndimage jax.scipy.stats.norm jax.scipy.stats.gamma
""".split()  # noqa: SIM905 (words read better)

LINE = jnp.linspace(0.1, 0.9, 5)
WIDE = jnp.arange(1.0, 16).reshape(3, 5) / 16
SQUARE = jnp.eye(4) * 3 + jnp.arange(16.0).reshape(4, 4) / 50
INDICES = jnp.arange(5) % 3
MASK = LINE > 0.5
IMAGE = jnp.linspace(-1, 1, 2 * 6 * 7 * 3).reshape(2, 6, 7, 3)
KERNEL = jnp.linspace(-1, 1, 2 * 2 * 3 * 4).reshape(2, 2, 3, 4)
TRIED: list[tuple[Any, ...]] = [
    (LINE,),
    (LINE, LINE),
    (WIDE,),
    (SQUARE,),
    (LINE, LINE, LINE),
    (SQUARE, jnp.ones((4, 2))),
    (WIDE, INDICES),
    (LINE, INDICES),
    (LINE, 1),
    (WIDE, 1),
    (INDICES,),
    (INDICES, INDICES),
    (MASK,),
    (MASK, MASK),
    (MASK, LINE, LINE),
    (LINE + 0j,),
    (WIDE, (5, 3)),
    (LINE, 2, 0),
    (WIDE, WIDE.T),
    (jax.random.key(0),),
    (jax.random.key(0), LINE),
    (LINE, LINE, LINE, LINE),
    (jnp.stack([LINE, LINE[::-1]]), [INDICES[:2], INDICES[:2]], 1),
]

IMAGES = ("NHWC", "HWIO", "NHWC")


def _root(a: jax.Array) -> jax.Array:
    def newton(f: Callable[..., Any], x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 5, lambda _, x: x - f(x) / jax.grad(f)(x), x)

    return lax.custom_root(lambda x: x**3 - a[0], 1.0, newton, lambda g, y: y / g(1.0))


def _counted(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.sin(c[0]), c[1] + 1), (x, 0))[0]


# Calls that need functions, or options.
OTHERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "jax.checkpoint": (jax.checkpoint(jnp.sin), (LINE,)),
    "jax.jit": (jax.jit(jnp.sin), (LINE,)),
    "jax.lax.approx_max_k": (partial(lax.approx_max_k, k=2), (LINE,)),
    "jax.lax.associative_scan": (partial(lax.associative_scan, jnp.add), (LINE,)),
    "jax.lax.bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (LINE,)),
    "jax.lax.broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 5), (1,)), (LINE,)),
    "jax.lax.concatenate": (lambda x: lax.concatenate([x, x], 0), (LINE,)),
    "jax.lax.cond": (lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), (LINE,)),
    "jax.lax.conv_general_dilated": (
        lambda x, w: lax.conv_general_dilated(x, w, (1, 2), "SAME", dimension_numbers=IMAGES),
        (IMAGE, KERNEL),
    ),
    "jax.lax.conv_general_dilated_patches": (
        lambda x: lax.conv_general_dilated_patches(x, (2, 2), (1, 1), "SAME", dimension_numbers=IMAGES),
        (IMAGE,),
    ),
    "jax.lax.conv_transpose": (
        lambda x, w: lax.conv_transpose(x, w, (1, 2), "SAME", dimension_numbers=IMAGES),
        (IMAGE, KERNEL),
    ),
    "jax.lax.custom_linear_solve": (
        lambda b: lax.custom_linear_solve(lambda x: 2 * x, b, lambda _, b: b / 2, lambda _, b: b / 2),
        (LINE,),
    ),
    "jax.lax.custom_root": (_root, (LINE,)),
    "jax.lax.dot_general": (lambda a, b: lax.dot_general(a, b, (((0,), (0,)), ((), ()))), (WIDE, WIDE)),
    "jax.lax.dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i,), (2,)), (LINE, 1)),
    "jax.lax.dynamic_update_slice": (lambda x, y, i: lax.dynamic_update_slice(x, y, (i,)), (LINE, LINE[:2], 1)),
    "jax.lax.fft": (lambda x: lax.fft(x, "RFFT", (5,)), (LINE,)),
    "jax.lax.fori_loop": (lambda x: lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x), (LINE,)),
    "jax.lax.map": (partial(lax.map, jnp.sin), (LINE,)),
    "jax.lax.optimization_barrier": (lambda *xs: lax.optimization_barrier(xs), (LINE, WIDE)),
    "jax.lax.pad": (lambda x: lax.pad(x, 0.0, [(1, 2, 1)]), (LINE,)),
    "jax.lax.platform_dependent": (lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), (LINE,)),
    "jax.lax.ragged_dot": (lax.ragged_dot, (WIDE, jnp.ones((2, 5, 4)), jnp.array([1, 2]))),
    "jax.lax.reduce": (lambda x: lax.reduce(x, 0.0, jnp.logaddexp, (0,)), (LINE,)),
    "jax.lax.reduce_window max": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 1, 1), "SAME"),
        (IMAGE,),
    ),
    "jax.lax.reduce_window sum": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 1, 1), "SAME"),
        (IMAGE,),
    ),
    "jax.lax.rev": (lambda x: lax.rev(x, (0,)), (LINE,)),
    "jax.lax.scan": (lambda x: lax.scan(lambda c, x: (c * x, c + x), x[0], x), (LINE,)),
    "jax.lax.slice": (lambda x: lax.slice(x, (1,), (5,), (2,)), (LINE,)),
    "jax.lax.split": (lambda x: lax.split(x, (2, 3)), (LINE,)),
    "jax.lax.squeeze": (lambda x: lax.squeeze(x, (0,)), (LINE[None],)),
    "jax.lax.switch": (lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jnp.exp], x), (1, LINE)),
    "jax.lax.transpose": (lambda x: lax.transpose(x, (1, 0)), (WIDE,)),
    "jax.lax.while_loop": (_counted, (LINE,)),
    "jax.nn.dot_product_attention": (jax.nn.dot_product_attention, (IMAGE, IMAGE, IMAGE)),
    "jax.numpy.einsum": (partial(jnp.einsum, "ij,kj->ik"), (WIDE, WIDE)),
    "jax.numpy.polyfit": (lambda x, y: jnp.polyfit(x, y, 1), (LINE, LINE)),
    "jax.numpy.vectorize": (jnp.vectorize(jnp.dot, signature="(n),(n)->()"), (WIDE, WIDE)),
    "x.at[i].add": (lambda x, i, y: x.at[i].add(y), (LINE, INDICES[:2], LINE[:2])),
    "x.at[i].max": (lambda x, i, y: x.at[i].max(y), (LINE, INDICES[:2], LINE[:2])),
    "x.at[i].mul": (lambda x, i, y: x.at[i].mul(y, unique_indices=True), (LINE, INDICES[:2], LINE[:2])),
    "x.at[i].set": (lambda x, i, y: x.at[i].set(y), (LINE, INDICES[:2], LINE[:2])),
    "x[i]": (lambda x, i: x[i], (WIDE, INDICES)),
}


def _traced(fun: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any], Any]:
    """Return a function of the floating-point arrays among the arguments, these arrays, and the traced function."""
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)]

    def of_floats(*floats: Any) -> Any:
        given = dict(zip(places, floats, strict=True))
        return fun(*jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)]))

    floats = [leaves[i] for i in places]
    return of_floats, floats, jax.make_jaxpr(of_floats)(*floats)


@cache
def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return the functions that can be called, by name, with arguments."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, fun in _functions():
            for args in TRIED:
                try:
                    _traced(fun, args)
                except Exception:  # any error that wrong arguments raise
                    continue
                found[name] = fun, args
                break
    return found | OTHERS


def _functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module in MODULES:
        members = inspect.getmembers(importlib.import_module(module), callable)
        yield from ((f"{module}.{name}", x) for name, x in members if name[0] != "_" and not inspect.isclass(x))


def names_in(eqns: Iterable[Any]) -> set[str]:
    """Return the names of primitives in some operations, at any depth."""
    return {eqn.primitive.name for eqn in with_inner(eqns)}


@cache
def primitives(name: str) -> tuple[set[str], set[str]]:
    """Return the primitives of a function and its derivatives, and those through which no rule follows tangents."""
    fun, args = calls()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of_floats, floats, closed = _traced(fun, args)
        every = names_in(closed.jaxpr.eqns)
        try:
            pushed = jax.make_jaxpr(lambda xs, ts: jax.jvp(of_floats, xs, ts)[1])(tuple(floats), tuple(floats))
            pulled = jax.make_jaxpr(lambda *xs: jax.vjp(of_floats, *xs)[1](of_floats(*xs)))(*floats)
        except Exception:  # the function has no derivative, such as that of integers
            return every, set()
        unknown = [UNKNOWN] * len(floats)
        tangents = [matrix_at(np.arange(x.size), np.zeros(x.size, int), (x.size, 1)) for x in floats]
        _, without_rule = dependence(pushed.jaxpr, pushed.consts, [*unknown, *tangents])
    return every | names_in(pushed.jaxpr.eqns) | names_in(pulled.jaxpr.eqns), set(without_rule)


def eqns_of(fun: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the operations of a function, and if it has one, of its derivative in reverse mode."""
    of_floats, floats, closed = _traced(fun, args)
    yield from with_inner(closed.jaxpr.eqns)
    if "while" in names_in(closed.jaxpr.eqns):
        return
    pulled = jax.make_jaxpr(lambda *xs: jax.vjp(of_floats, *xs)[1](of_floats(*xs)))(*floats)
    yield from with_inner(pulled.jaxpr.eqns)
