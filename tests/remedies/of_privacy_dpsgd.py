"""Remedies of `DPSGD`: its settings, its models and losses, its runs and audits."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig

from plurax.ensemble import Ensemble
from plurax.transforms import check_loss
from plurax.transforms._calls.primals import trainable_of
from plurax.transforms.privacy import DPSGD, AdaptiveClipping
from plurax.transforms.privacy._dpsgd import settings as of_settings

from ._registry import Fails, remedy

N = 20
SETTINGS: dict[str, Any] = {
    "l2_clip_norm": 1.0,
    "noise_multiplier": 1.0,
    "target_delta": 1e-2,
    "num_examples": N,
    "expected_batch_size": 4,
    "num_steps": 4,
    "accountant": "rdp",
}
X = np.sin(np.arange(N * 3.0)).reshape(N, 3).astype(np.float32)
W = np.array([1.0, -2.0, 0.5], np.float32)
KEY = jax.random.key(0)
BANDS = np.array([1.0, 0.5, 0.25])
# Other samplings, whose ε "pld" knows: they are accounted for by Monte Carlo samples.
BINS: dict[str, Any] = {"sampling": "balls_in_bins", "accountant": "pld"}


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def of_model(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


def make(loss: Any = loss, optimizer: Any = None, **settings: Any) -> DPSGD:
    return DPSGD(loss, optimizer or optax.sgd(0.1), **{**SETTINGS, **settings})


def start(dp: DPSGD, model: Any = W) -> Any:
    return dp.init(model, key=KEY)


def fit(dp: DPSGD, state: Any, data: Any = X, **options: Any) -> Any:
    return dp.fit(state, data, progress=False, **options)[0]


def moves(loss: Any, model: Any, data: Any = X, **settings: Any) -> None:
    """Assert that a step changes the model."""
    dp = make(loss, **settings)
    state = start(dp, model)
    (batch, *_) = dp.batches(data, state, sizes=[8])
    after = dp.step(state, batch)[0]
    pairs = zip(*(jax.tree.leaves(trainable_of(x.tree)) for x in (state, after)), strict=True)
    assert any((a != b).any() for a, b in pairs)


# Losses.


def tokens(normalizer: Any) -> Any:
    """Return a loss of tokens, of which half are masked in some sequences, divided by a normalizer of the mask."""
    return lambda w, x: (((x * w) ** 2 * (x > -0.5)).sum(-1) / normalizer(x > -0.5)).sum()


@remedy(
    "{}: the loss of a batch is neither the mean nor the sum of the losses of its examples: {}. "
    "If examples are compared with each other (in-batch negatives, mined triplets), make the pair or group the "
    "example, with keep_batch_dim=False; if the loss is normalized by the batch (weights, tokens), divide by a "
    "fixed number, or take the mean of each example; or pass check_loss=False if the losses of single "
    "examples are meant."
)
def loss_that_couples_examples(fails: Fails) -> None:
    contrast = lambda w, x: -jnp.mean(jnp.diag(jax.nn.log_softmax(x @ (w * x).T)))
    fails(lambda: fit(make(contrast), start(make(contrast)), steps=1))
    groups = X.reshape(5, 4, 3)
    of_groups = make(contrast, keep_batch_dim=False, num_examples=5, expected_batch_size=2)
    assert fit(of_groups, start(of_groups), groups, steps=1).step == 1
    meant = make(contrast, check_loss=False)
    assert fit(meant, start(meant), steps=1).step == 1
    by_batch = make(tokens(jnp.sum))
    fails(lambda: fit(by_batch, start(by_batch), steps=1))
    assert check_loss(tokens(lambda mask: 10.0), W, X).kind == "sum"
    by_example = make(tokens(lambda mask: mask.sum(-1) * len(mask)))
    assert fit(by_example, start(by_example), steps=1).step == 1


@remedy("return the mean over its batch, which has one example, or pass has_aux=True if it returns (loss, aux)")
def loss_that_is_no_scalar(fails: Fails) -> None:
    fails(moves, lambda w, x: (x @ w) ** 2, W)
    with_aux = lambda w, x: (loss(w, x), {"size": jnp.abs(x).mean()})
    fails(moves, with_aux, W)
    moves(lambda w, x: ((x @ w) ** 2).mean(), W)
    moves(with_aux, W, has_aux=True)


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, norm: Any = nnx.BatchNorm) -> None:
        self.norm, self.last = norm(3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.norm(x))


@remedy("do not assign it; for BatchNorm use nnx.GroupNorm or nnx.view(model, use_running_average=True)")
def loss_that_changes_state(fails: Fails) -> None:
    fails(moves, of_model, Network(nnx.Rngs(0)))
    moves(of_model, Network(nnx.Rngs(0), partial(nnx.GroupNorm, num_groups=1)))
    moves(of_model, nnx.view(Network(nnx.Rngs(0)), use_running_average=True))
    moves(lambda model, x: of_model(nnx.view(model, use_running_average=True), x), Network(nnx.Rngs(0)))

    def counting(model: Any, x: Any) -> Any:
        model.calls[...] += 1
        return of_model(model, x)

    still = nnx.view(Network(nnx.Rngs(0)), use_running_average=True)
    fails(moves, counting, still)


@remedy('pass an NNX module, or a member of Ensemble.from_apply with its keys in the collection "rngs"')
def keys_that_examples_share(fails: Fails) -> None:
    dropped = lambda p, x: loss(p["params"]["w"], x * jax.random.bernoulli(p["rngs"]["dropout"], 0.5, x.shape))
    params = {"params": {"w": jnp.asarray(W)}, "rngs": {"dropout": KEY}}
    fails(moves, dropped, params)
    member = Ensemble.from_apply(dropped, [params])[0]
    moves(lambda model, x: model(x), member)

    class Dropped(nnx.Module):
        def __init__(self) -> None:
            self.w, self.drop = nnx.Param(jnp.asarray(W)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.drop(x) @ self.w

    moves(of_model, Dropped())


@remedy(
    "DPSGD: the auxiliary output of the loss has `{}`, which DPSGD uses; rename it.",
    "DPSGD: aux must hold numeric arrays, but `{}` is {}; leave it out.",
)
def auxiliary_outputs(fails: Fails) -> None:
    having = lambda **aux: lambda w, x: (loss(w, x), aux)
    fails(moves, having(loss=jnp.ones(())), W, has_aux=True)
    fails(moves, having(of_data=jnp.ones(()), name="squares"), W, has_aux=True)
    moves(having(of_data=jnp.ones(())), W, has_aux=True)


# Models.


@remedy(
    "DPSGD.init: there are no parameters to train; pass a model or a pytree of arrays.",
    "DPSGD.init: {}; let the loss close over anything else.",
    "DPSGD.init: two modules share `{}`; put them into one, such as nnx.Dict.",
)
def parameters_that_cannot_train(fails: Fails) -> None:
    empty: Any
    for empty in ({}, None, []):
        fails(start, make(), empty)
    start(make(), {"w": W})
    for other in (2.0, W * 1j, jnp.tanh):
        fails(start, make(), {"w": W, "other": other})
    fails(start, make(), {"other": np.arange(3)})
    moves(lambda p, x: loss(p["w"], x * np.arange(3)) * 2.0, {"w": W})
    one = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    pair = {"first": nnx.Sequential(one), "second": nnx.Sequential(one)}
    twice = lambda model, x: jnp.mean(model["second"](model["first"](x)) ** 2)
    fails(moves, twice, pair)
    moves(twice, nnx.Dict(pair))


@remedy(
    "the Linen variables have {} in addition to 'params', which would train, with noise, as parameters",
    'pass variables["params"] alone, and let the loss close over the rest',
    "DPSGD.init: {}; {}, or pass a member of Ensemble.from_apply(apply, [variables]).",
)
def variables_of_linen(fails: Fails) -> None:
    model = linen.BatchNorm(use_running_average=True)
    variables = model.init(KEY, X)
    squares = lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)
    fails(moves, squares, variables)
    rest = {"batch_stats": variables["batch_stats"]}
    moves(lambda params, x: squares({"params": params, **rest}, x), variables["params"])
    moves(of_model, Ensemble.from_apply(model.apply, [variables])[0])


@remedy(
    "DPSGD.init: wrt selects variables of NNX modules, but the models are {}; omit it.",
    "DPSGD.init: wrt={} selects no variable of the model; pass another filter, or omit it.",
)
def filters_of_parameters(fails: Fails) -> None:
    dp, model = make(of_model), nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    for other in ({"w": W}, Ensemble.from_apply(lambda w, x: x @ w, [W])[0]):
        fails(dp.init, other, key=KEY, wrt=nnx.Param)
        dp.init(other, key=KEY)
    fails(dp.init, model, key=KEY, wrt=nnx.LoRAParam)
    assert dp.init(model, key=KEY, wrt=nnx.PathContains("kernel")).tree.trainable.keys() == {"kernel"}
    dp.init(model, key=KEY)


@remedy("create the ensemble without shared=")
def ensemble_with_shared_variables(fails: Fails) -> None:
    layer = lambda rngs: nnx.Linear(3, 1, rngs=rngs)
    fails(start, make(of_model), Ensemble.create(layer, 2, seed=0, shared=nnx.PathContains("bias")))
    assert start(make(of_model), Ensemble.create(layer, 2, seed=0)).members == 2


# Settings.


@remedy(
    "DPSGD: target_delta={} is more than 1 / num_examples = {}, a δ that even "
    "publishing a random example satisfies; pass a smaller one."
)
def delta_too_large(fails: Fails) -> None:
    fails(make, target_delta=0.1)
    make(target_delta=1 / N)


@remedy("DPSGD: {}; pass a larger δ, or omit truncated_batch_size.")
def delta_too_small(fails: Fails) -> None:
    small = {"noise_multiplier": None, "target_epsilon": 1.0, "num_steps": 12, "accountant": "pld"}
    fails(make, **small, truncated_batch_size=6, target_delta=1e-18)
    assert make(**small, truncated_batch_size=6, target_delta=1e-3).epsilon(12) <= 1
    assert make(**small, target_delta=1e-18).epsilon(12) <= 1


@remedy("DPSGD: automatic clipping has no quantile to adapt to; pass either automatic or adaptive.")
def automatic_and_adaptive(fails: Fails) -> None:
    fails(make, automatic=0.1, adaptive=AdaptiveClipping())
    make(automatic=0.1)
    make(adaptive=AdaptiveClipping())


@remedy("DPSGD: adaptive does not go with noise_strategy: {}; omit one of them.")
def adaptive_with_bands(fails: Fails) -> None:
    fails(make, noise_strategy=BANDS, adaptive=AdaptiveClipping())
    make(noise_strategy=BANDS)
    make(adaptive=AdaptiveClipping())


@remedy("DPSGD: {}; omit it, or pass at least {}.")
def counts_without_noise(fails: Fails) -> None:
    for norms in (1.0, {"w": 1.0, "b": 1.0}):
        settings = {"l2_clip_norm": norms, "noise_multiplier": 3.0}
        message = fails(make, adaptive=AdaptiveClipping(count_stddev=0.01), **settings)
        least = float(message.rpartition("at least ")[2].rstrip("."))
        for found in (AdaptiveClipping(count_stddev=least), AdaptiveClipping()):
            assert make(adaptive=found, **settings).ledger.gradient_multiplier < math.inf


@remedy(
    "DPSGD: truncated_batch_size={} is below expected_batch_size={}; pass a larger one.",
    "DPSGD: {} bands allow batches of {}; use fewer bands.",
    'DPSGD: truncated_batch_size needs Poisson sampling, but got sampling="{}"; omit it.',
    'DPSGD: sampling="{}" is accounted for without negative coefficients; pass others.',
    'DPSGD: sampling="balls_in_bins" needs {}; choose another expected_batch_size.',
    'DPSGD: sampling="b_min_sep" needs a noise_strategy; without one, use Poisson sampling.',
    'DPSGD: sampling="b_min_sep" with {} bands allows {}; pass a smaller one.',
)
def samplings(fails: Fails) -> None:
    pld = partial(make, accountant="pld")
    fails(pld, truncated_batch_size=3)
    pld(truncated_batch_size=4)
    fails(make, noise_strategy=np.ones(6))
    for bands in (1, 5):
        make(noise_strategy=np.ones(bands))
    fails(pld, sampling="balls_in_bins", truncated_batch_size=6)
    pld(sampling="balls_in_bins")
    fails(pld, sampling="balls_in_bins", noise_strategy=[1.0, -0.5])
    pld(sampling="balls_in_bins", noise_strategy=[1.0, 0.5])
    fails(pld, sampling="balls_in_bins", expected_batch_size=7)
    fails(pld, sampling="balls_in_bins", noise_strategy=np.ones(4), expected_batch_size=10)
    pld(sampling="balls_in_bins", noise_strategy=np.ones(4), expected_batch_size=N / 7)
    fails(pld, sampling="b_min_sep")
    pld(sampling="poisson")
    for bands, size in ((2, 11), (6, 4)):
        message = fails(pld, sampling="b_min_sep", noise_strategy=np.ones(bands), expected_batch_size=size)
        most = float(message.partition("batches of ")[2].partition(" ")[0])
        pld(sampling="b_min_sep", noise_strategy=np.ones(bands), expected_batch_size=int(most))


@remedy("DPSGD: sampling needs {}; install such a version, or use Poisson sampling.")
def sampling_without_its_module(fails: Fails) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "jax_privacy.experimental.monte_carlo", None)
        fails(make, **BINS)
        make(sampling="poisson")
    make(**BINS)


@remedy(
    'DPSGD: accountant="rdp" does not know {}; omit it.',
    "DPSGD: pass either noise_multiplier or target_epsilon, but got {}.",
    "DPSGD: {}; pass noise_multiplier, and look at epsilon(num_steps).",
    'DPSGD.epsilon: accountant="rdp" does not know truncated batches; use "pld".',
    'DPSGD.event: dp-accounting has no event for sampling="{}"; use epsilon.',
    "DPSGD.fit: epsilon_budget needs Poisson sampling; pass steps instead.",
)
def accountants(fails: Fails) -> None:
    without = {name: x for name, x in SETTINGS.items() if name != "accountant"}
    default = lambda **settings: DPSGD(loss, optax.sgd(0.1), **{**without, **settings})
    for unknown in ({"truncated_batch_size": 6}, {"sampling": "balls_in_bins"}):
        fails(make, **unknown)
        default(**unknown)
    fails(make, target_epsilon=1.0)
    fails(make, noise_multiplier=None)
    assert make(noise_multiplier=None, target_epsilon=1.0).epsilon(4) <= 1
    few = {**BINS, "target_delta": 0.05, "num_steps": 2}  # so that few samples are enough
    fails(make, **few, noise_multiplier=None, target_epsilon=1.0)
    dp = make(**few, noise_multiplier=2.0)
    assert 0 < dp.epsilon(2) < math.inf
    after = fit(dp, start(dp), steps=1)
    fails(dp.event, after)
    assert dp.epsilon(after) <= dp.epsilon(2)
    fails(fit, dp, start(dp), epsilon_budget=1.0)
    truncated = default(truncated_batch_size=6)
    after = fit(truncated, start(truncated), steps=1)
    fails(make().epsilon, after)
    assert default().epsilon(after) == truncated.epsilon(1)


@remedy("DPSGD needs {}; install it with pip install 'plurax[privacy]'.")
def missing_extra(fails: Fails) -> None:
    for missing in ("jax_privacy", "dp_accounting"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(of_settings, "find_spec", lambda name, missing=missing: None if name == missing else name)
            fails(make)
    make()


# Runs.


@remedy(
    "DPSGD.batches: `{}` holds random keys; pass arrays of numbers.",
    "{}; pass all examples, not batches.",
    "{}; make the DPSGD with num_examples={}.",
)
def data(fails: Fails) -> None:
    dp, keys = make(), jax.random.split(KEY, N)
    fails(dp.batches, (X, keys))
    assert len(dp.batches((X, jax.random.key_data(keys)))) == 4
    fails(dp.batches, X[:4])
    assert len(dp.batches(X)) == 4
    more = np.concatenate([X, X[:1]])
    fails(dp.batches, more)
    assert len(make(num_examples=N + 1).batches(more)) == 4


@remedy(
    "DPSGD.step: the batch was drawn {}; use each batch of dp.batches once, in order.",
    "{}: the batch was drawn {}; use batches of this DPSGD.",
    "call init(state.model, key=...) and compose both runs with DPSGD.event",
    "use the same settings",
)
def batches_and_states_of_others(fails: Fails) -> None:
    dp, other = make(), make(expected_batch_size=5)
    state = start(dp)
    first, second, *_ = dp.batches(X, state, sizes=[8])
    fails(dp.step, state, second)
    after = dp.step(state, first)[0]
    fails(dp.step, after, first)
    after = dp.step(after, second)[0]
    fails(dp.step, state, next(other.batches(X)))
    assert make().step(state, first)[0].step == 1
    fails(other.step, state, first)
    again = other.init(after.model, key=jax.random.key(1))
    again = fit(other, again)
    both = dp_accounting.ComposedDpEvent([dp.event(after), other.event(again)])
    spent = dp_accounting.rdp.RdpAccountant().compose(both).get_epsilon(1e-2)
    assert max(dp.epsilon(after), other.epsilon(again)) < spent < dp.epsilon(after) + other.epsilon(again)
    # Without an event, only the same settings are left.
    bins = make(**BINS)
    for one, another in ((bins, dp), (dp, bins)):
        assert "compose" not in fails(one.step, start(another), first)
    assert fit(make(**BINS), start(bins), steps=1).step == 1


@remedy(
    "DPSGD.fit: step {} is beyond num_steps={}; pass fewer steps.",
    "DPSGD.fit: {}; use a DPSGD with more, and with this noise_multiplier.",
    "DPSGD.fit: {} steps already spent more than epsilon_budget={}; pass a larger one.",
    "DPSGD.fit: {}, after step {}; pass {} or another directory.",
)
def lengths_of_runs(fails: Fails) -> None:
    dp = make(noise_multiplier=None, target_epsilon=3.0)
    first = start(dp)
    fails(fit, dp, first, steps=5)
    half = fit(dp, first, steps=2, checkpoint_dir="run")
    fails(fit, dp, half, steps=3)
    last = fit(dp, half, steps=2, checkpoint_dir="run")
    fails(fit, dp, last, steps=1)
    longer = make(noise_multiplier=dp.noise_multiplier, num_steps=6)
    assert fit(longer, last).step == 6
    fails(fit, dp, half, epsilon_budget=0.9 * dp.epsilon(2))
    assert fit(dp, half, epsilon_budget=dp.epsilon(3)).step == 3
    assert "pass more steps" in fails(fit, dp, first, steps=3, checkpoint_dir="run")
    assert fit(dp, first, steps=4, checkpoint_dir="run").step == 4
    assert fit(dp, first, steps=3, checkpoint_dir="other").step == 3
    assert "pass a larger eps" in fails(fit, dp, first, epsilon_budget=dp.epsilon(2), checkpoint_dir="run")
    assert fit(dp, first, epsilon_budget=dp.epsilon(4), checkpoint_dir="run").step == 4
    assert fit(dp, first, epsilon_budget=dp.epsilon(2), checkpoint_dir="third").step == 2


# Audits.


@remedy(
    "DPSGD.audit: pass one model, not an ensemble; its runs all start from it.",
    "DPSGD.audit: steps={} is beyond num_steps={}; pass fewer.",
    "DPSGD.audit: noise_multiplier is 0, so ε is infinite; pass a positive one.",
    "DPSGD.audit: with truncated batches canaries depend on each other; omit truncated_batch_size.",
    "many runs with one canary, or one run with many canaries, at least {}",
    "plots need matplotlib; install it with: pip install 'plurax[plot]'",
)
def audits(fails: Fails) -> None:
    audit = lambda dp, model=W, runs=30, steps=1, **options: dp.audit(
        model, X, key=KEY, runs=runs, steps=steps, progress=False, **options
    )
    of_models = make(of_model)
    ensemble = Ensemble.create(lambda rngs: nnx.Linear(3, 1, rngs=rngs), 2, seed=0)
    fails(audit, of_models, ensemble)
    audit(of_models, ensemble[0])
    fails(audit, make(), steps=5)
    fails(audit, make(noise_multiplier=0.0))
    fails(audit, make(truncated_batch_size=6, accountant="pld"))
    for runs, canaries in ((10, 1), (1, 3), (30, 30)):
        fails(audit, make(), runs=runs, canaries=canaries)
    audit(make(), W, runs=1, canaries=X)
    found = audit(make())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        fails(found.plot)
    assert len(found.plot()) == 2


# Plans of jax-privacy.


@remedy(
    "DPSGD.from_plan: {} is the plan's; omit it.",
    "DPSGD.from_plan: ε of DPSGD is not for replacing an example; pass another accountant.",
    "DPSGD.from_plan: column_normalize makes the noise depend on the step's number; omit it.",
)
def plans(fails: Fails) -> None:
    given = {"iterations": 4, "strategy": np.ones(1), "sampling_prob": 0.2, "noise_multiplier": 1.0}
    config = lambda **more: BandMFExecutionPlanConfig(**given, epsilon=None, delta=None, **more)
    run = lambda config, **more: DPSGD.from_plan(
        loss, optax.sgd(0.1), config, num_examples=N, target_delta=1e-2, accountant="rdp", **more
    )
    for name, value in {"l2_clip_norm": 1.0, "sampling": "poisson", "automatic": 0.1}.items():
        fails(run, config(), **{name: value})
    relation = dp_accounting.NeighboringRelation
    accountant = dp_accounting.pld.PLDAccountant
    fails(run, config(accountant=accountant(relation.REPLACE_ONE)))
    fails(run, config(column_normalize=True))
    for right in (config(), config(accountant=accountant(relation.REPLACE_SPECIAL))):
        assert run(right).num_steps == 4
