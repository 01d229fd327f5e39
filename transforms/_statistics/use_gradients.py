"""Each example's gradients at the parameter uses of a batch, one gradient form for each group of uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._calls.explicit_sharding import divided_as
from .._core.jaxpr import evaluate, interpret
from ..privacy._per_example.gradient_forms import Dense, GradientForm, OuterProduct, RowSparse, without_transposes
from ..privacy._per_example.loss import PerExample
from ..privacy._per_example.methods import MethodChoice
from ..privacy._per_example.norms import ExampleGradients


class UseGradients(NamedTuple):
    """Each example's gradient at a group of uses that share elements of parameters with no other use.

    Attributes:
      leaves: the indices of the parameters.
      use: the number of the use whose operand the gradients are like; None if they are those of the only parameter.
      form: the gradients.
      axes: for an outer product, the axes of the parameter, before a transpose, that are the stack, p and d; None if
        these are not whole axes.
    """

    leaves: frozenset[int]
    use: int | None
    form: GradientForm
    axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None


def use_gradients(
    of: PerExample, examples: Sequence[Any], route: MethodChoice, *, per_leaf: bool = False, seed: Any = None
) -> list[UseGradients]:
    """Return the gradients of some examples.

    Args:
      of: the loss.
      examples: the examples, along axis 0 of each array.
      route: with the method "vmap", every gradient is materialized, one example at a time.
      per_leaf: whether a group may have only one parameter.
      seed: as for `ExampleGradients`, or one for each example along axis 0.
    """
    if route.method == "vmap":
        return [UseGradients(frozenset([i]), None, Dense(x)) for i, x in enumerate(one_at_a_time(of, examples, seed))]
    return of_groups(ExampleGradients(of.program, examples, seed=seed), per_leaf=per_leaf)


def of_groups(found: ExampleGradients, *, per_leaf: bool = False) -> list[UseGradients]:
    """Return the gradients of each group of uses in one form."""
    result: list[UseGradients] = []
    for group, forms in found.groups:
        leaves = frozenset[int]().union(*(found.uses[n].value.leaves for n in group))
        if forms is None or (per_leaf and len(leaves) > 1):
            result += [UseGradients(frozenset([i]), None, Dense(x)) for i, x in found.of_leaves(group).items()]
        else:
            use, form = one_form(forms)
            # Forms of several uses have been merged with the axes of the parameter.
            order = without_transposes(found.uses[use])[1]
            in_order = form.with_axes(order) if isinstance(form, OuterProduct) and len(group) == 1 else form
            result.append(UseGradients(leaves, use, form, getattr(in_order, "axes", None)))
    if not result:  # the loss does not depend on its parameters
        batch, first = found.values.shape[0], found.parameters[0]
        result.append(UseGradients(frozenset([0]), None, Dense(jnp.zeros((batch, *first.shape), first.dtype))))
    return result


def at_parameters(
    found: ExampleGradients, groups: Sequence[UseGradients], sums: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return sums of gradients at groups of uses, or of their squares, for each parameter.

    Args:
      found: the gradients.
      groups: the groups, as `of_groups` returns them.
      sums: a sum for each group, like its operand, or like its only parameter.
    """
    given, pull = found.wide_operands(frozenset(part.use for part in groups if part.use is not None), None)
    at_uses = {part.use: x for part, x in zip(groups, sums, strict=True) if part.use is not None}
    (totals,) = pull({n: divided_as(x.astype(given[n].dtype), given[n]) for n, x in at_uses.items()})
    for part, x in zip(groups, sums, strict=True):
        if part.use is None:
            (leaf,) = part.leaves
            totals[leaf] = totals[leaf] + x
    return totals


def one_form(forms: dict[int, GradientForm]) -> tuple[int, GradientForm]:
    """Return the forms of one parameter as one: rows of a table that is multiplied too are one-hot vectors."""
    if len(forms) == 1:
        return next(iter(forms.items()))
    ((use, factors),) = ((n, form) for n, form in forms.items() if isinstance(form, OuterProduct))
    (table,) = (form for form in forms.values() if isinstance(form, RowSparse))
    assert factors.axes is not None
    rows = jax.nn.one_hot(table.rows, table.height, dtype=table.right.dtype)
    added = (table.right, rows) if factors.axes[2] == (0,) else (rows, table.right)
    both = [jnp.concatenate(pair, axis=2) for pair in zip((factors.left, factors.right), added, strict=True)]
    return use, factors._replace(left=both[0], right=both[1])


