"""`kfac`: Kronecker factors of the Gauss-Newton matrix of a model and a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from .._core.arguments import Argnums, check_choice, wrap_like
from .._core.jaxpr import IDENTITIES
from .._statistics.statistic import Chunks, Statistic, in_chunks
from .._statistics.use_gradients import OutputGradients, UseGradients, one_at_a_time
from ..privacy._per_example.gradient_forms import Dense, RowSparse, widened
from ..privacy._per_example.loss import on_any_mesh
from ..privacy._per_example.methods import MethodChoice
from ..privacy._per_example.norms import ExampleGradients
from ..privacy._per_example.parameter_uses import ParameterUse
from ..privacy._per_example.rules import sides_of_product, takes_rows
from ._kronecker import Block, DiagonalBlock, FullBlock, KroneckerBlock, KroneckerFactors
from ._outputs import Fisher, ModelAndLoss, OfBatch

WeightSharing = Literal["expand", "reduce"]
# Operations on a parameter that keep its axes. Of their elements they change at most the sign of all, or the dtype.
_KEEPING_AXES = frozenset(["convert_element_type", "neg", *IDENTITIES])
# A larger side of a Kronecker product, such as a vocabulary, is kept as its diagonal.
_LARGEST_SIDE = 4096
# A parameter without a Kronecker product gets an exact block if it has at most this many numbers.
_LARGEST_BLOCK = 1024


class CurvatureReport(NamedTuple):
    """What the block of each parameter is; `print` it.

    Attributes:
      hessian: the form of the Hessian of the loss by the outputs.
      blocks: the path of each parameter, and its block in words.
    """

    hessian: str
    blocks: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Return one line for the Hessian and one for each parameter."""
        return "\n".join([f"Hessian of the loss by the outputs: {self.hessian}", *map(": ".join, self.blocks)])


