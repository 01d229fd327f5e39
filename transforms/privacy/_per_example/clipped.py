"""`clipped_grad`: the sum of the clipped gradients of samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.arguments import Argnums, check_count, check_number, describe, is_int, wrap_like
from ..._core.compat import Tracer, varying, varying_axes
from .gradient_forms import wide
from .loss import PerExample, on_any_mesh, per_example
from .methods import Backward, MethodChoice, check_method, choose, first_that_traces, routes
from .norms import ExampleGradients
from .report import Report, Use, report_uses


class Aux(NamedTuple):
    """The other results of `clipped_grad`, each with the examples along axis 0; None where it was not asked for.

    Attributes:
      values: the loss of each example.
      grad_norms: the norm of each example's gradient before clipping.
      aux: what the loss returns in addition to its value.
    """

    values: Any
    grad_norms: Any
    aux: Any


@dataclass(frozen=True)
class ClippedGrad:
    """The function that `clipped_grad` returns.

    Attributes:
      fun: the function that is called.
      l2_norm_bound: the norm that one example's part of the sum has at most.
      has_aux: whether something is returned in addition to the sum.
      report: the function behind `explain`.
    """

    fun: Callable[..., Any]
    l2_norm_bound: float
    has_aux: bool
    report: Callable[..., Report]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sum of the clipped gradients, and an `Aux` where one was asked for."""
        return self.fun(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """Report what is done for these arguments: the method, and each use of each parameter. Nothing is computed."""
        return self.report(*args, **kwargs)

    def sensitivity(self, neighboring_relation: Any = None) -> float:
        """Return the largest distance between the sums of two neighbouring batches.

        Args:
          neighboring_relation: a `dp_accounting.NeighboringRelation`; None for REPLACE_SPECIAL, where an example is
            replaced by padding.

        Raises:
          ValueError: an unknown relation.
          ModuleNotFoundError: dp-accounting is missing.
        """
        try:
            from dp_accounting import NeighboringRelation
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "clipped_grad: sensitivity needs dp-accounting; install it with pip install 'plurax[privacy]'."
            ) from None
        if neighboring_relation in (None, NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_SPECIAL):
            return self.l2_norm_bound
        if neighboring_relation is NeighboringRelation.REPLACE_ONE:  # one example leaves, and another comes in
            return 2 * self.l2_norm_bound
        known = "ADD_OR_REMOVE_ONE, REPLACE_ONE or REPLACE_SPECIAL"
        raise ValueError(f"clipped_grad: neighboring_relation must be {known}, but got {neighboring_relation!r}.")


