"""`clipped_grad`: the sum of clipped per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from ..._convolutions.as_products import products_unless_differentiated, run_everywhere, run_outside_loops
from ..._core.arguments import Argnums, check_count, check_number, describe, is_int, wrap_like
from ..._core.memory import check_budget
from ..._core.target import platform
from .budget import within_budget
from .clip_norms import ClipGroups, check_grid, clip_norms, sum_on_grid
from .gradient_forms import wide
from .in_backward import in_backward
from .loss import PerExample, on_any_mesh, per_example
from .methods import (
    Backward,
    Method,
    MethodChoice,
    check_method,
    choose,
    first_that_traces,
    held,
    in_groups,
    on_platform,
    routes,
)
from .norms import ExampleGradients
from .report import Report, Use, report_uses


class Aux(NamedTuple):
    """The auxiliary results of `clipped_grad`, with the samples along axis 0; None for those not requested.

    Attributes:
      values: the loss of each sample, shape (batch,).
      grad_norms: the norm of each sample's gradient before clipping, shape (batch,); in the structure of `l2_clip_norm`
        if that is a pytree.
      aux: the auxiliary output of the loss, as a pytree with the samples along axis 0.
    """

    values: Any
    grad_norms: Any
    aux: Any


@dataclass(frozen=True)
class ClippedFun:
    """The function that `clipped_fun` returns.

    Attributes:
      fun: computes the sum.
      l2_norm_bound: the largest norm of one sample's contribution to the sum.
      has_aux: whether a call returns a pair of the sum and auxiliary results; with False, the sum alone.
    """

    fun: Callable[..., Any]
    l2_norm_bound: float
    has_aux: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the clipped sum, or a pair of it and the auxiliary results if any was requested."""
        return self.fun(*args, **kwargs)

    def sensitivity(self, neighboring_relation: Any = None) -> float:
        """Return the L2 sensitivity: the largest distance between the sums of two neighboring batches.

        Args:
          neighboring_relation: a `dp_accounting.NeighboringRelation`; None for REPLACE_SPECIAL, in which padding
            replaces a sample.

        Raises:
          ValueError: an unknown relation.
          ModuleNotFoundError: dp-accounting is missing.
        """
        try:
            from dp_accounting import NeighboringRelation
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "sensitivity needs dp-accounting; install it with pip install 'plurax[privacy]'."
            ) from None
        if neighboring_relation in (None, NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_SPECIAL):
            return self.l2_norm_bound
        if neighboring_relation is NeighboringRelation.REPLACE_ONE:  # one sample is removed and another added
            return 2 * self.l2_norm_bound
        known = "ADD_OR_REMOVE_ONE, REPLACE_ONE or REPLACE_SPECIAL"
        raise ValueError(f"sensitivity: neighboring_relation must be {known}, but got {neighboring_relation!r}.")


@dataclass(frozen=True)
class ClippedGrad(ClippedFun):
    """The function that `clipped_grad` returns.

    Attributes:
      report: computes the report of `explain`.
    """

    report: Callable[..., Report]

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """Report the method for these arguments and the rule at each parameter use, without computing a gradient.

        Args:
          *args: the arguments of a call.
          **kwargs: its keyword arguments.

        Returns:
          A `Report` with the method, the number of samples at a time, the reason, and the parameter uses.

        Raises:
          TypeError, ValueError: as for a call.
        """
        return self.report(*args, **kwargs)