def kfac(
    model: Callable[..., Any],
    loss: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    fisher: Fisher = "mc",
    weight_sharing: WeightSharing = "expand",
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Statistic[CurvatureReport]:
    """Compute Kronecker factors of the Gauss-Newton matrix of a model, for each parameter.

    The matrix is as for `ggn_diagonal`. For a matrix that is multiplied with inputs a, and whose results have
    gradients g, its block is approximated by A ⊗ G with the means A of aaᵀ and G of ggᵀ over the examples.

    Args:
      model: as for `ggn_diagonal`.
      loss: as for `ggn_diagonal`.
      argnums: as for `ggn_diagonal`.
      fisher: the gradients g: "exact" sums over all columns of a root of H, "mc" draws one H^(1/2) ε for each example,
        with normal ε, and "empirical" takes the gradient of the loss.
      weight_sharing: if a parameter is used at several positions of an example (tokens, pixels, steps of time),
        "expand" takes A as the mean of aaᵀ over positions too and G as the sum of ggᵀ. "reduce" takes the mean of a
        and the sum of g over positions first.
      chunk_size: the number of examples to compute at a time.
      memory_budget: bytes, or a string as for `vmap`: the largest chunk whose compiled temporaries fit.

    Returns:
      A function of (params, x, y, key=None) that returns `KroneckerFactors` in float32 or wider. "mc" needs the key.
      Sides with more than 4,096 rows are kept as their diagonal. A parameter without a Kronecker product (a bias, a
      scale, one that is used in another way, or in several different ways) has an exact block, or the exact diagonal
      if it has more than 1,024 numbers. Its `.explain(*args)` reports which.

    Raises:
      TypeError, ValueError: as for `ggn_diagonal`; unknown options.

    Cost:
      That of `ggn_diagonal` for one sample ("mc", "empirical") or for each column ("exact"), and products of
      activations with themselves and of gradients with themselves.

    Source:
      Martens & Grosse 2015, arXiv 1503.05671; for convolutions Grosse & Martens 2016, arXiv 1602.01407; "expand" and
      "reduce" Eschenhagen et al. 2023, arXiv 2311.00636.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms.curvature import kfac
      >>> factors = kfac(lambda w, x: x @ w, lambda o, y: 0.5 * jnp.mean((o - y) ** 2), fisher="exact")
      >>> print(factors(jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.zeros((2, 1))).dense())
      [[5. 1.]
       [1. 2.]]
    """
    api = "kfac"
    check_choice(api, "fisher", fisher, get_args(Fisher))
    check_choice(api, "weight_sharing", weight_sharing, get_args(WeightSharing))
    both, chunks = ModelAndLoss(api, model, loss, argnums), Chunks(api, chunk_size, memory_budget, sums=True)
    bare = not isinstance(argnums, (tuple, list))

    def prepare(args: tuple[Any, ...], key: Any) -> tuple[OfBatch, Callable[[MethodChoice], Any]]:
        """Return the outputs and the loss of a call, and a function that computes the blocks by a route."""
        batch, key = both.of(args, key, samples=fisher == "mc")

        def compute(route: MethodChoice) -> Any:
            def blocks(some: Sequence[Any]) -> tuple[Any, tuple[()]]:
                return _blocks(batch, some, route, fisher, key, weight_sharing), ()

            return in_chunks(blocks, batch.examples, route)[0]

        return batch, compute

    def factors(*args: Any, key: Any = None) -> KroneckerFactors:
        """Return the factors for these arguments."""
        batch, compute = prepare(args, key)
        of = batch.outputs
        # The parameters in the structure of their gradients, which may have them in another order, or without some.
        numbers = of.gradients(list(range(len(of.parameters))), bare)
        sums = chunks.results(of, compute)
        batch.check_definite(sums)
        found = {i: block.scaled(1 / of.size) for i, block in sums.items()}
        blocks = (_with_mass(found[i], 1.0) for i in jax.tree.leaves(numbers))
        return KroneckerFactors(tuple(blocks), jax.tree.structure(numbers))

    def explain(*args: Any, key: Any = None) -> CurvatureReport:
        """Return the report for these arguments."""
        batch, compute = prepare(args, key)
        found = jax.eval_shape(lambda: chunks.results(batch.outputs, compute))
        blocks = ((name, found[i].form) for i, name in enumerate(batch.outputs.names()))
        return CurvatureReport(batch.hessian.form, tuple(blocks))

    batched = (both.position, both.position + 1)
    return Statistic(
        wrap_like(model, api, on_any_mesh(api, model, batched, factors)), on_any_mesh(api, model, batched, explain)
    )


def _with_mass(block: Block, mass: float) -> Block:
    return replace(block, mass=jnp.full_like(block.mass, mass)) if isinstance(block, KroneckerBlock) else block


def _blocks(
    batch: OfBatch, examples: Sequence[Any], route: MethodChoice, fisher: Fisher, key: Any, sharing: WeightSharing
) -> dict[int, Block]:
    """Return the block of each parameter, with sums over some examples in place of means."""
    of = batch.outputs
    dtype = of.program.closed.out_avals[0].dtype

    def use(inputs: Sequence[Any], seeds: jax.Array) -> list[UseGradients]:
        seeds = seeds.astype(dtype)
        if route.method == "vmap":
            each = one_at_a_time(of, inputs, seeds)
            return [UseGradients(frozenset([i]), None, Dense(x)) for i, x in enumerate(each)]
        return _in_forms(ExampleGradients(of.program, inputs, seed=seeds, factors=True))

    found: dict[int, Block] = {}
    if fisher != "exact" or batch.hessian.columns:
        parts, groups = batch.gradients(examples, fisher, 1, key, use, mapped=route.method != "vmap")
        for part, group in zip(parts, groups, strict=True):
            (leaf,) = group.leaves
            found[leaf] = _block(part, group.axes, of.parameters[leaf].shape, sharing)
    for leaf, x in enumerate(of.parameters):  # those that no output depends on
        if leaf not in found:
            found[leaf] = DiagonalBlock(jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)))
    return found


def _in_forms(found: ExampleGradients) -> list[UseGradients]:
    """Return the gradients of each parameter: as factors, with its axes, or materialized."""
    result: list[UseGradients] = []
    materialized: dict[int, Any] = {}
    for group, forms in found.groups:
        leaves = frozenset[int]().union(*(found.uses[n].value.leaves for n in group))
        alone = sum(not leaves.isdisjoint(found.uses[n].value.leaves) for n in range(len(found.uses))) == len(group)
        # Several uses have one product if they multiply the same axes: then positions of one are like those of another.
        every = {_axes(found.uses[n]) for n in group}
        if forms is not None and len(forms) == len(leaves) == len(every) == 1 and alone:
            ((n, form),), (axes,) = forms.items(), every
            if axes is not None and not isinstance(form, Dense):
                result.append(UseGradients(leaves, n, form, axes))
                continue
        for leaf, x in found.of_leaves(group).items():
            materialized[leaf] = materialized.get(leaf, 0) + x
    return result + [UseGradients(frozenset([leaf]), None, Dense(x)) for leaf, x in materialized.items()]


