"""The optimizers that `Trainer` and `DPSGD` accept, in one form, and the check that a state belongs to one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.arguments import describe, leaf_name, short


class Lookahead(NamedTuple):
    """The state of `optax.lookahead` for a model that holds the fast parameters.

    Attributes:
      slow: the slow parameters.
      inner: the state of the optimizer itself.
    """

    slow: Any
    inner: Any


def as_transform(optimizer: Any) -> Any:
    """Return an optax optimizer as a transformation of plain parameters with extra arguments; None if it is not one.

    `optax.MultiSteps` is an optimizer, but not a `GradientTransformation`. `optax.lookahead` needs pairs of fast and
    slow parameters; here its state holds the slow ones.
    """
    import optax  # imported here, since importing the library should load only JAX

    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        return None
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        pair = optax.LookaheadParams.init_synced(params)
        with _naming_masks(params):
            return Lookahead(params, inner.init(pair)) if _looks_ahead(inner.init, pair) else inner.init(params)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if not isinstance(state, Lookahead):
            return inner.update(gradients, state, params, **extra)
        pair = optax.LookaheadParams(fast=params, slow=state.slow)
        updates, after = inner.update(gradients, state.inner, pair, **extra)
        return updates.fast, Lookahead(optax.apply_updates(state.slow, updates.slow), after)

    return optax.GradientTransformationExtraArgs(init, update)


def _looks_ahead(init: Callable[[Any], Any], pair: Any) -> bool:
    """Return whether an optimizer is `optax.lookahead`, alone or in a chain."""
    import optax

    # Only the state reveals the optimizer, and `optax.lookahead` logs a warning for parameters that are not a pair.
    # Other optimizers may raise anything for a pair.
    try:
        state = jax.eval_shape(init, pair)
    except Exception:
        return False
    # One inside a `Lookahead` has its pairs already, as in `averages.collect(optax.lookahead(...))`.
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, (optax.LookaheadState, Lookahead)))
    return any(isinstance(x, optax.LookaheadState) for x in found)


@contextmanager
def _naming_masks(params: Any) -> Iterator[None]:
    """Say in an error of JAX about two structures that masks and labels must have that of the parameters.

    Those of an `nnx.Optimizer` are often an `nnx.State`, but parameters are nested dicts here.
    """
    try:
        yield
    except ValueError as error:
        if not re.search("structure|mismatch", str(error)):
            raise
        like = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", params)
        differs = f"a mask or labels have another structure than the parameters, which are {short(like)}"
        cure = "pass a function of the parameters, such as lambda params: jax.tree.map(lambda x: x.ndim > 1, params)"
        raise ValueError(f"optimizer: {differs}; {cure}.") from error


def check_opt_state(api: str, state: Any, init: Callable[[Any], Any], params: Any, checked: set[Any]) -> None:
    """Raise if the state of an optimizer differs in structure, shapes or kinds of numbers from a new one.

    Args:
      api: the caller's name in errors.
      state: the optimizer state.
      init: returns a new state of the optimizer for parameters.
      params: the parameters, of which only shapes and dtypes are used.
      checked: the states that have been found to fit, to which this one is added; a repeated check is quick.
    """
    leaves, structure = jax.tree.flatten((params, state))
    kind = structure, tuple((getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves)
    if kind in checked:
        return
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    if difference := _difference(state, jax.eval_shape(init, shapes)):
        remedy = "use the optimizer that made it, or call init for a new state"
        raise ValueError(f"{api}: the state is from another optimizer: {difference}; {remedy}.")
    checked.add(kind)


def _difference(found: Any, expected: Any) -> str | None:
    """Return the first difference between two optimizer states, in words; None if there is none."""
    mine, needed = ({leaf_name("opt_state", p): x for p, x in jax.tree.leaves_with_path(t)} for t in (found, expected))
    numbers = jnp.inexact, jnp.integer
    for name in [*needed, *mine]:
        if name not in mine:
            return f"it lacks `{name}`, {describe(needed[name])}"
        if name not in needed:
            return f"it has `{name}`, which this optimizer does not use"
        x, y = mine[name], needed[name]
        shape, dtype = getattr(x, "shape", ()), getattr(x, "dtype", None) or jnp.result_type(x)
        # An optimizer may change the precision of its state in the first update.
        alike = any(jnp.issubdtype(dtype, of) and jnp.issubdtype(y.dtype, of) for of in numbers)
        if shape != y.shape or not (alike or dtype == y.dtype):
            return f"`{name}` is {describe(x)}, but must be {describe(y)}"
    structures: list[Any] = [jax.tree.structure(tree) for tree in (found, expected)]
    return None if structures[0] == structures[1] else "it consists of other transformations"