def clipped_grad(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: Any,
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
    method: Method = "auto",
    memory_budget: int | str | None = None,
    automatic: float | None = None,
    grid_scale: int | None = None,
) -> ClippedGrad:
    """Sum the clipped gradients of the samples of a batch.

    A drop-in replacement for `jax_privacy.clipped_grad`, at about the cost of an ordinary gradient. One behavior
    differs: a sample with a non-finite gradient norm contributes zero, while jax-privacy zeroes single elements.

    Args:
      fun: as for `per_sample_grad`.
      argnums: as for `per_sample_grad`; gradients are clipped by their joint norm over all of these arguments.
      has_aux: whether `fun` returns `(loss, aux)`.
      l2_clip_norm: the largest norm of a sample's gradient; larger gradients are scaled down to it. A pytree of numbers
        clips each part of the gradient by its own norm: for parameters `{"embed": ..., "layers": [...]}`, the norms
        `{"embed": 0.1, "layers": 1.0}`. It is a prefix of the gradients; dicts may stand for the states of modules.
      rescale_to_unit_norm: whether to divide clipped gradients by `l2_clip_norm`, so that their norm is at most one.
      normalize_by: the divisor of the sum.
      batch_argnums: as for `per_sample_grad`.
      keep_batch_dim: as for `per_sample_grad`. Pass False if axis 0 indexes groups of samples, such as the data of one
        user, and the next axis the samples of a group: the gradient of the whole group is then clipped.
      return_values: whether to return each sample's loss.
      return_grad_norms: whether to return the norm of each sample's gradient before clipping.
      pre_clipping_transform: a function of one sample's gradients, applied before clipping. It requires materialized
        gradients, so the method is "vmap", unless it changes nothing.
      microbatch_size: the largest number of samples to compute at a time; it must divide the batch.
      nan_safe: whether samples with a non-finite norm contribute zero; with False they make the sum NaN.
      dtype: the dtype of the sum; None for the dtypes of the parameters. Gradients are summed in float32 or wider and
        rounded to it once, at the end. For complex parameters it is the dtype of the real and imaginary parts.
      prng_argnum: the position of a key argument, which is split into one key for each sample.
      spmd_axis_name: as for `jax.vmap`.
      method: "vmap" materializes each sample's gradient. "book_keeping" computes the norms in one backward pass and
        keeps its cotangents for the sum. "ghost" computes the norms inside one backward pass and the sum in a second
        one; it takes little more memory than an ordinary gradient, also if layers are in a `scan` or checkpointed.
        "auto" chooses for the platform that is compiled for. On an accelerator it is "book_keeping", or "ghost" if
        book-keeping would add more than half of the temporaries of an ordinary gradient, as estimated from shapes (and
        more than 16 MiB). On several CPU devices it is "book_keeping"; on one, a cost model of shapes chooses between
        "book_keeping" and "vmap", the number of samples at a time, and whether convolutions become matrix products. If
        an operation supports no such method (JAX cannot map it over samples, for example), `jax.grad` runs on one
        sample at a time, and `explain` reports this.
      automatic: γ > 0 for automatic clipping: each gradient g (of each part, for a pytree of norms) is multiplied by
        C / (‖g‖ + γ) with the clip norm C, so that C acts as a part of the learning rate only. The sensitivity is as
        without it. A gradient of zero stays zero.
      grid_scale: for discrete noise: each clipped gradient is divided by `l2_clip_norm / grid_scale` and rounded to
        integers of 64 bits, whose sum is returned. The clip norm is tightened, so that the norm of the integers is at
        most `grid_scale`, which is the sensitivity. It requires materialized gradients, so the method is "vmap".
      memory_budget: an alternative to `microbatch_size`: bytes, or a string as for `vmap`. The quickest way whose
        compiled temporaries fit is used. With method="auto" that may also be "mixed": book-keeping for the first
        parameter uses and "ghost" for all later ones; and any of them for groups of samples. `explain` reports it.

    Returns:
      A function of the same arguments that returns the sum, with the structure of the parameters and None for leaves
      that are not floating point; with `has_aux`, `return_values` or `return_grad_norms` a pair of the sum and an
      `Aux`. It also takes `is_padding_example=`, booleans of shape (batch,): padding contributes zero, whatever its
      values. Its method `.sensitivity()` returns the L2 sensitivity for privacy accounting, and `.explain(*args)` a
      report of the method and of each parameter use. In a `jax.shard_map` each device sums its own samples.

    Raises:
      TypeError, ValueError: as for `per_sample_grad`; a negative clipping norm; `normalize_by` that is not positive; a
        `dtype` that is not floating point; a `prng_argnum` out of range, or in `argnums` or `batch_argnums`; a
        `microbatch_size` that does not divide the batch, or together with `memory_budget`; a budget that is no size or
        that no method fits into; an unknown method, or one that `pre_clipping_transform`
        rules out; `is_padding_example` that is not booleans of shape (batch,); in a `jax.shard_map`, a loss that
        combines devices.

    Cost:
      "auto": 0.4 to 1.2 times the time of `jax.grad` of the batch, and 0.06 to 2.5 times its memory, for the networks
      of `benchmarks/privacy.py` on a CPU; for convolutional ones 0.1 to 1.8 times, and 0.9 to 1.8 times that of the
      quickest ordinary gradient (`benchmarks/convolutions.md`). "ghost": two gradients; the memory of one and of a copy
      of the examples. Parameters that several operations use, or one in a loop, keep activations and cotangents there.
      "vmap": memory for batch times parameters. Every method needs that memory for parameters that the loss also
      decays, or normalizes before their use. Leave weight decay to the optimizer.

    Rounding:
      A sample is clipped by an upper bound on its norm that includes rounding errors, so that the clipping bound also
      holds if large terms cancel. This matters only if they cancel to less than a sixth. "ghost" computes gradients a
      second time, which XLA may round differently; this error is bounded where parameters meet data in products and
      lookups. A half-precision sum is rounded at the end, by up to half a unit in the last place of each number, which
      the sensitivity does not include: pass dtype=jnp.float32, as `DPSGD` does, and add the noise to that sum.

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
    budget = check_budget("clipped_grad", memory_budget, microbatch_size, "microbatch_size")
    clipping = clip_norms("clipped_grad", l2_clip_norm, automatic, rescale=rescale_to_unit_norm, nan_safe=nan_safe)
    normalize_by = checked_divisor("clipped_grad", normalize_by, dtype, prng_argnum)
    check_grid("clipped_grad", grid_scale, clipping, normalize_by, dtype)
    needing = "pre_clipping_transform" if pre_clipping_transform is not None else "grid_scale"
    if (pre_clipping_transform is not None or grid_scale is not None) and method not in ("auto", "vmap"):
        needs = f'{needing} needs each gradient, which method="{method}" does not compute'
        raise ValueError(f'clipped_grad: {needs}; omit method, or pass "vmap".')
    bare = not isinstance(argnums, (tuple, list))

    def groups_of(of: PerExample) -> ClipGroups | None:
        """Return the clip groups of the parameters; None if there is one clip norm."""
        numbered = of.gradients(list(range(len(of.parameters))), bare)
        found = clipping.groups("clipped_grad", numbered)
        if found is None:
            return None
        by_leaf = dict(zip(jax.tree.leaves(numbered), found.of_leaf, strict=True))
        return found._replace(of_leaf=tuple(by_leaf[i] for i in range(len(by_leaf))))

    def transform_of(of: PerExample) -> Callable[[Any], Any] | None:
        """Return the transform; None without one, or if it changes nothing, as jax-privacy's `DPTrainer` passes."""
        user = pre_clipping_transform
        return None if user is None or _changes_nothing(user, of.gradients(of.parameters, bare)) else user

    def routes_for(of: PerExample, compute: Callable[[MethodChoice], Any]) -> dict[str, list[MethodChoice]]:
        """Return the routes to try in order, by platform; the first is the requested or chosen method."""
        most = most_at_a_time("clipped_grad", microbatch_size, of.size)
        choices = {"default": MethodChoice(method, most, f'requested by method="{method}"')}
        needs_each = grid_scale is not None or transform_of(of) is not None
        if needs_each:
            choices = {"default": held(of.program, of.size, most, spmd_axis_name, f"{needing} needs each gradient")}
        elif method == "auto" and of.size:
            choices = choose(of.program, of.size, most, spmd_axis_name)
        if budget is not None and of.size:
            methods = get_args(Method) if method == "auto" and not needs_each else (choices["default"].method,)
            found = within_budget("clipped_grad", of.program, methods, of.size, spmd_axis_name, compute, budget)
            choices = {"default": found}
        return {platform: routes(of, choice) for platform, choice in choices.items()}

    def compute(of: PerExample, padding: jax.Array, choice: MethodChoice) -> tuple[Any, Any]:
        """Return the normalized sum, and for each example its loss, its norm and its auxiliary output."""
        user, groups = transform_of(of), groups_of(of)
        transform = None if user is None else lambda leaves: user(of.gradients(leaves, bare))
        sums = jax.eval_shape(transform, of.parameters) if transform else of.parameters
        after = clipping.groups("clipped_grad", sums) if transform else None
        clip = clipping
        if grid_scale is not None:
            if any(jnp.iscomplexobj(x) for x in jax.tree.leaves(sums)):
                raise TypeError("clipped_grad: grid_scale needs real gradients, but some are complex.")
            clip = clipping.before_rounding("clipped_grad", grid_scale, sum(x.size for x in jax.tree.leaves(sums)))

        def of_some(examples: list[Any], padding: jax.Array) -> tuple[Any, Any]:
            """Return the clipped sum of one group, and the values, norms and aux of its examples."""
            backward = Backward(of, examples, choice, spmd_axis_name, transform, groups, after)
            norms = jnp.sqrt(backward.squares)
            weights = clip.weights(backward.norms_to_clip())
            # A weight of zero excludes an example, even if its gradient is NaN.
            excluded = padding if groups is None else padding[:, None]
            weights = jnp.where(excluded, 0.0, weights)
            if grid_scale is not None:
                total = sum_on_grid(backward.each(), weights, l2_clip_norm, grid_scale)
            else:
                total = backward.weighted_sum(weights, dtype)
            return total, (backward.values, norms, backward.aux)

        start = jax.tree.map(
            lambda x: jnp.zeros(x.shape, wide(x.dtype, dtype) if grid_scale is None else jnp.int64), sums
        )
        run = run_everywhere if choice.examples < of.size else run_outside_loops  # groups are computed in a loop
        of_group = products_unless_differentiated(of_some, run) if choice.products else of_some
        total, each = in_groups(of_group, of.examples, padding, choice.examples, start)

        # Round to the requested dtype only here, once.
        def finished(x: jax.Array, like: Any) -> jax.Array:
            asked = jnp.promote_types(dtype, jnp.complex64) if dtype and jnp.iscomplexobj(x) else dtype
            return (x / normalize_by if normalize_by != 1.0 else x).astype(asked or like.dtype)

        return total if grid_scale is not None else jax.tree.map(finished, total, sums), each

    def clipped(*args: Any, is_padding_example: Any = None, **kwargs: Any) -> Any:
        """Return the sum of the clipped gradients, and an `Aux` if requested."""
        of = of_call(has_aux, keep_batch_dim, prng_argnum, args, kwargs)
        padding = padding_mask("clipped_grad", is_padding_example, of.size)
        computed = partial(compute, of, padding)
        total, (values, norms, aux) = on_platform("clipped_grad", routes_for(of, computed), computed)
        result = total if transform_of(of) is not None else of.gradients(total, bare)
        if not has_more:
            return result
        return result, Aux(
            values if return_values else None,
            clipping.shaped(norms) if return_grad_norms else None,
            of.aux(aux) if has_aux else None,
        )

    def explain(*args: Any, is_padding_example: Any = None, **kwargs: Any) -> Report:
        """Return the method, and the rule for each use of a parameter, for these arguments."""
        of = of_call(has_aux, keep_batch_dim, prng_argnum, args, kwargs)
        padding = padding_mask("clipped_grad", is_padding_example, of.size)
        program = of.program  # traced here and not inside `eval_shape`, so that it can be reused

        def shapes(choice: MethodChoice) -> Any:
            return jax.eval_shape(lambda padding: compute(of, padding, choice), padding)

        by_platform = routes_for(of, partial(compute, of, padding))
        here = "cpu" if "cpu" in by_platform and platform() == "cpu" else "default"
        choice, _ = first_that_traces("clipped_grad", by_platform[here], shapes)
        uses: list[Use] = []

        def found(examples: Any) -> None:
            if choice.method == "vmap":
                uses.extend(report_uses(program, of.names(), None))
                return
            groups = groups_of(of)
            gradients = ExampleGradients(program, examples, spmd_axis_name, clip_groups=groups)
            first = 0 if choice.method == "ghost" else choice.inside_from
            inside = None if first is None else in_backward(program.plan, spmd_axis_name, first, groups)
            uses.extend(report_uses(program, of.names(), gradients.forms_summed(inside), inside, groups))

        jax.eval_shape(found, of.examples)
        return Report(choice.method, choice.examples, choice.why, uses)

    bound = clipping.l2_norm_bound() / normalize_by if grid_scale is None else float(grid_scale)
    has_more = has_aux or return_values or return_grad_norms
    like = argnums if pre_clipping_transform is None else None
    on_mesh = on_any_mesh("clipped_grad", fun, batch_argnums, clipped, lambda out: out[0] if has_more else out, like)
    explained = on_any_mesh("clipped_grad", fun, batch_argnums, explain)
    return ClippedGrad(wrap_like(fun, "clipped_grad", on_mesh), bound, has_more, explained)


