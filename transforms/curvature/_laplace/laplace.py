"""`laplace`: a normal distribution around trained parameters, whose precision is the curvature of the loss."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.tree_util import register_dataclass

from ..._core.arguments import check_callable, check_choice, check_count, describe
from ..._core.compat import Tracer
from ..._core.eigh import eigh
from ..._core.memory import level_of_the_user
from ..._core.prediction import Kind, Prediction, assumed_kind, of_probabilities
from ..._core.prng import check_key
from ..._models.split_model import is_module
from ...privacy._per_example.gradient_forms import wide
from .._data import batches_of, check_definite, factors_of_data, size_of, snapshot
from .._inner_products import products_of_outputs
from .._kronecker import KroneckerFactors
from .._outputs import Fisher
from .._reduction import Reduction, ReductionName
from .._squares import WeightSharing
from .files import read, written
from .spectrum import Spectrum, lanczos, numbers_of, parameters_of, tree_of, whole

if TYPE_CHECKING:
    from ....ensemble import Ensemble

PosteriorStructure = Literal["kfac", "ekfac", "diagonal", "full", "last_layer", "ggn_lanczos"]
# The most numbers of the Jacobians of some examples at a time.
_NUMBERS = 2**25
_STATIC: Any = {"static": True}


@register_dataclass
@dataclass(frozen=True, repr=False)
class Laplace:
    """A normal distribution over parameters: a pytree. `laplace` returns it.

    Its mean are the trained parameters θ, and its precision is size × D + prior_precision × I.

    Attributes:
      params: θ, as they were given.
      curvature: D, the curvature of the mean loss, by its eigenvectors.
      prior_precision: the inverse variance of each parameter before the data were seen, whose mean is zero.
      mean_loss: the mean loss at θ.
      size: the number of examples.
      model: the model.
      argnums: the parameters that are uncertain.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms.curvature import laplace
      >>> model, loss = lambda w, x: x @ w, lambda o, y: 0.5 * jnp.mean((o - y) ** 2)
      >>> of = laplace(model, loss, jnp.array([2.0]), (jnp.ones((4, 1)), jnp.full(4, 2.0)), prior_precision=1.0)
      >>> variance = of.predict(jnp.array([[1.0], [3.0]]), kind="regression").variance  # x² / (4 + 1)
      >>> print([f"{each:.3f}" for each in variance])
      ['0.200', '1.800']
    """

    params: Any
    curvature: KroneckerFactors | Spectrum
    prior_precision: jax.Array
    mean_loss: jax.Array
    size: int = field(metadata=_STATIC)
    model: Callable[..., Any] = field(metadata=_STATIC)
    argnums: Any = field(metadata=_STATIC)

    def __repr__(self) -> str:
        """Return the kind of curvature and the sizes."""
        numbers = sum(x.size for x in self._parameters()[0].parameters)
        kind = type(self.curvature).__name__
        return (
            f"Laplace({numbers:,} parameters, {kind}, {self.size:,} examples, prior precision {self.prior_precision})"
        )

    def predict(
        self, x: Any, *, kind: Kind | None = None, samples: int = 100, key: jax.Array | None = None
    ) -> Prediction:
        """Predict with the model's linearization at θ, whose outputs are normal.

        Args:
          x: inputs, shape (batch, ...).
          kind: "regression": outputs are values, (batch, ...); "binary": logits of yes or no, (batch, ...);
            "classification": logits, (batch, ..., classes). None is "classification", with a warning.
          samples: the number of draws of the outputs, which are the members of the prediction.
          key: the key of the draws; a fixed one without it.

        Returns:
          A `Prediction`, as an ensemble's. For regression, `mean` is the model's output at θ, and `variance` that of
          the function, J Σ Jᵀ; the noise of observations is not in it. For the others, the mean of the draws'
          probabilities.

        Raises:
          TypeError, ValueError: as for a call of `ggn_diagonal`; an unknown kind; a key that is none.

        Cost:
          For each output a backward pass. With Kronecker factors, products of activations and of cotangents with the
          eigenvectors, and of gradients at several positions for one example at a time; otherwise the gradients of
          some examples, and their products with the root of the covariance.
        """
        kind = assumed_kind("Laplace.predict") if kind is None else kind
        check_choice("Laplace.predict", "kind", kind, get_args(Kind))
        key = jax.random.key(0) if key is None else key
        check_key("Laplace.predict", key)
        mean, covariance = _outputs(self, x)
        eigen, vectors = jax.vmap(eigh)(covariance)
        root = vectors * jnp.sqrt(jnp.maximum(eigen, 0))[:, None]
        noise = jax.random.normal(key, (samples, *root.shape[:-1]), root.dtype)
        draws = mean + jnp.einsum("nbc,bdc->nbd", noise, root, precision="highest").reshape(samples, *mean.shape)
        if kind == "regression":
            variance = jnp.diagonal(covariance, axis1=1, axis2=2).reshape(mean.shape)
            return Prediction(mean, variance, None, None, draws)
        if kind == "binary":
            draws = jnp.stack([jnp.zeros_like(draws), draws], axis=-1)
        return of_probabilities(jax.nn.softmax(draws, axis=-1))

    def sample(self, key: jax.Array, n: int) -> Ensemble[Any]:
        """Draw parameters; return the models that have them, as an ensemble.

        Args:
          key: the key of the draws.
          n: the number of members.

        Returns:
          An `Ensemble` of modules if `params` is a module, else of functions like `model`.

        Raises:
          TypeError, ValueError: a key that is none; no positive number of members.
        """
        from ....ensemble import Ensemble

        check_key("Laplace.sample", key)
        of, _ = self._parameters()
        like = tree_of(of, [x.astype(wide(x.dtype)) for x in of.parameters])
        flat, unravel = ravel_pytree(like)

        def drawn(noise: jax.Array) -> Ensemble[Any]:
            member = self._moved(self._root(unravel(noise)))
            return Ensemble.stack([member]) if self._is_module() else Ensemble.from_apply(self.model, [member])

        # One program for any number of members: a draw at a time, as an ensemble of one.
        noises = jax.random.normal(key, (n, flat.size), flat.dtype)
        members = jax.jit(lambda noises: lax.map(drawn, noises))(noises)
        return jax.tree.map(lambda x: x[:, 0], members)

    def log_marginal_likelihood(self) -> jax.Array:
        """Return the logarithm of the evidence, log p(data), in nats.

        It counts size × mean loss as the negative log-likelihood of the data, so that a loss without its constants
        (squared errors without log 2π) gives an evidence without them. With P parameters it is
        -size × mean loss + P/2 log(prior) - prior/2 ‖θ‖² - 1/2 log det(size × D + prior × I).
        """
        values, theta = self.size * self.curvature.eigenvalues(), self._theta()
        prior = self.prior_precision
        penalty = prior * jnp.vdot(theta, theta) + jnp.log(values / prior + 1).sum()
        return -self.size * self.mean_loss - 0.5 * penalty

    def fit_prior(self) -> Laplace:
        """Return the distribution with the prior precision of the largest evidence.

        It is where prior × ‖θ‖² equals the number of parameters that the data determine, Σ e / (e + prior) with the
        eigenvalues e of size × D (MacKay 1992). The left side rises and the right side falls with the prior, so there
        is one such number, which is found by bisection.

        Raises:
          ValueError: all parameters are zero, so that every prior is worse than a larger one.

        Warns:
          UserWarning: as `laplace`.
        """
        values, theta = self.size * self.curvature.eigenvalues(), self._theta()
        square = jnp.vdot(theta, theta)
        if not isinstance(square, Tracer) and square == 0:
            raise ValueError("Laplace.fit_prior: all parameters are zero; pass a prior_precision.")
        most = jnp.log(theta.size / square)
        bounds = most - 30 * math.log(10), most

        def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            middle = (bounds[0] + bounds[1]) / 2
            prior = jnp.exp(middle)
            too_small = (values / (values + prior)).sum() > prior * square
            return jnp.where(too_small, middle, bounds[0]), jnp.where(too_small, bounds[1], middle)

        low, high = lax.fori_loop(0, 60, halve, bounds)
        return _warned(replace(self, prior_precision=jnp.exp((low + high) / 2)))

    def save(self, path: str) -> None:
        """Write the distribution to a file in the safetensors format, atomically.

        Args:
          path: the path of the file.

        Raises:
          ModuleNotFoundError: the extra is missing: `pip install 'plurax[files]'`.
          OSError: the file cannot be written.
        """
        arrays = jax.tree.leaves(self.params)
        scalars = {"prior_precision": self.prior_precision, "mean_loss": self.mean_loss}
        written("Laplace.save", Path(path), self.size, arrays, self.curvature, scalars)

    @staticmethod
    def load(path: str, model: Callable[..., Any], params: Any, *, wrt: Any = None) -> Laplace:
        """Read a distribution that `save` wrote.

        Args:
          path: the path of the file.
          model: the model.
          params: parameters or a module of the same architecture, whose values are replaced.
          wrt: as for `laplace`.

        Raises:
          ValueError: the file is damaged, was written by a later version, or has other parameters.
        """
        leaves, structure = jax.tree.flatten(params)
        argnums = _argnums(wrt)
        size, arrays, curvature, scalars = read("Laplace.load", Path(path), leaves)
        params = jax.tree.unflatten(structure, arrays)
        made = Laplace(params, curvature, scalars["prior_precision"], scalars["mean_loss"], size, model, argnums)
        of, structure = made._parameters()
        shapes = [jnp.shape(x) for x in of.parameters]
        if isinstance(curvature, Spectrum):
            fits = curvature.vectors.shape[1] == sum(map(math.prod, shapes))
        else:
            fits = [block.shape for block in curvature.blocks] == shapes
        if not fits:
            raise ValueError(f"Laplace.load: {path} has the curvature of other parameters; pass its model and wrt.")
        return replace(made, curvature=replace(curvature, structure=structure))

    def _root(self, v: Any) -> Any:
        """Return the product of the root of the covariance with a pytree like the gradients."""
        scale = math.sqrt(self.size)
        found = self.curvature.sqrt_solve(v, self.prior_precision / self.size)
        return jax.tree.map(lambda x: x / scale, found)

    def _parameters(self, x: Any = None) -> tuple[Any, Any]:
        """Return the model for each example of inputs, or of none, and the structure of its gradients."""
        return parameters_of("laplace", self.model, self.params, jnp.zeros((0,)) if x is None else x, self.argnums)

    def _theta(self) -> jax.Array:
        """Return the uncertain parameters as a vector."""
        of, _ = self._parameters()
        return ravel_pytree([x.astype(wide(x.dtype)) for x in of.parameters])[0]

    def _is_module(self) -> bool:
        from flax import nnx

        return isinstance(self.params, nnx.Module)

    def _moved(self, change: Any) -> Any:
        """Return the parameters, or a module, with a change of those that are uncertain."""

        def add(x: Any, by: Any) -> Any:
            return (x + by).astype(x.dtype)

        if not self._is_module():
            leaves, tree = jax.tree.flatten(self.params)
            changes = iter(jax.tree.leaves(change))
            floating = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves]
            moved = [add(x, next(changes)) if isf else x for x, isf in zip(leaves, floating, strict=True)]
            return jax.tree.unflatten(tree, moved)
        from flax import nnx

        chosen = self.argnums.filter if isinstance(self.argnums, nnx.DiffState) else nnx.Param
        graphdef, state, *rest = nnx.split(nnx.clone(self.params), chosen, ...)
        new = [add(*pair) for pair in zip(jax.tree.leaves(state), jax.tree.leaves(change), strict=True)]
        return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), new), *rest)


@jax.jit
def _outputs(posterior: Laplace, x: Any) -> tuple[jax.Array, jax.Array]:
    """Return the outputs at θ, (batch, *out), and their covariance, (batch, outputs, outputs)."""
    of, _ = posterior._parameters(x)
    if isinstance(posterior.curvature, KroneckerFactors):
        blocks = dict(zip(numbers_of(of), posterior.curvature.blocks, strict=True))
        values, products = products_of_outputs(
            "Laplace.predict", of, blocks, posterior.prior_precision / posterior.size
        )
        return values.astype(products.dtype), products / posterior.size

    def of_example(example: list[Any]) -> tuple[jax.Array, jax.Array]:
        values, pull, _ = jax.vjp(lambda p: of.loss(p, example), of.parameters, has_aux=True)

        def row(seed: jax.Array) -> jax.Array:
            gradients = pull(seed.reshape(values.shape).astype(values.dtype))[0]
            return ravel_pytree(posterior._root(tree_of(of, [g.astype(wide(g.dtype)) for g in gradients])))[0]

        rows = jax.vmap(row)(jnp.eye(values.size))
        return values.astype(rows.dtype), jnp.matmul(rows, rows.T, precision="highest")

    out = of.program.closed.out_avals[0]
    numbers = math.prod(out.shape) * sum(x.size for x in of.parameters)
    at_once = max(1, min(of.size, _NUMBERS // max(1, numbers)))
    return lax.map(of_example, of.examples, batch_size=at_once)


def laplace(
    model: Callable[..., Any],
    loss: Callable[..., Any],
    params: Any,
    data: Any,
    *,
    wrt: Any = None,
    structure: PosteriorStructure = "kfac",
    prior_precision: float | jax.Array | None = None,
    fisher: Fisher = "exact",
    weight_sharing: WeightSharing = "expand",
    rank: int = 100,
    key: jax.Array | None = None,
    check_loss: bool = True,
    reduction: ReductionName = "mean",
) -> Laplace:
    """Approximate the posterior distribution of parameters by a normal one around those of a trained model.

    Args:
      model: as for `ggn_diagonal`.
      loss: as for `ggn_diagonal`, the mean negative log-likelihood: for regression half the squared error, over the
        variance of the noise.
      params: the trained parameters, a pytree or an NNX module.
      data: the training data, one tuple (x, y) with the examples along axis 0 of each array, or an iterable of such
        tuples, which is held.
      wrt: for a module, an NNX filter that selects the parameters that are uncertain; None for all.
      structure: "kfac", "ekfac" and "diagonal" have a block for each parameter; "full" has the whole Gauss-Newton
        matrix over at most 8,192 numbers, "last_layer" the same over those that `wrt` must name, and "ggn_lanczos" its
        `rank` largest eigenvalues.
      prior_precision: the inverse variance of each parameter before the data; None for the one of largest evidence.
      fisher: as for `kfac`. "exact" needs no key.
      weight_sharing: as for `kfac`.
      rank: for "ggn_lanczos".
      key: the key for "mc", and for the first vector of "ggn_lanczos"; nothing else uses it.
      check_loss: as for `ggn_diagonal`.
      reduction: "mean", or "sum" for a loss that returns the sum over the examples, as of the log-likelihoods.

    Returns:
      A `Laplace`. For an ensemble of such distributions, map over the parameters of the members with `jax.vmap`.

    Raises:
      TypeError, ValueError: as for `kfac`; an unknown structure; "last_layer" without `wrt`; a prior precision that is
        not positive; too many numbers for "full".
      ModuleNotFoundError: "ggn_lanczos" without matfree: `pip install 'plurax[curvature]'`.

    Warns:
      UserWarning: rounding may change variances by more than a percent, since some parameters are nearly dependent, and
        the prior precision is too small beside the curvature. ("ggn_lanczos", which has only the largest eigenvalues,
        is not checked.) Inputs of very different scales are no problem of their own: 1e-3 to 1e3 in float32.

    Cost:
      That of `kfac`, `ekfac` or `ggn_diagonal` over the data, and eigendecompositions; for "full" a matrix of all
      pairs of parameters; for "ggn_lanczos" `rank` vectors, and twice as many products with the matrix over all data.

    Source:
      MacKay 1992, "A Practical Bayesian Framework for Backpropagation Networks"; Daxberger et al. 2021, "Laplace
      Redux".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms.curvature import laplace
      >>> model, loss = lambda w, x: x @ w, lambda o, y: 0.5 * jnp.mean((o - y) ** 2)
      >>> of = laplace(model, loss, jnp.array([2.0]), (jnp.ones((4, 1)), jnp.full(4, 2.0)))
      >>> print(f"{of.prior_precision:.3f} {of.log_marginal_likelihood():.3f}")
      0.236 -1.916
    """
    api = "laplace"
    check_callable(api, loss, "loss")
    check_choice(api, "structure", structure, get_args(PosteriorStructure))
    if structure == "last_layer" and wrt is None:
        raise ValueError(f"{api}: structure='last_layer' needs wrt, an NNX filter that selects the last layer.")
    if wrt is not None and not is_module(params):
        raise TypeError(
            f"{api}: wrt selects variables of an NNX module, but params is {describe(params)}; leave it out, and take "
            "another structure than 'last_layer'."
        )
    if prior_precision is not None and not isinstance(prior_precision, Tracer) and not 0 < prior_precision < math.inf:
        raise ValueError(f"{api}: prior_precision must be a positive number, but got {prior_precision}.")
    if structure in ("full", "last_layer", "ggn_lanczos") and fisher != "exact":
        raise ValueError(f"{api}: structure={structure!r} has products with the exact matrix only; leave fisher out.")
    if key is not None:
        check_key(api, key)  # which is accepted where nothing is drawn, too
    check_count(api, "rank", rank)
    said = Reduction(api, model, loss, 1, check_loss, reduction)
    argnums, batches, params = _argnums(wrt), batches_of(api, data), snapshot(params)
    said.check_data(params, batches)
    size = sum(map(size_of, batches))
    curvature: KroneckerFactors | Spectrum
    if structure == "full" or structure == "last_layer":
        curvature = whole(model, loss, params, batches, argnums=argnums)
        check_definite(api, model, loss, params, batches, argnums, curvature)
    elif structure == "ggn_lanczos":
        start = jax.random.key(0) if key is None else key
        curvature = lanczos(model, loss, params, batches, rank=rank, key=start, argnums=argnums)
    else:
        options: dict[str, Any] = {"argnums": argnums, "fisher": fisher, "weight_sharing": weight_sharing, "key": key}
        curvature = factors_of_data(api, model, loss, params, batches, structure, **options).eigen()
    value = jax.jit(lambda params, x, y: loss(model(params, x), y))
    # The mean over all examples, of the means or the sums of the batches.
    weights = [(1 if said.is_sum else size_of(batch)) / size for batch in batches]
    losses = (weight * value(params, *batch) for weight, batch in zip(weights, batches, strict=True))
    mean_loss = sum(losses, jnp.zeros(()))
    found = Laplace(params, curvature, jnp.ones(()), mean_loss, size, model, argnums)
    if prior_precision is None:
        return found.fit_prior()
    return _warned(replace(found, prior_precision=jnp.asarray(prior_precision, mean_loss.dtype)))


def _warned(of: Laplace) -> Laplace:
    """Return a distribution; warn if rounding may change its variances by more than a percent."""
    curvature, damping = of.curvature, of.prior_precision / of.size
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((curvature, damping))):
        return of
    if isinstance(curvature, Spectrum) and curvature.vectors.shape[0] < curvature.vectors.shape[1]:
        return of
    inflation, largest = _inflation(curvature, damping)
    # D is rounded in its own dtype, and its eigenvalues in float64.
    rounding = max(float(jnp.finfo(largest.dtype).eps * inflation), float(np.finfo(np.float64).eps * largest / damping))
    if rounding > 0.01:
        prior = f"prior_precision={of.prior_precision:.3g}"
        why = f"parameters are nearly dependent, and {prior} is small beside the curvature"
        cure = "pass a larger one, or parameters and data in float64 (with jax.enable_x64(True))"
        warnings.warn(
            f"laplace: rounding may change variances by {min(rounding, 1):.0%}, since {why}; {cure}.",
            stacklevel=level_of_the_user(),
        )
    return of


@jax.jit
def _inflation(curvature: KroneckerFactors | Spectrum, damping: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest (D + damping I)ᵢᵢ × ((D + damping I)⁻¹)ᵢᵢ over all parameters, and the largest eigenvalue.

    It is the factor by which the variance of a parameter is larger because the others are uncertain too, whatever the
    scales of the parameters are: the inverse distance from a matrix in which one depends on the others.
    """

    def diagonal(fun: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
        if isinstance(curvature, Spectrum):
            return [jnp.matmul(fun(curvature.values), jnp.square(curvature.vectors), precision="highest")]
        blocks: tuple[Any, ...] = curvature.eigen().blocks
        return [replace(x, values=fun(x.values)).diagonal() for x in blocks]

    both = zip(diagonal(lambda e: e + damping), diagonal(lambda e: 1 / (e + damping)), strict=True)
    return jnp.stack([(one * other).max() for one, other in both]).max(), curvature.eigenvalues().max()


def _argnums(wrt: Any) -> Any:
    if wrt is None:
        return 0
    from flax import nnx

    return nnx.DiffState(0, wrt)