def clipped_grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: float,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    batch_argnums: Argnums = 1,
    keep_batch_dim: bool = True,
    return_values: bool = False,
    return_grad_norms: bool = False,
    pre_clipping_transform: Callable[[Any], Any] | None = None,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: Any = None,
    prng_argnum: int | None = None,
    spmd_axis_name: str | None = None,
    method: str = "auto",
) -> ClippedGrad:
    """Sum over a batch each sample's gradient, clipped to a norm.

    As `jax_privacy.clipped_grad`, at about the price of an ordinary gradient. One thing differs: a sample whose
    gradient has a norm that is not finite contributes zero as a whole, where jax-privacy makes zeros of single numbers.

    Args:
      fun: as for `per_sample_grad`.
      argnums: as for `per_sample_grad`; the norm is that over all of them together.
      has_aux: whether `fun` returns `(loss, aux)`.
      l2_clip_norm: the norm that each sample's gradient is scaled down to where it has a larger one.
      rescale_to_unit_norm: whether to divide by `l2_clip_norm` then, so that the bound is one.
      normalize_by: what to divide the sum by.
      batch_argnums: as for `per_sample_grad`.
      keep_batch_dim: as for `per_sample_grad`. False is also for groups of samples, such as those of a user, in an
        axis of their own: the gradient of the group is clipped.
      return_values: whether to return each sample's loss.
      return_grad_norms: whether to return the norm of each sample's gradient.
      pre_clipping_transform: a function of one sample's gradients, applied before they are clipped; it needs them all,
        so the method is "vmap".
      microbatch_size: how many samples to compute at a time, at most; it divides the batch.
      nan_safe: whether samples whose norm is not finite contribute zero; False lets NaN through.
      dtype: the dtype of the sum; None for that of the parameters. Gradients are added up in float32 or wider, and the
        sum is rounded to it once, at the end. Of complex parameters it is the dtype of the real parts.
      prng_argnum: an argument that is a key, which is split, one for each sample.
      spmd_axis_name: as for `jax.vmap`.
      method: "vmap" holds each sample's gradient; "ghost" takes the norms from one backward pass and the sum from
        another; "book_keeping" takes both from one, and keeps the cotangents for it. "auto" is "book_keeping", or on
        one CPU one of both for some samples at a time, by what each costs as counted from shapes. Where an operation
        allows none of them (one that JAX cannot map over samples, say), `jax.grad` of one sample after another is
        taken, and `explain` reports it.

    Returns:
      A function of the same arguments that returns the sum, like the parameters, with None for what of them is not of
      floating point; with `has_aux`, `return_values` or
      `return_grad_norms` a pair of it and an `Aux`. It takes `is_padding_example=`, booleans of shape (batch,): those
      samples contribute zero, whatever they hold. Its `.sensitivity()` is what privacy accounting asks for. In a
      `jax.shard_map` the sum is that over the samples of each device.

    Raises:
      TypeError, ValueError: as for `per_sample_grad`; a negative clipping norm; `normalize_by` that is not positive; a
        `dtype` that is not of floating point; a `prng_argnum` that names no argument, one of parameters, or one of
        examples; a microbatch that does not divide the batch; an unknown method, or one that cannot do what is asked;
        in a `jax.shard_map`, a loss that combines its devices.

    Cost:
      "auto": 0.9 to 1.2 times the time of `jax.grad` of the batch, and 0.06 to 2.5 times its memory, for the networks
      of the benchmarks. "vmap": memory for batch times parameters; so with every method for those parameters that the
      loss also decays, or normalises before it uses them. Leave weight decay to the optimiser.

    Rounding:
      A sample is clipped by its norm and what rounding may have taken from it, so that the bound holds where large
      terms cancel each other too; this makes a difference only where they cancel to less than a sixth. "ghost" computes
      gradients a second time, which XLA may round differently; this is bounded where parameters meet data in products
      and lookups. A sum of half precision is rounded at the end, by up to half a unit in the last place of each number,
      which the sensitivity does not include: ask for dtype=jnp.float32, as `DPSGD` does, and add the noise to that.

    Source:
      Abadi et al. 2016, "Deep Learning with Differential Privacy"; Bu et al. 2023, "Differentially Private Optimization
      on Large Model at Small Cost" (book-keeping); `jax_privacy.clipped_grad`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import clipped_grad
      >>> x = jnp.array([[3.0, 4.0], [0.0, 0.5]])
      >>> clipped_grad(lambda w, x: jnp.sum(x @ w), l2_clip_norm=1.0)(jnp.ones(2), x)
      Array([0.6, 1.3], dtype=float32)
    """
    of_call = per_example("clipped_grad", fun, argnums, batch_argnums)
    check_method("clipped_grad", method)
    check_count("clipped_grad", "microbatch_size", microbatch_size, optional=True)
    if not isinstance(l2_clip_norm, Tracer):
        l2_clip_norm = check_number("clipped_grad", "l2_clip_norm", l2_clip_norm, lambda x: x >= 0, "at least 0")
    normalize_by = check_number("clipped_grad", "normalize_by", normalize_by, lambda x: x > 0, "positive")
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"clipped_grad: dtype must be of floating point, such as jnp.float32, but got {dtype!r}.")
    if prng_argnum is not None and not is_int(prng_argnum):
        raise TypeError(f"clipped_grad: prng_argnum must be an int or None, but got {describe(prng_argnum)}.")
    if pre_clipping_transform is not None and method not in ("auto", "vmap"):
        needs = f'pre_clipping_transform needs each gradient, which method="{method}" does not compute'
        raise ValueError(f'clipped_grad: {needs}; leave the method out, or take "vmap".')
    bare = not isinstance(argnums, (tuple, list))

    def routes_for(of: PerExample) -> list[MethodChoice]:
        """Return the routes to try in order, of which the first is the method that was asked for or chosen."""
        most = of.size if microbatch_size is None else min(microbatch_size, of.size)
        if most and of.size % most:
            given = f"microbatch_size={microbatch_size} does not divide the batch of {of.size}"
            raise ValueError(f"clipped_grad: {given}; pad the batch, and pass is_padding_example.")
        choice = MethodChoice(method, most, f'it was asked for by method="{method}"')
        if pre_clipping_transform is not None:
            choice = MethodChoice("vmap", most, "pre_clipping_transform needs each gradient")
        elif method == "auto" and of.size:
            choice = choose(of.program, of.size, most, spmd_axis_name)
        return routes(of, choice)

    def compute(of: PerExample, padding: jax.Array, choice: MethodChoice) -> tuple[Any, Any]:
        """Return the sum, divided, and for each example its loss, its norm and what the loss returns in addition."""
        user = pre_clipping_transform
        transform = None if user is None else lambda leaves: user(of.gradients(leaves, bare))

        def of_some(examples: list[Any], padding: jax.Array) -> tuple[Any, Any]:
            """Return the clipped sum of one group, and what there is for each of its examples."""
            backward = Backward(of, examples, choice.method, spmd_axis_name, transform)
            norms = jnp.sqrt(backward.squares)
            weights = _clip_weights(backward.norms_to_clip(), l2_clip_norm, rescale_to_unit_norm, nan_safe)
            # A weight of zero leaves an example out, whatever its gradient holds.
            total = backward.weighted_sum(jnp.where(padding, 0.0, weights), dtype)
            return total, (backward.values, norms, backward.aux)

        sums = jax.eval_shape(transform, of.parameters) if transform else of.parameters
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, wide(x.dtype, dtype)), sums)
        total, each = _in_groups(of_some, of.examples, padding, choice.examples, start)

        # Rounded to the dtype that was asked for only here, once.
        def finished(x: jax.Array, like: Any) -> jax.Array:
            asked = jnp.promote_types(dtype, jnp.complex64) if dtype and jnp.iscomplexobj(x) else dtype
            return (x / normalize_by if normalize_by != 1.0 else x).astype(asked or like.dtype)

        return jax.tree.map(finished, total, sums), each

    def clipped(*args: Any, is_padding_example: Any = None, **kwargs: Any) -> Any:
        """Return the sum of the clipped gradients, and what else was asked for."""
        of = of_call(has_aux, keep_batch_dim, prng_argnum, args, kwargs)
        padding = _padding(is_padding_example, of.size)
        # By the first route that can be traced: whether one can, no table of operations tells for certain.
        _, (total, (values, norms, aux)) = first_that_traces(
            "clipped_grad", routes_for(of), partial(compute, of, padding)
        )
        result = total if pre_clipping_transform is not None else of.gradients(total, bare)
        if not has_more:
            return result
        return result, Aux(
            values if return_values else None,
            norms if return_grad_norms else None,
            of.aux(aux) if has_aux else None,
        )

    def explain(*args: Any, is_padding_example: Any = None, **kwargs: Any) -> Report:
        """Return the method, and the rule for each use of a parameter, for these arguments."""
        of = of_call(has_aux, keep_batch_dim, prng_argnum, args, kwargs)
        padding = _padding(is_padding_example, of.size)
        program = of.program  # traced here, where it may be used again, and not inside of `eval_shape`

        def shapes(choice: MethodChoice) -> Any:
            return jax.eval_shape(lambda padding: compute(of, padding, choice), padding)

        choice, _ = first_that_traces("clipped_grad", routes_for(of), shapes)
        uses: list[Use] = []

        def found(examples: Any) -> None:
            forms = None if choice.method == "vmap" else ExampleGradients(program, examples).forms_summed()
            uses.extend(report_uses(program, of.names(), forms))

        jax.eval_shape(found, of.examples)
        return Report(*choice, uses)

    bound = (1.0 if rescale_to_unit_norm else l2_clip_norm) / normalize_by
    has_more = has_aux or return_values or return_grad_norms
    like = argnums if pre_clipping_transform is None else None
    on_mesh = on_any_mesh("clipped_grad", fun, batch_argnums, clipped, lambda out: out[0] if has_more else out, like)
    explained = on_any_mesh("clipped_grad", fun, batch_argnums, explain)
    return ClippedGrad(wrap_like(fun, "clipped_grad", on_mesh), bound, has_more, explained)