def _changes_nothing(transform: Callable[[Any], Any], gradients: Any) -> bool:
    """Return whether a transform returns each array of the gradients as it is, in the same structure."""
    traced, shapes = jax.make_jaxpr(transform, return_shape=True)(gradients)
    before: Any = jax.tree.structure(gradients)
    return before == jax.tree.structure(shapes) and not traced.eqns and traced.jaxpr.outvars == traced.jaxpr.invars


def checked_divisor(api: str, normalize_by: Any, dtype: Any, prng_argnum: Any) -> float:
    """Return the divisor of a clipped sum as a Python float; raise for it, a dtype or a position that is not valid."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{api}: dtype must be floating point, such as jnp.float32, but got {dtype!r}.")
    if prng_argnum is not None and not is_int(prng_argnum):
        raise TypeError(f"{api}: prng_argnum must be an int or None, but got {describe(prng_argnum)}.")
    return check_number(api, "normalize_by", normalize_by, lambda x: x > 0, "positive")


def most_at_a_time(api: str, microbatch_size: int | None, size: int) -> int:
    """Return the largest number of examples to compute at a time; raise unless it divides the batch."""
    most = size if microbatch_size is None else min(microbatch_size, size)
    if most and size % most:
        given = f"microbatch_size={microbatch_size} does not divide the batch of {size}"
        raise ValueError(f"{api}: {given}; pad the batch, and pass is_padding_example.")
    return most


def padding_mask(api: str, given: Any, size: int) -> jax.Array:
    """Return the padding mask, shape (size,); raise if the given one is not booleans of that shape."""
    if given is None:
        return jnp.zeros(size, bool)
    given = jnp.asarray(given)
    if given.shape != (size,) or given.dtype != bool:
        expected = f"there are {size} examples; pass one boolean for each"
        raise ValueError(f"{api}: is_padding_example is {describe(given)}, but {expected}.")
    return given