def one_at_a_time(of: PerExample, examples: Sequence[Any], seed: Any) -> list[jax.Array]:
    """Return the gradients of each example, as `jax.grad` computes them: shape (batch, *parameter)."""
    (out, *_) = of.program.closed.out_avals

    def gradients(given: tuple[Sequence[Any], Any]) -> list[jax.Array]:
        example, own = given
        _, pull, _ = jax.vjp(lambda parameters: of.loss(parameters, example), of.parameters, has_aux=True)
        return pull(own)[0]

    seeds = jnp.ones(out.shape, out.dtype) if seed is None else seed.astype(out.dtype)
    return lax.map(gradients, (list(examples), jnp.broadcast_to(seeds, (len(examples[0]), *out.shape))))


class OutputGradients(NamedTuple):
    """The gradients of each output at a group of uses.

    Attributes:
      form: the form, for one output.
      arrays: the arrays of the form, with an axis of outputs after that of the examples, but for those that do not
        depend on the output.
      has_outputs: whether each array has that axis.
    """

    form: GradientForm
    arrays: list[jax.Array]
    has_outputs: list[bool]

    def both_have_outputs(self) -> bool:
        """Return whether both factors depend on the output, as in a product with a transpose of the same matrix."""
        return isinstance(self.form, OuterProduct) and self.has_outputs[0]


def for_one_output(form: GradientForm) -> OutputGradients:
    """Return the gradients of a loss, which has no axis of outputs."""
    arrays = arrays_of(form)
    return OutputGradients(form, arrays, [False] * len(arrays))


def for_each_output(
    gradients: Callable[[jax.Array], list[UseGradients]], outputs: int, dtype: Any, *, mapped: bool
) -> list[OutputGradients]:
    """Compute the gradients of each output, sharing what does not depend on the output.

    Args:
      gradients: a function from the cotangent of the outputs, shape (outputs,), to the gradients.
      outputs: the number of outputs.
      dtype: their dtype.
      mapped: whether JAX can map `gradients` over cotangents; otherwise one output is computed at a time.
    """
    forms: list[GradientForm] = []

    def arrays(seed: jax.Array) -> list[list[jax.Array]]:
        forms[:] = [part.form for part in gradients(seed)]
        return [arrays_of(form) for form in forms]

    basis = jnp.eye(outputs, dtype=dtype)
    if not mapped:
        found = lax.map(arrays, basis)
        return [
            OutputGradients(form, [x.swapaxes(0, 1) for x in xs], [True] * len(xs))
            for form, xs in zip(forms, found, strict=True)
        ]
    # A copy of the activations for each output would cost as much as their cotangents. So the arrays that do not depend
    # on the cotangent are found in the program, and `jax.vmap` returns them once.
    closed, shapes = jax.make_jaxpr(arrays, return_shape=True)(jax.ShapeDtypeStruct((outputs,), dtype))
    depends = interpret(
        closed.jaxpr,
        closed.consts,
        [True],
        lambda eqn, known: [any(x is True for x in known)] * len(eqn.outvars),
        lambda _: False,
    )
    evaluated = partial(interpret, closed.jaxpr, closed.consts, visit=lambda eqn, values: evaluate(eqn, *values))
    flat = jax.vmap(lambda seed: evaluated([seed]), out_axes=[1 if x else None for x in depends])(basis)
    structure = jax.tree.structure(shapes)
    parts = zip(forms, jax.tree.unflatten(structure, flat), jax.tree.unflatten(structure, depends), strict=True)
    return [OutputGradients(*part) for part in parts]


def arrays_of(form: GradientForm) -> list[jax.Array]:
    """Return the arrays of a form, all of which have the examples along axis 0."""
    return [form.gradients] if isinstance(form, Dense) else [form[0], form[1]]
