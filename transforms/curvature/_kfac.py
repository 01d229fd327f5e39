"""`kfac`: Kronecker factors of the Gauss-Newton matrix of a model and a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from .._core.arguments import Argnums, check_choice, wrap_like
from .._statistics.statistic import Chunks, Statistic, in_chunks
from .._statistics.use_gradients import OutputGradients, UseGradients
from ..privacy._check_loss import LossCheck, line_of
from ..privacy._per_example.gradient_forms import Dense, RowSparse, widened
from ..privacy._per_example.loss import on_any_mesh
from ..privacy._per_example.methods import MethodChoice
from ._blocks import Block, EigenBlock, KroneckerBlock, folded
from ._kronecker import KroneckerFactors
from ._outputs import Fisher, ModelAndLoss, OfBatch
from ._reduction import Reduction, ReductionName
from ._sides import parameter_gradients
from ._squares import WeightSharing, one_hot_moments, second_moments

# A parameter without a Kronecker product gets an exact block if it has at most this many numbers.
_LARGEST_BLOCK = 1024


# Each example's gradients of a parameter for each column, one for each role, with the axes that are their sides.
Parts = Sequence[tuple[OutputGradients, Any]]
# A function from a block by its eigenvectors, and gradients, to the sum over examples of eigenvalues.
ValuesOf = Callable[[EigenBlock, Parts], jax.Array]


class CurvatureReport(NamedTuple):
    """What the block of each parameter is; `print` it.

    Attributes:
      hessian: the form of the Hessian of the loss by the outputs.
      blocks: the path of each parameter, and its block in words.
      loss: what `check_loss` found; None if it was not called.
    """

    hessian: str
    blocks: tuple[tuple[str, str], ...]
    loss: LossCheck | None = None

    def __str__(self) -> str:
        """Return one line for the Hessian, one for each parameter, and one for the loss."""
        lines = map(": ".join, self.blocks)
        return "\n".join([f"Hessian of the loss by the outputs: {self.hessian}", *lines, *line_of(self.loss)])


def kfac(
    model: Callable[..., Any],
    loss: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    fisher: Fisher = "mc",
    weight_sharing: WeightSharing = "expand",
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
    check_loss: bool = True,
    reduction: ReductionName = "mean",
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
      check_loss: as for `ggn_diagonal`.
      reduction: as for `ggn_diagonal`.

    Returns:
      A function of (params, x, y, key=None) that returns `KroneckerFactors` in float32 or wider. "mc" needs the key.
      Sides with more than 4,096 rows are kept as their diagonal. All uses of a parameter have one product; that of a
      matrix and its transpose, or of a table whose rows are read and multiplied, has the trace of the sum of both. A
      parameter without a Kronecker product (a bias, a scale, one that is used in another way) has an exact block, or
      the exact diagonal if it has more than 1,024 numbers. Its `.explain(*args)` reports which.

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
    options = fisher, weight_sharing, chunk_size, memory_budget, check_loss, reduction
    return kronecker_factors("kfac", model, loss, argnums, *options)


def kronecker_factors(
    api: str,
    model: Callable[..., Any],
    loss: Callable[..., Any],
    argnums: Argnums,
    fisher: Fisher,
    weight_sharing: WeightSharing,
    chunk_size: int | None,
    memory_budget: int | str | None,
    check_loss: bool,
    reduction: ReductionName,
    values: ValuesOf | None = None,
) -> Statistic[CurvatureReport]:
    """Return the function that `kfac` returns; with `values`, that of `ekfac`."""
    check_choice(api, "fisher", fisher, get_args(Fisher))
    check_choice(api, "weight_sharing", weight_sharing, get_args(WeightSharing))
    both, chunks = ModelAndLoss(api, model, loss, argnums), Chunks(api, chunk_size, memory_budget, sums=True)
    said = Reduction(api, model, loss, both.position, check_loss, reduction)
    bare = not isinstance(argnums, (tuple, list))

    def prepare(args: tuple[Any, ...], key: Any, basis: Any) -> tuple[OfBatch, Callable[[MethodChoice], Any], Any]:
        """Return the outputs and the loss of a call, a function that computes the blocks by a route, and their tree."""
        batch, key = both.of(args, key, samples=fisher == "mc")
        of = batch.outputs
        numbers = of.numbers(bare)
        if basis is not None and values is None:
            raise TypeError(f"{api}: pass basis to ekfac; {api} has no eigenvectors.")
        given = None if basis is None else _from_basis(api, basis, numbers, [x.shape for x in of.parameters])

        def total(route: MethodChoice, of_leaf: Callable[[int, Parts], Any]) -> Any:
            """Return the sums over examples of what `of_leaf` returns for each parameter."""

            def of_some(some: Sequence[Any]) -> tuple[Any, tuple[()]]:
                return _of_examples(batch, some, route, fisher, key, of_leaf), ()

            return in_chunks(of_some, batch.examples, route)[0]

        def compute(route: MethodChoice) -> Mapping[int, Block]:
            """Return the block of each parameter."""

            def blocks(leaf: int, parts: Parts) -> list[KroneckerBlock]:
                return [_block(part, axes, of.parameters[leaf].shape, weight_sharing) for part, axes in parts]

            def averaged(sums: list[KroneckerBlock]) -> KroneckerBlock:
                return folded([block.averaged(of.size) for block in sums])

            known = given
            if known is None:
                found = {leaf: averaged(sums) for leaf, sums in total(route, blocks).items()}
                if values is None:
                    return found
                known = {leaf: x if x.exact else x.eigen() for leaf, x in found.items()}
            corrected = {leaf: x for leaf, x in known.items() if isinstance(x, EigenBlock)}

            def values_or_blocks(leaf: int, parts: Parts) -> Any:
                if values is not None and leaf in corrected:
                    return values(corrected[leaf], parts)
                return () if given is None else blocks(leaf, parts)

            result: dict[int, Block] = {}
            for leaf, sums in total(route, values_or_blocks).items():
                if leaf in corrected:
                    result[leaf] = replace(corrected[leaf], values=sums / of.size)
                else:
                    result[leaf] = known[leaf] if given is None else averaged(sums)
            return result

        return batch, compute, numbers

    def columns(batch: OfBatch) -> int:
        """Return the number of gradients of each example."""
        return batch.hessian.columns if fisher == "exact" else 1

    def factors(*args: Any, key: Any = None, basis: Any = None) -> KroneckerFactors:
        """Return the factors for these arguments."""
        batch, compute, numbers = prepare(args, key, basis)
        found = chunks.with_columns(columns(batch)).results(batch.outputs, compute)
        batch.check_definite(found)
        mean = KroneckerFactors(tuple(found[i] for i in jax.tree.leaves(numbers)), jax.tree.structure(numbers))
        return batch.outputs.size * mean if said.is_sum else mean

    def explain(*args: Any, key: Any = None, basis: Any = None) -> CurvatureReport:
        """Return the report for these arguments."""
        batch, compute, _ = prepare(args, key, basis)
        found = jax.eval_shape(lambda: chunks.with_columns(columns(batch)).results(batch.outputs, compute))
        blocks = ((name, found[i].form) for i, name in enumerate(batch.outputs.names()))
        return CurvatureReport(batch.hessian.form, tuple(blocks))

    batched = (both.position, both.position + 1)
    computed = on_any_mesh(api, model, batched, factors, sum_in=lambda sums: sums)
    explained = on_any_mesh(api, model, batched, explain)

    def checked(*args: Any, **options: Any) -> KroneckerFactors:
        said.check(args)
        return computed(*args, **options)

    def report(*args: Any, **options: Any) -> CurvatureReport:
        found = said.check(args)
        return explained(*args, **options)._replace(loss=found)

    return Statistic(wrap_like(model, api, checked), report)


def _from_basis(api: str, basis: Any, numbers: Any, shapes: Sequence[tuple[int, ...]]) -> dict[int, Block]:
    """Return the blocks of a basis by the indices of their parameters, by eigenvectors if they are not exact."""
    if not isinstance(basis, KroneckerFactors) or basis.structure != jax.tree.structure(numbers):
        raise ValueError(f"{api}: basis must be the KroneckerFactors of the same parameters.")
    found = dict(zip(jax.tree.leaves(numbers), basis.blocks, strict=True))
    if any(block.shape != shapes[i] for i, block in found.items()):
        raise ValueError(f"{api}: basis has blocks of parameters with other shapes.")
    return {i: x if isinstance(x, KroneckerBlock) and x.exact else x.eigen() for i, x in found.items()}


def _of_examples(
    batch: OfBatch,
    examples: Sequence[Any],
    route: MethodChoice,
    fisher: Fisher,
    key: Any,
    of_leaf: Callable[[int, Parts], Any],
) -> dict[int, Any]:
    """Return what `of_leaf` returns for the gradients of each parameter, for some examples."""
    of = batch.outputs
    dtype = of.program.closed.out_avals[0].dtype

    def use(inputs: Sequence[Any], seeds: jax.Array) -> list[UseGradients]:
        return parameter_gradients(of, inputs, route, seeds.astype(dtype))

    parts: dict[int, list[tuple[OutputGradients, Any]]] = {}
    if fisher != "exact" or batch.hessian.columns:
        found, groups = batch.gradients(examples, fisher, 1, key, use, mapped=route.method != "vmap")
        for part, group in zip(found, groups, strict=True):
            (leaf,) = group.leaves
            parts.setdefault(leaf, []).append((part, group.axes))
    for leaf, x in enumerate(of.parameters):  # those that no output depends on
        if leaf not in parts:
            zeros = jnp.zeros((len(examples[0]), *x.shape), x.dtype)
            parts[leaf] = [(OutputGradients(Dense(zeros), [zeros], [False]), None)]
    return {leaf: of_leaf(leaf, some) for leaf, some in sorted(parts.items())}


def _block(part: OutputGradients, axes: Any, shape: tuple[int, ...], sharing: WeightSharing) -> KroneckerBlock:
    """Return the block of a parameter in one role, with sums over the examples in place of means."""
    form, arrays, mapped = part
    if isinstance(form, Dense):
        each = widened(arrays[0]).reshape(-1, *shape)
        if each[0].size > _LARGEST_BLOCK:
            return KroneckerBlock.of_matrix(jnp.square(each).sum(0).ravel(), shape)
        flat = each.reshape(len(each), -1)
        return KroneckerBlock.of_matrix(jnp.matmul(flat.T, flat, precision="highest"), shape)
    # An axis for the columns of the root, after that of the examples.
    left, right = (x if has else x[:, None] for x, has in zip(arrays, mapped, strict=True))
    g = second_moments(widened(right), sharing, mean=False)
    if isinstance(form, RowSparse):
        a = one_hot_moments(left[:, 0], form.height, sharing).astype(g.dtype)
    else:
        a = second_moments(widened(left), sharing, mean=True) / left.shape[1]
    return KroneckerBlock(axes, shape, a, g, jnp.ones((), a.dtype))