def _clip_weights(norms: jax.Array, l2_clip_norm: Any, rescale_to_unit_norm: bool, nan_safe: bool) -> jax.Array:
    """Return what each example's gradient is multiplied by: min(1, C / norm), and that divided by C for a unit norm."""
    bound = jnp.maximum(l2_clip_norm, 0.0)  # a traced one may be negative
    weights = jnp.minimum(1.0, bound / norms)
    if rescale_to_unit_norm:
        weights = jnp.where(bound > 0, weights / bound, 1 / norms)
    weights = jnp.where(jnp.isfinite(weights), weights, 0.0)  # a gradient of zero stays one, whatever the bound
    return jnp.where(jnp.isfinite(norms), weights, 0.0 if nan_safe else jnp.nan)


def _in_groups(compute: Callable[..., Any], examples: list[Any], padding: jax.Array, group: int, start: Any) -> Any:
    """Compute all examples, or a group at a time: sum the first result of `compute` and concatenate its second.

    Args:
      compute: from some examples and whether each is padding to two pytrees.
      examples: those of the batch, along axis 0.
      padding: likewise.
      group: how many at a time.
      start: zeros like the first result.
    """
    size = len(padding)
    if group == size:
        return compute(examples, padding)

    def split(x: Any) -> Any:
        # Each group takes some of every part of the batch: where devices have a part each, nothing is sent.
        return x.reshape(group, size // group, *x.shape[1:]).swapaxes(0, 1)

    def step(total: Any, arrays: Any) -> tuple[Any, Any]:
        part, each = compute(*arrays)
        return jax.tree.map(jnp.add, total, part), each

    # In a `shard_map`, a loop must start with a sum that differs between devices, as it will be.
    start = jax.tree.map(lambda x: varying(x, varying_axes(examples[0])), start)
    total, each = lax.scan(step, start, jax.tree.map(split, (examples, padding)))
    return total, jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(size, *x.shape[2:]), each)


def _padding(given: Any, size: int) -> jax.Array:
    """Return whether each example is padding."""
    if given is None:
        return jnp.zeros(size, bool)
    given = jnp.asarray(given)
    if given.shape != (size,) or given.dtype != bool:
        expected = f"there are {size} examples; give that many booleans"
        raise ValueError(f"clipped_grad: is_padding_example is {describe(given)}, but {expected}.")
    return given
