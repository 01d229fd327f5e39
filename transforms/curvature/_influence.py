"""`influence` and `self_influence`: how much examples of the training data change the loss of others."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax

from .._core.arguments import Argnums, check_callable, check_choice
from .._core.compat import Tracer
from .._statistics.projection import along
from .._statistics.statistic import Chunks, in_chunks
from .._statistics.use_gradients import for_one_output, use_gradients
from ..privacy._per_example.gradient_forms import wide
from ..privacy._per_example.loss import PerExample, on_any_mesh, per_example
from ..privacy._per_example.methods import MethodChoice
from ._data import Structure, batches_of, factors_of_data, size_of, snapshot
from ._inner_products import damped_products
from ._kronecker import KroneckerFactors
from ._outputs import Fisher
from ._reduction import Reduction, ReductionName
from ._sides import parameter_gradients
from ._squares import WeightSharing

# The most numbers of gradients of test examples at a time.
_NUMBERS = 2**26


def influence(
    model: Callable[..., Any],
    loss: Callable[..., Any],
    params: Any,
    data: Any,
    *,
    curvature: Structure | KroneckerFactors = "ekfac",
    damping: float,
    argnums: Argnums = 0,
    fisher: Fisher = "exact",
    weight_sharing: WeightSharing = "expand",
    key: Any = None,
    chunk_size: int | None = None,
    check_loss: bool = True,
    reduction: ReductionName = "mean",
) -> Callable[[Any, Any], jax.Array]:
    """Estimate how much the loss of a test example rises if a training example is left out.

    With the mean gradient near zero at `params`, leaving out example j of n moves them by (D + damping I)⁻¹ gⱼ / n,
    with its gradient gⱼ and the curvature D of the mean loss. So the loss of test example i rises by about
    gᵢᵀ (D + damping I)⁻¹ gⱼ / n.

    Args:
      model: as for `ggn_diagonal`.
      loss: as for `ggn_diagonal`.
      params: the parameters after training, a pytree or an NNX module.
      data: the training data, one tuple (x, y) with the examples along axis 0 of each array, or an iterable of such
        tuples, which is held.
      curvature: D: "ekfac", "kfac" or "diagonal" of the Gauss-Newton matrix over all of `data`; or `KroneckerFactors`.
      damping: a positive number, in units of eigenvalues of D.
      argnums: which parameters may move: 0 for all, or an `nnx.DiffState` of 0.
      fisher: as for `kfac`. "exact" needs no key.
      weight_sharing: as for `kfac`.
      key: the key for "mc".
      chunk_size: the number of training examples to compute at a time.
      check_loss: as for `ggn_diagonal`.
      reduction: "mean", or "sum" for a loss that returns the sum over the examples: D is then that of the sum over all
        of `data`, and the estimates are gᵢᵀ (D + damping I)⁻¹ gⱼ.

    Returns:
      A function of (x_test, y_test) that returns the estimates, shape (n_test, n_data), in float32 or wider, with the
      training examples in the order of `data`. Positive means that the test loss rises without the example, which
      helps. For a model that is an average of an ensemble's members, map over their parameters with `jax.vmap` and take
      the mean.

    Raises:
      TypeError, ValueError: as for `kfac`; a damping that is not positive; data in another form; factors of other
        parameters.

    Cost:
      The factors, once. For each call, the gradients of the test examples, some of which are held at a time, one
      forward and one backward pass over the training data for these, and a product of activations, a matrix and
      cotangents for each pair of a test and a training example.

    Source:
      Koh & Liang 2017; Grosse et al. 2023, "Studying Large Language Model Generalization with Influence Functions".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms.curvature import influence
      >>> model, loss = lambda w, x: x * w, lambda o, y: 0.5 * jnp.mean((o - y) ** 2)
      >>> data = jnp.ones(4), jnp.array([1.0, 2.0, 3.0, 6.0])  # the mean is 3
      >>> of = influence(model, loss, jnp.float32(3.0), data, damping=1e-6)
      >>> print(of(jnp.ones(1), jnp.array([4.0]))[0, 3].round(2))  # without it, the mean is 2, further from 4
      0.75
    """
    api = "influence"
    said = Reduction(api, model, loss, 1, check_loss, reduction)
    prepared = _Prepared(
        api, model, loss, params, data, curvature, damping, argnums, fisher, weight_sharing, key, chunk_size, said
    )

    @partial(on_any_mesh, api, loss, (2, 3))
    @jax.jit
    def directions(params: Any, factors: KroneckerFactors, x: Any, y: Any) -> list[jax.Array]:
        """Return (D + damping I)⁻¹ g for some test examples: an array for each parameter."""
        of = prepared.of_call(False, True, None, (params, x, y), {})

        def solved(example: list[Any]) -> list[jax.Array]:
            gradients = jax.grad(lambda parameters: of.loss(parameters, example)[0])(of.parameters)
            found = factors.solve(of.gradients([g.astype(wide(g.dtype)) for g in gradients], prepared.bare), damping)
            return prepared.in_order(of, found)

        return jax.vmap(solved)(of.examples)

    @partial(on_any_mesh, api, loss, (2, 3))
    @jax.jit
    def products(params: Any, along_these: list[jax.Array], x: Any, y: Any) -> jax.Array:
        """Return the inner products of gradients with directions: shape (batch, directions)."""
        of = prepared.of_call(False, True, None, (params, x, y), {})

        def compute(route: MethodChoice) -> jax.Array:
            def of_some(examples: list[Any]) -> tuple[Any, jax.Array]:
                parts = use_gradients(of, examples, route)
                return (), lax.map(lambda direction: along(of, parts, dict(enumerate(direction))), along_these).T

            return in_chunks(of_some, of.examples, route)[1]

        return prepared.chunks.results(of, compute)

    def scores(x_test: Any, y_test: Any) -> jax.Array:
        """Return the estimates for these test examples."""
        test = prepared.of_call(False, True, None, (prepared.params, x_test, y_test), {})
        size = max(1, _NUMBERS // max(1, sum(x.size for x in test.parameters)))
        rows = []
        for start in range(0, test.size, size):
            found = directions(prepared.params, prepared.factors, *_some((x_test, y_test), start, size))
            rows.append(
                jnp.concatenate([products(prepared.params, found, *batch).T for batch in prepared.data], axis=1)
            )
        return jnp.concatenate(rows) / prepared.divisor

    return scores


def self_influence(
    model: Callable[..., Any],
    loss: Callable[..., Any],
    params: Any,
    data: Any,
    *,
    curvature: Structure | KroneckerFactors = "ekfac",
    damping: float,
    argnums: Argnums = 0,
    fisher: Fisher = "exact",
    weight_sharing: WeightSharing = "expand",
    key: Any = None,
    chunk_size: int | None = None,
    check_loss: bool = True,
    reduction: ReductionName = "mean",
) -> jax.Array:
    """Estimate how much the loss of each training example rises if it is left out.

    Large values point to mislabelled and unusual examples.

    Args:
      model: as for `influence`.
      loss: as for `influence`.
      params: as for `influence`.
      data: as for `influence`.
      curvature: as for `influence`.
      damping: as for `influence`.
      argnums: as for `influence`.
      fisher: as for `influence`.
      weight_sharing: as for `influence`.
      key: as for `influence`.
      chunk_size: as for `influence`.
      check_loss: as for `influence`.
      reduction: as for `influence`.

    Returns:
      The diagonal of `influence` of the data on themselves, shape (n_data,).

    Raises:
      TypeError, ValueError: as for `influence`.

    Cost:
      The factors; then one forward and one backward pass, and the coordinates of activations and cotangents by
      eigenvectors. Where a parameter is used at several positions, its gradient for one example at a time.

    Source:
      As for `influence`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms.curvature import self_influence
      >>> model, loss = lambda w, x: x * w, lambda o, y: 0.5 * jnp.mean((o - y) ** 2)
      >>> data = jnp.ones(4), jnp.array([1.0, 2.0, 3.0, 6.0])
      >>> print(self_influence(model, loss, jnp.float32(3.0), data, damping=1e-6).round(2))
      [1.   0.25 0.   2.25]
    """
    api = "self_influence"
    said = Reduction(api, model, loss, 1, check_loss, reduction)
    prepared = _Prepared(
        api, model, loss, params, data, curvature, damping, argnums, fisher, weight_sharing, key, chunk_size, said
    )

    @partial(on_any_mesh, api, loss, (2, 3))
    @jax.jit
    def of_batch(params: Any, factors: KroneckerFactors, x: Any, y: Any) -> jax.Array:
        """Return the products gᵀ (D + damping I)⁻¹ g of the examples of a batch."""
        of = prepared.of_call(False, True, None, (params, x, y), {})
        blocks = dict(zip(prepared.numbers(of), factors.blocks, strict=True))

        def compute(route: MethodChoice) -> jax.Array:
            def of_some(examples: list[Any]) -> tuple[Any, jax.Array]:
                parts = parameter_gradients(of, examples, route)
                found = damped_products(blocks, [for_one_output(part.form) for part in parts], parts, damping)
                return (), jnp.broadcast_to(found[:, 0, 0], len(examples[0]))

            return in_chunks(of_some, of.examples, route)[1]

        return prepared.chunks.results(of, compute)

    return (
        jnp.concatenate([of_batch(prepared.params, prepared.factors, *batch) for batch in prepared.data])
        / prepared.divisor
    )


class _Prepared:
    """The data, their curvature, and the loss of an example.

    Attributes:
      params: the parameters.
      data: the batches.
      divisor: the number of examples, or one if D is the curvature of the sum over them.
      factors: the curvature.
      of_call: as `per_example` returns it.
      bare: whether there is one argument with parameters.
      chunks: the number of examples at a time.
    """

    def __init__(
        self,
        api: str,
        model: Callable[..., Any],
        loss: Callable[..., Any],
        params: Any,
        data: Any,
        curvature: Structure | KroneckerFactors,
        damping: Any,
        argnums: Argnums,
        fisher: Fisher,
        weight_sharing: WeightSharing,
        key: Any,
        chunk_size: int | None,
        said: Reduction,
    ) -> None:
        check_callable(api, loss, "loss")
        if not isinstance(damping, Tracer) and not 0 < damping < math.inf:
            raise ValueError(f"{api}: damping must be a positive number, but got {damping}.")
        self.params, self.data = snapshot(params), batches_of(api, data)
        size = sum(map(size_of, self.data))
        self.divisor = 1 if said.is_sum else size
        self.bare = not isinstance(argnums, (tuple, list))
        self.chunks = Chunks(api, chunk_size, None)

        def of_batch(params: Any, x: Any, y: Any) -> Any:
            return loss(model(params, x), y)

        self.of_call = per_example(api, of_batch, argnums, (1, 2))
        of = self.of_call(False, True, None, (self.params, *self.data[0]), {})
        said.check_data(self.params, self.data)
        if isinstance(curvature, KroneckerFactors):
            shapes = [of.parameters[i].shape for i in self.numbers(of)]
            if (
                curvature.structure != jax.tree.structure(of.numbers(self.bare))
                or [block.shape for block in curvature.blocks] != shapes
            ):
                raise ValueError(f"{api}: curvature has the factors of other parameters.")
            self.factors = curvature
        else:
            check_choice(api, "curvature", curvature, get_args(Structure))
            options: dict[str, Any] = {"argnums": argnums, "fisher": fisher, "weight_sharing": weight_sharing}
            mean = factors_of_data(api, model, loss, self.params, self.data, curvature, key=key, **options)
            self.factors = size * mean if said.is_sum else mean

    def numbers(self, of: PerExample) -> list[int]:
        """Return the index of the parameter of each block."""
        return jax.tree.leaves(of.numbers(self.bare))

    def in_order(self, of: PerExample, tree: Any) -> list[jax.Array]:
        """Return the leaves of a pytree like the gradients in the order of the parameters."""
        found = dict(zip(self.numbers(of), jax.tree.leaves(tree), strict=True))
        return [found[i] for i in range(len(of.parameters))]


def _some(tree: Any, start: int, size: int) -> Any:
    return jax.tree.map(lambda x: x[start : start + size], tree)
