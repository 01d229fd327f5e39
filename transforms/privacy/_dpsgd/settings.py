"""Checks of the `DPSGD` settings that determine ε, and the noise multiplier for a target ε."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, get_args

import jax
import numpy as np

from ..._core.arguments import check_choice, check_count, check_number, describe, is_int
from ..._core.prng import is_key
from ..._models.split_model import is_members, is_module, without_shared
from ..._runs.optimizer import as_transform
from .._per_example.clip_norms import ClipNorms, clip_norms
from .accounting import Accountant, Ledger, Sampling, calibrate
from .adaptive import AdaptiveClipping, gradient_multiplier
from .monte_carlo import modules

# With fewer runs or canaries in an audit, no bound is above zero.
_FEWEST = 20


def checked_delta(target_delta: Any, num_examples: int) -> float:
    """Return δ as a Python float; raise if it is out of range, and warn if it is too large to be meaningful."""
    delta = check_number("DPSGD", "target_delta", target_delta, lambda x: 0 < x < 1, "between 0 and 1")
    # Publishing one random example is (0, 1 / n)-differentially private, so δ should be well below 1 / n.
    if delta * num_examples > 1:
        warnings.warn(
            f"DPSGD: target_delta={delta} is more than 1 / num_examples = {1 / num_examples:.1e}, a δ that even "
            "publishing a random example satisfies; pass a smaller one.",
            stacklevel=3,
        )
    return delta


def checked_clipping(l2_clip_norm: Any, automatic: Any) -> ClipNorms:
    """Return the clip norms; raise unless all are positive and finite."""
    found = clip_norms("DPSGD", l2_clip_norm, automatic)
    for norm in found.norms:
        check_number("DPSGD", "l2_clip_norm", norm, lambda x: 0 < x < math.inf, "positive and finite")
    return found


def checked_adaptive(
    adaptive: Any, clipping: ClipNorms, bands: int, size: float, noise_multiplier: float
) -> AdaptiveClipping | None:
    """Return the settings of adaptive clipping, with a standard deviation; raise if they do not fit the others."""
    if adaptive is None:
        return None
    if not isinstance(adaptive, AdaptiveClipping):
        raise TypeError(f"DPSGD: adaptive must be an AdaptiveClipping or None, but got {describe(adaptive)}.")
    if clipping.automatic is not None:
        raise ValueError("DPSGD: automatic clipping has no quantile to adapt to; pass either automatic or adaptive.")
    if bands > 1:
        why = "the noise of several steps partly cancels only if their clip norms are equal"
        raise ValueError(f"DPSGD: adaptive does not go with noise_strategy: {why}; omit one of them.")
    groups = len(clipping.norms)
    enough = noise_multiplier * math.sqrt(groups)
    default = max(size / 20, enough)
    found = adaptive if adaptive.count_stddev is not None else replace(adaptive, count_stddev=default)
    if math.isnan(gradient_multiplier(noise_multiplier, found, groups)):
        what = f"with count_stddev={found.count_stddev:g} the counts alone spend more than {noise_multiplier=:g} allows"
        raise ValueError(f"DPSGD: {what}; omit it, or pass at least {enough:.3g}.")
    return found


class Sampled(NamedTuple):
    """How batches are sampled.

    Attributes:
      size: the expected size of a batch.
      probability: as `Ledger.sampling_probability`.
      separation: as `Ledger.separation`.
      truncation: as `Ledger.truncation`.
    """

    size: float
    probability: float
    separation: int | None
    truncation: tuple[int, int] | None


def checked_sampling(
    num_examples: int, expected_batch_size: Any, strategy: tuple[float, ...], sampling: Any, truncated: Any
) -> Sampled:
    """Return how batches are sampled; raise if the settings do not go together."""
    check_choice("DPSGD", "sampling", sampling, get_args(Sampling))
    in_range, bands = f"positive, and at most num_examples={num_examples}", len(strategy)
    size = check_number("DPSGD", "expected_batch_size", expected_batch_size, lambda x: 0 < x <= num_examples, in_range)
    check_count("DPSGD", "truncated_batch_size", truncated, optional=True)
    truncation = None if truncated is None else (int(truncated), num_examples // bands)
    if truncated is not None and truncated < size:
        raise ValueError(f"DPSGD: truncated_batch_size={truncated} is below {expected_batch_size=}; pass a larger one.")
    if sampling == "poisson":
        # With bands an example may take part only in every `bands`-th step, so its probability is `bands` times as
        # large. Truncation divides the examples into groups of equal size, without those left over.
        examples = num_examples if truncation is None else bands * truncation[1]
        probability = size * bands / max(1, examples)
        if probability > 1 + 1e-9:
            most = f"{examples / bands:g} examples, but {expected_batch_size=}"
            raise ValueError(f"DPSGD: {bands} bands allow batches of {most}; use fewer bands.")
        return Sampled(size, min(1.0, probability), None, truncation)  # rounding may exceed 1
    if truncation is not None:
        raise ValueError(f'DPSGD: truncated_batch_size needs Poisson sampling, but got sampling="{sampling}"; omit it.')
    if min(strategy) < 0:
        raise ValueError(f'DPSGD: sampling="{sampling}" is accounted for without negative coefficients; pass others.')
    modules()
    steps = num_examples / size  # from one participation to the next, on average
    if sampling == "balls_in_bins":
        separation = round(steps)
        if abs(steps - separation) > 1e-9 * steps or separation < bands:
            needs = f"num_examples / expected_batch_size to be a whole number, at least {bands}, but it is {steps:g}"
            raise ValueError(f'DPSGD: sampling="balls_in_bins" needs {needs}; choose another expected_batch_size.')
        return Sampled(size, 1.0, separation, None)
    if bands == 1:
        raise ValueError('DPSGD: sampling="b_min_sep" needs a noise_strategy; without one, use Poisson sampling.')
    if steps < bands:
        most = f"batches of {num_examples / bands:g} examples, but {expected_batch_size=}"
        raise ValueError(f'DPSGD: sampling="b_min_sep" with {bands} bands allows {most}; pass a smaller one.')
    return Sampled(size, 1 / (steps - bands + 1), bands, None)


def checked_noise(
    noise_multiplier: Any,
    target_epsilon: Any,
    sampling: str,
    sampled: Sampled,
    rounds: int,
    delta: float,
    accountant: Any,
) -> float:
    """Return the noise multiplier, as given or calibrated so that `rounds` sampled sums spend `target_epsilon`."""
    check_choice("DPSGD", "accountant", accountant, get_args(Accountant))
    if accountant == "rdp" and (sampling != "poisson" or sampled.truncation is not None):
        what = "truncated batches" if sampling == "poisson" else f'sampling="{sampling}"'
        raise ValueError(f'DPSGD: accountant="rdp" does not know {what}; omit it.')
    if (noise_multiplier is None) == (target_epsilon is None):
        given = "neither" if noise_multiplier is None else "both"
        raise ValueError(f"DPSGD: pass either noise_multiplier or target_epsilon, but got {given}.")
    number = partial(check_number, "DPSGD")
    if target_epsilon is None:
        return number("noise_multiplier", noise_multiplier, lambda x: 0 <= x < math.inf, "finite and at least 0")
    target = number("target_epsilon", target_epsilon, lambda x: 0 < x < math.inf, "positive and finite")
    if sampling != "poisson":
        what = f'target_epsilon needs Poisson sampling, since ε of "{sampling}" takes minutes'
        raise ValueError(f"DPSGD: {what}; pass noise_multiplier, and look at epsilon(num_steps).")
    return calibrate(target, sampled.probability, rounds, delta, accountant, sampled.truncation)


def checked_strategy(strategy: Any) -> tuple[float, ...]:
    """Return the coefficients of a noise strategy; raise unless all are finite and the first is positive."""
    array = np.asarray([1.0] if strategy is None else strategy)
    if array.dtype.kind not in "iuf" or array.ndim != 1 or not np.isfinite(array).all() or not (array[:1] > 0).any():
        needed = f"an array of finite numbers, shape (bands,), the first positive, but got {describe(strategy)}"
        raise ValueError(f"DPSGD: noise_strategy must be {needed}.")
    return tuple(array.astype(float).tolist())


def checked_wrt(wrt: Any, models: list[Any]) -> Any:
    """Return a filter of the variables that train, without keys; raise if it is given for anything but NNX modules."""
    if wrt is None:
        return None
    if not models or not all(map(is_module, models)):
        got = ", ".join(describe(model) for model in models) or "none"
        raise TypeError(f"DPSGD.init: wrt selects variables of NNX modules, but the models are {got}; omit it.")
    from flax import nnx

    def holds_key(_: Any, x: Any) -> bool:
        return is_key(x.get_raw_value() if isinstance(x, nnx.Variable) else x)

    # Each example's random state is drawn from a secret key, whatever the filter says.
    found = nnx.All(wrt, nnx.Not(nnx.RngState), nnx.Not(holds_key))
    if not any(jax.tree.leaves(nnx.state(model, found)) for model in models):
        raise ValueError(f"DPSGD.init: wrt={wrt!r} selects no variable of the model; pass another filter, or omit it.")
    return found


def members_of(model: Any) -> int | None:
    """Return the number of members of an ensemble, and None for anything else; raise if the members share variables."""
    if not is_members(model):
        return None
    if len(jax.tree.leaves(without_shared(model))) < len(jax.tree.leaves(model)):
        cure = "create the ensemble without shared="
        raise ValueError(f"DPSGD.init: the members share variables, so that each would see the data of all; {cure}.")
    return len(model)


def check_audit(
    ledger: Ledger, model: Any, runs: Any, steps: Any, num_steps: int, confidence: Any, chunk_size: Any
) -> None:
    """Raise if a run cannot be audited, or not like this."""
    if is_members(model):
        raise TypeError("DPSGD.audit: pass one model, not an ensemble; its runs all start from it.")
    check_count("DPSGD.audit", "runs", runs)
    check_count("DPSGD.audit", "steps", steps)
    check_count("DPSGD.audit", "chunk_size", chunk_size, optional=True)
    check_number("DPSGD.audit", "confidence", confidence, lambda x: 0.5 < x < 1, "between 0.5 and 1")
    if steps > num_steps:
        raise ValueError(f"DPSGD.audit: {steps=} is beyond {num_steps=}; pass fewer.")
    if ledger.noise_multiplier == 0:
        raise ValueError("DPSGD.audit: noise_multiplier is 0, so ε is infinite; pass a positive one.")
    if ledger.truncation is not None:
        raise ValueError(
            "DPSGD.audit: with truncated batches canaries depend on each other; omit truncated_batch_size."
        )


def checked_canaries(canaries: Any, runs: int, data: Any) -> Any:
    """Return the number of gradient canaries, or canaries as a tuple of arguments; raise if they do not fit.

    Args:
      canaries: as for `DPSGD.audit`.
      runs: the number of runs.
      data: all examples.
    """
    if canaries is None:
        canaries = 1 if runs > 1 else 1000
    found: Any
    if is_int(canaries):
        count, found = int(canaries), int(canaries)
    else:
        found, of_data = (tuple(x) if isinstance(x, (tuple, list)) else (x,) for x in (canaries, data))

        def form(x: Any) -> Any:
            return np.shape(x)[1:], getattr(x, "dtype", type(x))

        wanted, given = jax.tree.map(form, of_data), jax.tree.map(form, found)
        if wanted != given or not all(map(np.ndim, jax.tree.leaves(found))):
            shapes = f"examples in the form of the data, with shapes and dtypes {wanted}"
            raise ValueError(f"DPSGD.audit: canaries must be a number, or {shapes}, but got {describe(canaries)}.")
        count = len(jax.tree.leaves(found)[0])
    if max(count, runs) < _FEWEST or min(count, runs) != 1:
        needed = f"many runs with one canary, or one run with many canaries, at least {_FEWEST}"
        raise ValueError(f"DPSGD.audit: an audit needs {needed}, but got {runs=} and {count} canaries.")
    return found


def of_plan(config: Any, num_examples: int) -> tuple[dict[str, Any], float]:
    """Return the arguments of `DPSGD` for the configuration of a jax-privacy plan, and the factor of its gradients.

    The gradients of the plan are those of `DPSGD` times the factor.
    """
    if type(config).__name__ not in ("BandMFExecutionPlanConfig", "BandMFConfig"):
        raise TypeError(f"DPSGD.from_plan: config must be a BandMF configuration, but got {describe(config)}.")
    relation = getattr(getattr(config, "accountant", None), "neighboring_relation", None)
    if getattr(relation, "name", "") == "REPLACE_ONE":
        raise ValueError("DPSGD.from_plan: ε of DPSGD is not for replacing an example; pass another accountant.")
    if config.normalize_by == 0:
        raise ValueError("DPSGD.from_plan: config.normalize_by is 0, but gradients are divided by it.")
    if config.column_normalize:
        raise ValueError("DPSGD.from_plan: column_normalize makes the noise depend on the step's number; omit it.")
    sigma, bands = config.noise_multiplier, len(config.strategy)
    if hasattr(config, "sampling_prob"):  # jax-privacy 2.0 and 2.1 calibrate when they make a plan
        probability = config.sampling_prob
        if sigma is None:
            event = config.plan.dp_event.event
            sigma = getattr(event, "event", event).noise_multiplier
    else:
        probability = config.expected_participations * bands / config.iterations
        if sigma is None:
            raise ValueError("DPSGD.from_plan: config has no noise yet; pass config.calibrate(epsilon=..., delta=...).")
    if config.truncated_batch_size is not None and config.num_examples != num_examples:
        raise ValueError(f"DPSGD.from_plan: {num_examples=}, but config.num_examples={config.num_examples}.")
    examples = num_examples if config.truncated_batch_size is None else bands * (num_examples // bands)
    size, clip_norm = probability * examples / bands, config.l2_clip_norm
    given = {
        "l2_clip_norm": clip_norm,
        "noise_multiplier": float(sigma),
        "num_steps": config.iterations,
        "num_examples": num_examples,
        "expected_batch_size": size,
        "noise_strategy": None if bands == 1 else config.strategy,
        "truncated_batch_size": config.truncated_batch_size,
    }
    return given, size / (config.normalize_by * (clip_norm if config.rescale_to_unit_norm else 1.0))


def check_extra() -> None:
    """Raise if a package of the `privacy` extra is missing."""
    for name in ("jax_privacy", "dp_accounting"):
        if find_spec(name) is None:
            missing = name.replace("_", "-")
            raise ModuleNotFoundError(f"DPSGD needs {missing}; install it with pip install 'plurax[privacy]'.")


def checked_optimizer(optimizer: Any) -> Any:
    """Return an optax optimizer as by `as_transform`; raise if it is not one."""
    if (transform := as_transform(optimizer)) is None:
        got = describe(optimizer)
        raise TypeError(f"DPSGD: optimizer must be an optax GradientTransformation, such as adam(1e-3), but got {got}.")
    return transform