def _axes(use: ParameterUse) -> Any:
    """Return the axes of the parameter that are the stack, p and d of its form; None if these are not whole axes."""
    name, ndim = use.eqn.primitive.name, len(use.aval.shape)
    if name == "conv_general_dilated" and use.operand == 1 and use.eqn.params["feature_group_count"] == 1:
        spec = use.eqn.params["dimension_numbers"].rhs_spec
        axes: Any = ((), (*spec[2:], spec[1]), spec[:1])
    elif name == "dot_general":
        axes = sides_of_product(use)
    elif takes_rows(use):
        axes = ((), (0,), tuple(range(1, ndim)))
    else:
        return None
    found = _moved_axes(use.value.layout, ndim)
    if found is None:
        return None
    loops, order = found
    stack, p, d = (tuple(order[axis] for axis in some) for some in axes)
    return (*loops, *stack), p, d


def _moved_axes(layout: Any, ndim: int) -> tuple[list[int], list[int]] | None:
    """Return the axes of a parameter over which loops iterate, and which of its axes the axes of an operand are.

    Args:
      layout: the operations that turn the parameter into the operand, or None.
      ndim: the number of axes of the operand.
    """
    if layout is None:
        return None
    loops: list[int] = []
    order = list(range(ndim + sum(name == "slice" for name, *_ in layout)))
    for name, *given in layout:
        if name == "slice":  # the iterations of a loop
            loops.append(order.pop(0))
        elif name == "transpose":
            order = [order[axis] for axis in given[0]]
        elif name not in _KEEPING_AXES:
            return None
    return loops, order


def _block(part: OutputGradients, axes: Any, shape: tuple[int, ...], sharing: WeightSharing) -> Block:
    """Return the block of a parameter, with sums over the examples in place of means."""
    form, arrays, mapped = part
    if isinstance(form, Dense):
        each = widened(arrays[0])
        each = each.reshape(-1, *shape)
        if each[0].size > _LARGEST_BLOCK:
            return DiagonalBlock(jnp.square(each).sum(0))
        flat = each.reshape(len(each), -1)
        return FullBlock(jnp.matmul(flat.T, flat, precision="highest"), shape)
    # An axis for the columns of the root, after that of the examples.
    left, right = (x if has else x[:, None] for x, has in zip(arrays, mapped, strict=True))
    g = _squares(widened(right), sharing, mean=False)
    if isinstance(form, RowSparse):
        a = _one_hot_squares(left[:, 0], form.height, sharing).astype(g.dtype)
    else:
        a = _squares(widened(left), sharing, mean=True) / left.shape[1]
    return KroneckerBlock(a, g, jnp.asarray(len(left), a.dtype), axes, shape)


def _squares(x: jax.Array, sharing: WeightSharing, *, mean: bool) -> jax.Array:
    """Return the sum of xxᵀ over examples, columns and positions, or its diagonal: shape (stack, size, size).

    Args:
      x: shape (examples, columns, stack, positions, size).
      sharing: as for `kfac`.
      mean: whether to take the mean over positions, as for activations, instead of the sum.
    """
    positions = max(1, x.shape[3])
    if sharing == "reduce":
        x = x.sum(3, keepdims=True) / (positions if mean else 1)
    flat = x.transpose(2, 0, 1, 3, 4).reshape(x.shape[2], -1, x.shape[4])
    if x.shape[4] > _LARGEST_SIDE:
        total = jnp.square(flat).sum(1)
    elif len(flat) == 1:  # a product of matrices: XLA on CPU copies arrays with axes of size 1
        total = jnp.matmul(flat[0].T, flat[0], precision="highest")[None]
    else:
        total = jnp.einsum("snp,snq->spq", flat, flat, precision="highest")
    return total / positions if mean and sharing == "expand" else total


def _one_hot_squares(rows: jax.Array, height: int, sharing: WeightSharing) -> jax.Array:
    """Return the diagonal of the sum of aaᵀ for one-hot a: shape (stack, height).

    Args:
      rows: the row of the table at each position, shape (examples, stack, positions).
      height: the number of rows.
      sharing: as for `kfac`.
    """
    stack = jnp.broadcast_to(jnp.arange(rows.shape[1])[None, :, None], rows.shape)
    dtype = jnp.result_type(float)
    part = jnp.asarray(1 / max(1, rows.shape[2]), dtype)
    if sharing == "reduce":  # the mean of one-hot vectors has the share of each row
        part = (rows[..., :, None] == rows[..., None, :]).sum(-1) * part**2
    return jnp.zeros((rows.shape[1], height), dtype).at[stack, rows].add(part)
