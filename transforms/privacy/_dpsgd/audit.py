"""`Audit`: a lower bound on ε, from how well canaries that took part in training are told from those that did not.

Many runs train at once under `vmap`, each with a canary put in or left out at random; or one run with many canaries.
Both go through the step of `DPSGD` itself, with its clipping and its noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._calls.primals import trainable_of
from ..._models.equinox import differentiated, released
from ..._models.split_model import merge_tree
from .._per_example.clip_norms import ClipNorms
from .accounting import Ledger
from .model_loss import with_frozen, without_frozen
from .monte_carlo import log_ratios_apart, participation_ratios
from .sampling import Batch, SampledBatches, padded_sizes, selection
from .state import DPState
from .step import PrivateStep

# Gradient canaries have this many times the clip norm, so that clipping is audited too.
_LARGE = 100.0


@dataclass(frozen=True, eq=False)
class Audit:
    """The result of `DPSGD.audit`.

    Attributes:
      lower: the lower bound on ε. A mechanism that is (ε, δ)-differentially private exceeds its ε here with a
        probability of at most 1 - confidence.
      lower_gdp: a larger bound, which holds if the mechanism is Gaussian, as it should be if each example takes part in
        each step; otherwise None.
      upper: the ε of the accountant.
      delta: δ.
      confidence: the confidence of `lower`.
      threat_model: what the adversary of this audit chooses and sees.
      inside: the scores of the canaries that were put in, shape (number,).
      outside: the scores of those that were left out.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from plurax.transforms.privacy import DPSGD
      >>> dp = DPSGD(lambda w, x: jnp.sum(w * x), optax.sgd(0.1), l2_clip_norm=1.0, noise_multiplier=1.0,
      ...            target_delta=1e-3, num_examples=20, expected_batch_size=10, num_steps=2)
      >>> audit = dp.audit(jnp.zeros(3), jnp.ones((20, 3)), key=jax.random.key(0), runs=1000, progress=False)
      >>> 0 < audit.lower < audit.upper
      True
    """

    lower: float
    lower_gdp: float | None
    upper: float
    delta: float
    confidence: float
    threat_model: str
    inside: np.ndarray = field(repr=False)
    outside: np.ndarray = field(repr=False)

    def __str__(self) -> str:
        of_gaussian = "" if self.lower_gdp is None else f" (≥ {self.lower_gdp:.2f} if Gaussian)"
        bounds = f"audited: ε ≥ {self.lower:.2f}{of_gaussian} with {self.confidence:.4g} confidence"
        return f"{bounds}, accounted: ε ≤ {self.upper:.2f}, δ = {self.delta:g}\n{self.threat_model}"

    def plot(self, axes: Any = None) -> Any:
        """Show the scores of both kinds of canaries, and the lower bound beside the upper one.

        Args:
          axes: two matplotlib axes, or None for a new figure.

        Returns:
          The two axes.

        Raises:
          ModuleNotFoundError: matplotlib is missing.
        """
        if axes is None:
            try:
                from matplotlib.figure import Figure
            except ModuleNotFoundError:
                raise ModuleNotFoundError(
                    "plots need matplotlib; install it with: pip install 'plurax[plot]'"
                ) from None
            axes = Figure(figsize=(9, 3.2), layout="constrained").subplots(1, 2, width_ratios=(2, 1))
        scores, bounds = axes
        both = np.concatenate([self.outside, self.inside])
        bins = np.linspace(both.min(), both.max() + 1e-9, 41)
        for name, x, color in (("left out", self.outside, "tab:gray"), ("put in", self.inside, "tab:blue")):
            scores.hist(x, bins, density=True, alpha=0.6, color=color, label=f"{name}: {len(x):,}")
        scores.set(xlabel="score of a canary", ylabel="density")
        scores.legend(frameon=False)
        found = {"audited,\nat least": self.lower, "if Gaussian,\nat least": self.lower_gdp}
        heights = {name: x for name, x in found.items() if x is not None} | {"accounted,\nat most": self.upper}
        colors = ["tab:blue"] * (len(heights) - 1) + ["tab:gray"]
        bars = bounds.bar(list(heights), list(heights.values()), color=colors, width=0.6)
        bounds.bar_label(bars, fmt="%.2f")
        bounds.set(ylabel=f"ε at δ = {self.delta:g}", title=f"confidence {self.confidence:g}")
        bounds.margins(y=0.12)
        for ax in axes:
            ax.spines[["top", "right"]].set_visible(False)
        return axes


@dataclass(frozen=True, eq=False)
class _AuditedStep(PrivateStep):
    """The step of a run whose batches begin with the number of each example's gradient canary, or -1 for none.

    The optimizer's state is a pair of that of the optimizer and the projections of the last gradient.

    Attributes:
      directions: the gradient of each canary in units of the clip norm, with the canaries along axis 0.
    """

    directions: Any = None

    def example_loss(self, tree: Any, key: jax.Array) -> Callable[..., Any]:
        """Return the loss of an example, or one whose gradient is that of a canary, far above the clip norm."""
        of_data = super().example_loss(tree, key)

        def loss(trainable: Any, number: jax.Array, canary: jax.Array, *batch: Any) -> Any:
            canary = canary.reshape(())
            out = of_data(trainable, number, canary, *batch)
            own = jax.tree.map(lambda x, u: jnp.vdot(x, u[canary].astype(x.dtype)), trainable, self.directions)
            linear = _LARGE * self.ledger.l2_clip_norm * jnp.sum(jnp.stack(jax.tree.leaves(own)))

            def chosen(value: jax.Array) -> jax.Array:
                return jnp.where(canary < 0, value, linear.astype(value.dtype))

            return (chosen(out[0]), out[1]) if self.has_aux else chosen(out)

        return loss


def audit(
    step: PrivateStep,
    state: DPState,
    data: Any,
    canaries: Any,
    runs: int,
    steps: int,
    num_examples: int,
    epsilon: float,
    delta: float,
    confidence: float,
    key: jax.Array,
    chunk_size: int | None,
    progress: bool,
) -> Audit:
    """Train with canaries, and return the bounds.

    Args:
      step: the step of the `DPSGD`.
      state: its state of a single model, before the first step.
      data: all examples, as arguments of the loss.
      canaries: the number of gradient canaries of a run, or examples, as arguments of the loss.
      runs: the number of runs.
      steps: the number of steps of a run.
      num_examples: the number of examples in the data.
      epsilon: the ε of the accountant.
      delta: δ.
      confidence: the confidence of the lower bound.
      key: the key of the coins, the noise and the samples.
      chunk_size: the number of runs to compute at a time.
      progress: whether to show a bar.
    """
    from jax_privacy.auditing import CanaryScoreAuditor, Split
    from tqdm import tqdm

    ledger, gradients = step.ledger, isinstance(canaries, int)
    count = canaries if gradients else len(jax.tree.leaves(canaries)[0])
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
    inside = rng.random((runs, count)) < 0.5
    while min(inside.sum(), (~inside).sum()) < 2:  # improbable; a bound needs both kinds
        inside = rng.random((runs, count)) < 0.5
    trainable = differentiated(trainable_of(state.tree), integers=True)
    if gradients and count > (most := sum(x.size for x in jax.tree.leaves(trainable))):
        raise ValueError(f"DPSGD.audit: {count} gradient canaries need as many parameters, but there are {most}.")
    directions = _directions(step.clipping, trainable, count, key) if gradients else None
    changing, frozen = without_frozen(state.tree, step.random_state)
    audited = _audited(step, gradients)
    keys = jax.random.split(jax.random.fold_in(key, 1), runs)

    def first(key: jax.Array) -> tuple[Any, ...]:
        opt_state, noise_state, mask_key, clip_norms = audited(directions).init(trainable, key)
        return changing, opt_state, noise_state, clip_norms, mask_key

    arrays = jax.jit(jax.vmap(first))(keys)
    seed = rng.integers(2**32, size=4).tolist()
    multiple = step.microbatch_size or 1
    sizes = padded_sizes(num_examples, ledger, multiple)[-2:]  # few, since the program for each is large
    batches = SampledBatches(data, ledger, num_examples, steps, seed, 0, sizes, multiple)
    # Each run draws the steps in which its canaries take part for itself; the other examples are drawn once for all.
    taking_part = selection(ledger, steps).batch_iterator(runs * count, rng)
    slots = math.ceil(count / multiple) * multiple

    @partial(jax.jit, donate_argnums=0)
    def advance(arrays: Any, frozen: Any, number: jax.Array, batch: Batch, padding: jax.Array, directions: Any) -> Any:
        def of_run(arrays: Any, padding: jax.Array) -> Any:
            whole = jnp.concatenate([jnp.asarray(batch.is_padding_example), padding])
            of_model = (with_frozen(arrays[0], frozen), *arrays[1:])
            (tree, *after), metrics = audited(directions).of_one(of_model, number, Batch(batch.arguments, whole))
            seen = after[0][1] if gradients else ()
            if gradients and ledger.adaptive is not None:
                seen *= ledger.l2_clip_norm / jnp.linalg.norm(metrics["l2_clip_norm"])
            return (without_frozen(tree, step.random_state)[0], *after, arrays[-1]), seen

        return _mapped(of_run, chunk_size)(arrays, padding)

    # Where a gradient canary is, its data do not matter, but their loss must be finite.
    arguments = tuple(data) if isinstance(data, (tuple, list)) else (data,)
    filler = jax.tree.map(lambda x: np.repeat(np.asarray(x[:1]), count, axis=0), arguments)
    projections = []
    for number, batch in enumerate(tqdm(batches, total=steps, unit="step", disable=not progress)):
        drawn = np.zeros(runs * count, bool)
        drawn[next(taking_part)] = True
        padding = np.ones((runs, slots), bool)
        padding[:, :count] = ~(drawn.reshape(runs, count) & inside)
        given = _with_canaries(batch, filler if gradients else canaries, gradients, slots)
        arrays, seen = advance(arrays, frozen, np.int32(number), given, padding, directions)
        if gradients:
            projections.append(np.asarray(seen, np.float64).reshape(-1))
    if gradients:
        scores = _log_ratios(ledger, np.stack(projections)).reshape(runs, count)
        seen = "chooses the gradients of the canaries, and sees the noisy gradient of each step"
    else:
        scores = -np.asarray(_losses(step, arrays[0], frozen, canaries, chunk_size), np.float64)
        seen = "chooses the canaries, and sees the trained model"
    many = f"in {runs:,} runs" if count == 1 else f"among {count:,} in one run"
    found = CanaryScoreAuditor(scores[inside], scores[~inside])
    bound, of_gaussian = found.epsilon_clopper_pearson, found.epsilon_from_gdp
    if count > 1:
        # Half of the canaries choose the threshold. Bounds for all thresholds at once would all be zero, since δ adds
        # about δ times the number of canaries to the significance that one can reach.
        half = Split(seed=0)
        bound = partial(found.epsilon_one_run, threshold_strategy=half)
        of_gaussian = partial(found.epsilon_one_run_fdp, threshold_strategy=half)
    lower = float(bound(1 - confidence, delta))
    is_gaussian = ledger.sampled[:3] == ("poisson", 1.0, 1)
    threat = f"the adversary {seen}; a canary {many}, put in or left out at random"
    return Audit(
        lower,
        float(of_gaussian(1 - confidence, delta)) if is_gaussian else None,
        epsilon,
        delta,
        confidence,
        threat,
        scores[inside],
        scores[~inside],
    )


def _audited(step: PrivateStep, gradients: bool) -> Callable[[Any], PrivateStep]:
    """Return a function from the directions of gradient canaries to the step; for examples, to the step as it is."""
    if not gradients:
        return lambda _: step

    import optax

    def of_directions(directions: Any) -> PrivateStep:
        def init(params: Any) -> Any:
            return step.optimizer.init(params), jnp.zeros(len(jax.tree.leaves(directions)[0]))

        def update(gradient: Any, state: Any, params: Any = None) -> Any:
            own = jax.tree.map(lambda x, u: jnp.tensordot(u, x.astype(u.dtype), x.ndim), gradient, directions)
            # The step has divided the sum by the expected size of a batch.
            seen = sum(jax.tree.leaves(own)) * (step.ledger.expected_batch_size / step.ledger.l2_clip_norm)
            updates, inner = step.optimizer.update(gradient, state[0], params)
            return updates, (inner, seen)

        fields = {**vars(step), "checked_states": set()}
        fields["loss"] = lambda model, _, *batch: step.loss(model, *batch)
        fields["optimizer"] = optax.GradientTransformation(init, update)
        return _AuditedStep(**fields, directions=directions)

    return of_directions


def _directions(clipping: ClipNorms, trainable: Any, count: int, key: jax.Array) -> Any:
    """Return random signs, with the canaries along axis 0, scaled as clipping will scale them.

    In each clip group the norm is that of the group, relative to the norm of all clip norms.
    """
    leaves, structure = jax.tree.flatten(trainable)
    groups = clipping.groups("DPSGD.audit", trainable)
    of_leaf = [0] * len(leaves) if groups is None else groups.of_leaf
    sizes = [0] * len(clipping.norms)
    for leaf, group in zip(leaves, of_leaf, strict=True):
        sizes[group] += leaf.size
    total = math.hypot(*clipping.norms)
    scaled = []
    for number, (leaf, group) in enumerate(zip(leaves, of_leaf, strict=True)):
        signs = jax.random.rademacher(jax.random.fold_in(key, number + 2), (count, *leaf.shape), jnp.float32)
        scaled.append(signs * (clipping.norms[group] / total / math.sqrt(max(1, sizes[group]))))
    return jax.tree.unflatten(structure, scaled)


def _with_canaries(batch: Batch, canaries: Any, gradients: bool, slots: int) -> Batch:
    """Return a batch with slots for canaries at its end.

    Args:
      batch: a batch of data.
      canaries: the canaries, as arguments of the loss.
      gradients: whether they are gradient canaries, whose numbers become the first argument.
      slots: the number of slots; those beyond the canaries are padding.
    """

    def extended(x: Any, own: Any) -> np.ndarray:
        x, own = np.asarray(x), np.asarray(own)
        empty = np.zeros((slots - len(own), *x.shape[1:]), x.dtype)
        return np.concatenate([x, own.astype(x.dtype), empty])

    arguments = jax.tree.map(extended, batch.arguments, canaries)
    if gradients:
        count = len(jax.tree.leaves(canaries)[0])
        numbers = np.full(len(batch.is_padding_example), -1, np.int32)
        arguments = (extended(numbers, np.arange(count)), *arguments)
    return Batch(arguments, batch.is_padding_example)


def _losses(step: PrivateStep, trees: Any, frozen: Any, canaries: Any, chunk_size: int | None) -> jax.Array:
    """Return the loss of each canary with the model of each run, shape (runs, canaries)."""

    def of_run(tree: Any) -> jax.Array:
        def of_canary(*example: Any) -> jax.Array:
            one = jax.tree.map(lambda x: x[None], example) if step.keep_batch_dim else example
            out = step.loss(merge_tree(released(with_frozen(tree, frozen))), *one)
            return out[0] if step.has_aux else out

        return jax.vmap(of_canary)(*canaries)

    return jax.jit(_mapped(of_run, chunk_size))(trees)


def _mapped(fun: Callable[..., Any], chunk_size: int | None) -> Callable[..., Any]:
    """Return `fun` mapped over axis 0 of all arguments, in chunks if a size is given."""
    if chunk_size is None:
        return jax.vmap(fun)
    return lambda *args: jax.lax.map(lambda slices: fun(*slices), args, batch_size=chunk_size)


def _log_ratios(ledger: Ledger, seen: np.ndarray) -> np.ndarray:
    """Return the log-likelihood ratio of each canary: of having been put in to having been left out.

    Args:
      ledger: the settings of a step.
      seen: the projections of the noisy gradients on each canary in units of the clip norm, shape (steps, canaries).
        With the strategy matrix C and the participations x they are x + C⁻¹ z.
    """
    from scipy.signal import lfilter
    from scipy.special import logsumexp

    column = np.asarray(ledger.strategy)[: len(seen)]
    stddev = ledger.gradient_multiplier * float(np.linalg.norm(ledger.strategy))
    ratios = participation_ratios(lfilter(column, [1.0], seen, axis=0), column, stddev)
    sampling, probability, separation, _ = ledger.sampled
    if sampling != "poisson":
        return log_ratios_apart(ratios, probability, separation)
    with np.errstate(divide="ignore"):  # log(1 - 1)
        mixed = np.logaddexp(np.log1p(-probability), np.log(probability) + ratios)
    # A canary is in one of `separation` groups, each with the same probability.
    groups = [mixed[start::separation].sum(axis=0) for start in range(separation)]
    return logsumexp(groups, axis=0) - math.log(separation)
