import copy
import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Trainer, TrainState
from plurax.ensemble._execution import stepper
from plurax.ensemble._execution.executor import StepInputs
from plurax.transforms import _vmap, clipped_grad, value_and_grad

STRATEGIES = ("vmap", "map", "unroll", "loop")
RATES = [0.02, 0.01, 0.03]
SGD, ADAM = optax.sgd(0.1), optax.adam(0.01)

# The same trainer for the same arguments, so that tests share its programs.
trainer_of = functools.cache(Trainer)


@functools.cache
def training_alone(loss, optimizer):
    """Return a function that trains one model with plain Flax and optax, and returns the losses."""

    @nnx.jit
    def step(model, opt_state, batch, numbers):
        (value, _), gradient = nnx.value_and_grad(loss, has_aux=True)(model, *batch)
        params = nnx.state(model, nnx.Param)
        updates, opt_state = optimizer(*numbers).update(gradient, opt_state, params)
        nnx.update(model, optax.apply_updates(params, updates))
        return value, opt_state

    def train(model, batches, *numbers):
        opt_state = optimizer(*numbers).init(nnx.state(model, nnx.Param))
        losses = []
        for batch in batches:
            value, opt_state = step(model, opt_state, batch, numbers)
            losses.append(value)
        return losses

    return train


def train(trainer, ensemble, batches):
    state = trainer.init(ensemble)
    losses = []
    for batch in batches:
        state, metrics = trainer.step(state, batch)
        losses.append(metrics["loss"])
    return state, np.array(losses)


# Dropout compiles slowly, so only two strategies have it where a test checks that members are independent.
KINDS = [("vmap", "stateful"), ("map", "plain"), ("unroll", "plain"), ("loop", "stateful")]


@pytest.fixture(scope="module")
def trained_alone(request, cross_entropy, make_batches):
    """Return the batches for a kind of model and, for each of `RATES`, a model trained alone and its losses."""

    @functools.cache
    def of(kind):
        make = request.getfixturevalue(kind)
        make_one = nnx.jit(lambda i: make(nnx.Rngs(jax.random.fold_in(jax.random.key(1), i))))
        batches = make_batches(4, features=20 if kind == "convolutional" else 4)
        train_one = training_alone(cross_entropy, optax.adam)
        models = [make_one(i) for i in range(3)]
        losses = [train_one(model, batches, rate) for model, rate in zip(models, RATES, strict=True)]
        return batches, models, losses

    return of


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [(strategy, "stateful") for strategy in (*STRATEGIES, "auto")]
    + [("vmap", "plain"), ("loop", "plain"), ("map", "convolutional"), ("auto", "convolutional")],
)
def test_training_together_is_training_each_alone(
    request, kind, strategy, create, cross_entropy, trained_alone, assert_same
):
    batches, models, alone = trained_alone(kind)
    trainer = Trainer(cross_entropy, optax.adam, hyperparams={"learning_rate": RATES}, strategy=strategy)
    state, losses = train(trainer, create(request.getfixturevalue(kind), 3, seed=1), batches)
    assert losses.shape == (4, 3)
    np.testing.assert_allclose(losses.T, alone, rtol=1e-5)
    for i in range(3):
        assert_same(state.ensemble[i], models[i], tolerance=2e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_member_may_have_its_own_batch(plain, create, cross_entropy, make_batches, assert_same, strategy):
    batches = make_batches(3, 3)
    trainer = trainer_of(cross_entropy, SGD, in_axes=0, strategy=strategy)
    state, _ = train(trainer, create(plain, 3), batches)
    train_one = training_alone(cross_entropy, optax.sgd)
    for i, member in enumerate(create(plain, 3)):
        train_one(member, [(x[i], y[i]) for x, y in batches], 0.1)
        assert_same(state.ensemble[i], member, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["vmap", "map", "loop"])
def test_axes_of_a_batch_are_given_by_element(plain, create, cross_entropy, make_batches, strategy):
    x, y = make_batches(1)[0]
    scales = np.array([1.0, 2.0, 4.0], np.float32)
    ens = create(plain, 3)
    alone = nnx.jit(cross_entropy)

    def loss(model, data, scale):
        return scale * cross_entropy(model, *data)[0]

    for in_axes, batch in (((None, 0), ((x, y), scales)), (((None, None), -1), ((x, y), scales))):
        trainer = Trainer(loss, optax.sgd(0.1), in_axes=in_axes, strategy=strategy)
        _, metrics = trainer.step(trainer.init(ens), batch)
        expected = [scale * alone(member, x, y)[0] for member, scale in zip(ens, scales, strict=True)]
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    last = np.moveaxis(np.stack([x, 2 * x, 3 * x]), 0, -1)
    trainer = Trainer(cross_entropy, optax.sgd(0.1), in_axes=(-1, None), strategy=strategy)
    _, metrics = trainer.step(trainer.init(ens), (last, y))
    expected = [alone(member, (i + 1) * x, y)[0] for i, member in enumerate(ens)]
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


def test_the_axes_of_a_batch_are_checked_once(plain, create, cross_entropy, make_batches, counted_checks):
    checks = counted_checks(stepper, _vmap)
    trainer = Trainer(cross_entropy, optax.sgd(0.1), strategy="vmap")
    trainer.step(trainer.init(create(plain, 2)), make_batches(1)[0])
    assert sorted(checks) == ["axes_per_argument", "mapped_size"]


def test_a_batch_that_is_not_a_tuple_is_one_argument(plain, create):
    trainer = Trainer(lambda model, batch: (model(batch["x"]) ** 2).mean(), optax.sgd(0.1))
    _, metrics = trainer.step(trainer.init(create(plain, 2)), {"x": jnp.ones((5, 4))})
    assert metrics["loss"].shape == (2,)
    trainer = Trainer(lambda model, x: (model(x) ** 2).mean(), optax.sgd(0.1))
    _, metrics = trainer.step(trainer.init(create(plain, 2)), jnp.ones((5, 4)))
    assert set(metrics) == {"loss"}


@pytest.mark.parametrize("options", [{"strategy": "map"}, {"strategy": "vmap", "chunk_size": 3}])
class Test_steps_that_donate_the_state:
    """`fit` donates the state; loops then replace the arrays of some members at a time."""

    @pytest.mark.slow
    def test_compute_the_same(self, options, stateful, create, assert_same):
        def loss(model, x, y, scale):
            error = scale * (model(x) - y)
            return jnp.mean(error**2), {"worst": jnp.abs(error).max(), "signs": error[0] > 0}

        generator = np.random.default_rng(3)
        batches = [
            (generator.normal(size=(6, 7, 4)), generator.normal(size=(7, 6, 3)), {"by": np.float32(0.5)})
            for _ in range(3)
        ]
        batches = [jax.tree.map(np.float32, batch) for batch in batches]
        trainer = Trainer(
            lambda model, x, y, scale: loss(model, x, y, scale["by"]),
            optax.adam,
            hyperparams={"learning_rate": list(np.linspace(0.01, 0.07, 7))},
            in_axes=(-2, 0, None),
            **options,
        )
        state = slow = trainer.init(create(stateful, 7))
        rows = []
        for batch in batches:
            slow, metrics = trainer.step(slow, batch)
            rows.append(metrics)
        fast, history = trainer.fit(state, batches, progress=False)
        assert_same(fast, slow, tolerance=1e-5)
        np.testing.assert_allclose([row["loss"] for row in history], np.ravel([m["loss"] for m in rows]), rtol=1e-5)
        _, metrics, _ = trainer._stepper.advance(jax.tree.map(jnp.copy, state), batches[0], donate=True)
        metrics.pop("stopped")
        assert_same(metrics, rows[0], tolerance=1e-5)

    def test_hold_the_state_once(self, options):
        ensemble = Ensemble.create(lambda rngs: nnx.Linear(64, 128, rngs=rngs), 40, seed=0)
        trainer = Trainer(lambda model, x: jnp.mean(model(x) ** 2), optax.adam(0.1), **options)
        state, batch = trainer.init(ensemble), (jnp.ones((2, 64)),)
        execution = trainer._stepper.advance(state, batch)[2]
        for donate in (False, True):
            inputs = StepInputs(state, batch, (None,))
            need = trainer._stepper.executor.temporaries(inputs, donate, execution)
            assert need < sum(x.nbytes for x in jax.tree.leaves(state)) / 3

    @pytest.mark.slow
    def test_with_arrays_that_change_dtype(self, options, assert_same):
        def narrow(updates, state, params=None):
            return updates, jax.tree.map(lambda x: x.astype(jnp.float16), state)

        optimizer = optax.chain(optax.trace(0.9), optax.GradientTransformation(lambda p: p, narrow), optax.sgd(0.1))
        ensemble = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 4, seed=0)
        trainer = Trainer(lambda model, x: jnp.mean(model(x) ** 2), optimizer, **options)
        state, batch = trainer.init(ensemble), jnp.ones((2, 4))
        after, _ = trainer.step(state, batch)
        assert_same(trainer.fit(state, [batch], progress=False)[0], after, tolerance=1e-5)
        assert np.float16 in [x.dtype for x in jax.tree.leaves(after.opt_state)]


@pytest.mark.slow
def test_chunks_of_members_change_nothing(stateful, create, cross_entropy, make_batches, assert_same):
    ens = create(stateful, 3)
    states = []
    for chunk_size in (None, 1, 2, 4):
        trainer = Trainer(cross_entropy, optax.adam(0.01), chunk_size=chunk_size, strategy="vmap")
        states.append(train(trainer, ens, make_batches(2))[0])
    for state in states[1:]:
        assert_same(state, states[0], tolerance=1e-5)


def test_reported_values_have_a_leading_member_axis(plain, create, cross_entropy, make_batches):
    trainer = Trainer(cross_entropy, optax.sgd(0.1))
    _, metrics = trainer.step(trainer.init(create(plain, 3)), make_batches(1)[0])
    assert {name: value.shape for name, value in metrics.items()} == {"loss": (3,), "accuracy": (3,)}


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), KINDS)
def test_members_do_not_depend_on_how_many_there_are(
    request, kind, create, cross_entropy, make_batches, assert_same, strategy
):
    batches = make_batches(6)
    trainer = trainer_of(cross_entropy, ADAM, strategy=strategy)
    eight = create(request.getfixturevalue(kind), 8)
    whole, half, one = (train(trainer, part, batches)[0] for part in (eight, eight[:4], eight[2:3]))
    assert_same(half.ensemble[2], whole.ensemble[2], tolerance=1e-6)
    assert_same(one.ensemble[0], whole.ensemble[2], tolerance=1e-6)


@pytest.mark.smoke
@pytest.mark.parametrize(("strategy", "kind"), KINDS)
def test_a_member_of_nans_leaves_the_others_as_they_were(
    request, kind, create, cross_entropy, make_batches, assert_same, leaves, strategy
):
    batches = make_batches(3)
    ens = create(request.getfixturevalue(kind), 3)
    members = ens.unstack()
    members[1].first.kernel[...] = jnp.full_like(members[1].first.kernel[...], jnp.nan)
    trainer = trainer_of(cross_entropy, ADAM, strategy=strategy)
    healthy, _ = train(trainer, ens, batches)
    sick, losses = train(trainer, Ensemble.stack(members), batches)
    assert np.isnan(losses[:, 1]).all()
    for i in (0, 2):
        assert_same(sick.ensemble[i], healthy.ensemble[i])
    assert np.isnan(np.concatenate([x.ravel() for x in leaves(nnx.state(sick.ensemble[1], nnx.Param))])).any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_leaves_its_argument_and_the_ensemble_usable(
    plain, create, cross_entropy, make_batches, leaves, strategy
):
    ens = create(plain, 3)
    trainer = trainer_of(cross_entropy, ADAM, strategy=strategy)
    state = trainer.init(ens)
    before = leaves((ens, state))
    first, _ = trainer.step(state, make_batches(1)[0])
    trainer.fit(state, make_batches(2), progress=False)
    again, _ = trainer.step(state, make_batches(1)[0])
    for a, b in zip(before, leaves((ens, state)), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(leaves(first), leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(state.step) == 0
    assert int(first.step) == 1


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_a_step_can_be_traced(plain, create, cross_entropy, make_batches, assert_same, strategy):
    trainer = trainer_of(cross_entropy, ADAM, strategy=strategy)
    state = trainer.init(create(plain, 3))
    batches = make_batches(3)
    expected = state
    for batch in batches:
        expected, _ = trainer.step(expected, batch)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    scanned, metrics = jax.lax.scan(trainer.step, state, stacked)
    assert isinstance(scanned, TrainState)
    assert metrics["loss"].shape == (3, 3)
    assert_same(scanned, expected, tolerance=1e-6)


def test_one_member_s_step_is_traced_once(plain, create, make_batches):
    calls = []

    def loss(model, x, y):
        calls.append(1)
        return (model(x) ** 2).mean()

    trainer = Trainer(loss, optax.sgd(0.1), strategy="vmap")
    state = trainer.init(create(plain, 3))
    for batch in make_batches(3):
        state, _ = trainer.step(state, batch)
    assert len(calls) == 1


def has_convolution_step(trainer, ens, batch):
    state = trainer.init(ens)
    return str(jax.make_jaxpr(trainer.step)(state, batch)).count("conv_general_dilated")


def test_auto_follows_its_rule(plain, convolutional, create, cross_entropy, make_batches):
    """Traced, "loop" is unrolled: one set of convolutions per member; "vmap" has one set in total."""
    auto = Trainer(cross_entropy, optax.sgd(0.1))
    batch = make_batches(1, features=20)[0]
    of_one = has_convolution_step(auto, create(convolutional, 1), batch)
    assert of_one > 0
    assert has_convolution_step(auto, create(convolutional, 3), batch) == 3 * of_one
    products = str(jax.make_jaxpr(auto.step)(auto.init(create(plain, 3)), make_batches(1)[0])).count("dot_general")
    alone = str(jax.make_jaxpr(auto.step)(auto.init(create(plain, 1)), make_batches(1)[0])).count("dot_general")
    assert products == alone


class Test_optimizers:
    def test_a_ready_transformation_is_shared(self, plain, create, cross_entropy, make_batches, assert_same):
        ens = create(plain, 2)
        ready = Trainer(cross_entropy, optax.adamw(0.01, weight_decay=0.1))
        factory = Trainer(cross_entropy, optax.adamw, hyperparams={"learning_rate": 0.01, "weight_decay": 0.1})
        a, b = (train(trainer, ens, make_batches(3))[0] for trainer in (ready, factory))
        assert_same(a, b)

    def test_two_hyperparameters_and_a_shared_one(self, plain, create, cross_entropy, make_batches, assert_same):
        rates, decays = np.array([0.01, 0.02]), (0.0, 0.5)
        trainer = Trainer(
            cross_entropy, optax.adamw, hyperparams={"learning_rate": rates, "weight_decay": decays, "b1": 0.8}
        )
        state, _ = train(trainer, create(plain, 2), make_batches(3))
        train_one = training_alone(cross_entropy, lambda rate, decay: optax.adamw(rate, b1=0.8, weight_decay=decay))
        for i, member in enumerate(create(plain, 2)):
            train_one(member, make_batches(3), rates[i], decays[i])
            assert_same(state.ensemble[i], member, tolerance=1e-5)

    def test_the_values_are_in_the_state(self, plain, create, cross_entropy):
        trainer = Trainer(cross_entropy, optax.adam, hyperparams={"learning_rate": [0.1, 0.2]})
        state = trainer.init(create(plain, 2))
        np.testing.assert_array_equal(state.opt_state.hyperparams["learning_rate"], np.float32([0.1, 0.2]))

    def test_a_schedule_and_a_mask_are_shared(self, plain, create, cross_entropy, make_batches, assert_same):
        def mask(params):
            return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

        schedule = optax.linear_schedule(0.1, 0.0, 3)
        trainer = Trainer(
            cross_entropy,
            optax.adamw,
            hyperparams={"learning_rate": schedule, "mask": mask, "weight_decay": [0.1, 0.2]},
        )
        state, _ = train(trainer, create(plain, 2), make_batches(3))
        train_one = training_alone(cross_entropy, lambda decay: optax.adamw(schedule, weight_decay=decay, mask=mask))
        for i, member in enumerate(create(plain, 2)):
            train_one(member, make_batches(3), [0.1, 0.2][i])
            assert_same(state.ensemble[i], member, tolerance=1e-5)

    def test_bfloat16_parameters_stay_bfloat16(self, make_batches):
        def make(rngs):
            return nnx.Linear(4, 3, param_dtype=jnp.bfloat16, rngs=rngs)

        trainer = Trainer(lambda m, x, y: (m(x) ** 2).mean(), optax.adam, hyperparams={"learning_rate": [0.1, 0.2]})
        state, _ = train(trainer, Ensemble.create(make, 2, seed=0), make_batches(2))
        assert state.ensemble[0].kernel.dtype == jnp.bfloat16

    @pytest.mark.slow
    def test_optimizers_that_evaluate_the_loss(self, plain, create, cross_entropy, make_batches, assert_same):
        """A line search evaluates the loss, a different number of times for each member."""
        x, y = make_batches(1)[0]

        def loss(model, x, y):
            return cross_entropy(model, x, y)[0]

        ens = create(plain, 2)
        searching = optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(5))
        for optimizer in (optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)), searching):

            @functools.partial(jax.jit, static_argnums=0)
            def step(graphdef, params, opt_state, optimizer=optimizer):
                def value_fn(params):
                    return loss(nnx.merge(graphdef, params), x, y)

                value, grad = jax.value_and_grad(value_fn)(params)
                updates, opt_state = optimizer.update(
                    grad, opt_state, params, value=value, grad=grad, value_fn=value_fn
                )
                return optax.apply_updates(params, updates), opt_state

            state, _ = train(Trainer(loss, optimizer, strategy="vmap"), ens, [(x, y)] * 3)
            for i, member in enumerate(ens):
                graphdef, params = nnx.split(member)
                opt_state = optimizer.init(params)
                for _ in range(3):
                    params, opt_state = step(graphdef, params, opt_state)
                assert_same(state.ensemble[i], nnx.merge(graphdef, params), tolerance=1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("strategy", "opaque", "clips"),
        [("vmap", False, False), ("vmap", True, True), ("loop", True, False), ("loop", False, True)],
    )
    def test_sharpness_aware_minimization_of_optax(
        self, plain, create, cross_entropy, make_batches, assert_same, strategy, opaque, clips
    ):
        def loss(model, x, y):
            return cross_entropy(model, x, y)[0]

        def sharpness_aware(learning_rate):
            ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.5))
            sam = optax.contrib.sam(optax.sgd(learning_rate, 0.9), ascent, sync_period=2, opaque_mode=opaque)
            return optax.chain(optax.clip_by_global_norm(0.3), sam) if clips else sam

        ens, rates = create(plain, 2), [0.1, 0.3]
        trainer = Trainer(loss, sharpness_aware, hyperparams={"learning_rate": rates}, strategy=strategy)
        state, _ = train(trainer, ens, make_batches(4))

        @jax.jit
        def step(params, opt_state, rate, x, y):
            def grad_fn(params, i):
                return jax.grad(lambda params: loss(nnx.merge(graphdef, params), x, y))(params)

            more = {"grad_fn": grad_fn} if opaque else {}
            updates, opt_state = sharpness_aware(rate).update(grad_fn(params, 0), opt_state, params, **more)
            return optax.apply_updates(params, updates), opt_state

        for member, mine, rate in zip(ens, state.ensemble, rates, strict=True):
            graphdef, params = nnx.split(member)
            opt_state = sharpness_aware(rate).init(params)
            for x, y in make_batches(4):
                params, opt_state = step(params, opt_state, rate, x, y)
            assert_same(mine, nnx.merge(graphdef, params), tolerance=1e-4)

    def test_ascent_steps_inside_a_step_leave_the_statistics_and_use_the_same_masks(
        self, stateful, create, cross_entropy, make_batches, assert_same
    ):
        """An ascent of length zero is plain descent, also for BatchNorm statistics and dropout."""
        still = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.0), sync_period=3, opaque_mode=True)
        a, b = (
            train(Trainer(cross_entropy, optimizer, strategy="vmap"), create(stateful, 2), make_batches(3))[0]
            for optimizer in (still, optax.sgd(0.1))
        )
        assert_same(a.ensemble, b.ensemble, tolerance=1e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", ["vmap", "loop"])
    def test_lookahead_keeps_the_slow_parameters_in_its_state(
        self, plain, create, cross_entropy, make_batches, assert_same, strategy
    ):
        def looking_ahead(learning_rate):
            return optax.lookahead(optax.adam(learning_rate), sync_period=2, slow_step_size=0.4)

        ens, rates = create(plain, 2), [0.1, 0.3]
        trainer = Trainer(cross_entropy, looking_ahead, hyperparams={"learning_rate": rates}, strategy=strategy)
        state, history = trainer.fit(trainer.init(ens), make_batches(5), progress=False)
        assert [row["learning_rate"] for row in history[:2]] == rates
        shared, _ = train(Trainer(cross_entropy, looking_ahead(0.1), strategy=strategy), ens, make_batches(5))
        assert_same(shared.ensemble[0], state.ensemble[0], tolerance=1e-5)
        slow = dataclasses.replace(shared.ensemble, trainable=shared.opt_state.slow)

        @jax.jit
        def step(pair, opt_state, rate, x, y):
            gradient = jax.grad(lambda params: cross_entropy(nnx.merge(graphdef, params), x, y)[0])(pair.fast)
            updates, opt_state = looking_ahead(rate).update(gradient, opt_state, pair)
            return optax.apply_updates(pair, updates), opt_state

        for i, rate in enumerate(rates):
            graphdef, params = nnx.split(ens[i])
            pair = optax.LookaheadParams.init_synced(params)
            opt_state = looking_ahead(rate).init(pair)
            for x, y in make_batches(5):
                pair, opt_state = step(pair, opt_state, rate, x, y)
            assert_same(state.ensemble[i], nnx.merge(graphdef, pair.fast), tolerance=1e-5)
            if i == 0:
                assert_same(slow[0], nnx.merge(graphdef, pair.slow), tolerance=1e-5)

    def test_a_multi_steps_object_accumulates_gradients(self, plain, create, cross_entropy, make_batches, assert_same):
        ens, object_ = create(plain, 2), optax.MultiSteps(optax.adam(0.1), 2)
        a, b, c = (
            train(Trainer(cross_entropy, optimizer, **options), ens, make_batches(4))[0].ensemble
            for optimizer, options in (
                (object_, {}),
                (object_.gradient_transformation(), {}),
                (lambda rate: optax.MultiSteps(optax.adam(rate), 2), {"hyperparams": {"rate": [0.1, 0.1]}}),
            )
        )
        assert_same(a, b)
        assert_same(a, c, tolerance=1e-5)

    def test_a_factory_of_something_else_is_refused(self):
        with pytest.raises(
            TypeError, match="the optax factory must return a GradientTransformation, but it returned 3"
        ):
            Trainer(lambda model: 0.0, lambda: 3)

    @pytest.mark.parametrize("strategy", ["vmap", "loop"])
    @pytest.mark.parametrize(
        ("made_by", "used_by", "message"),
        [
            (
                (ADAM,),
                (SGD,),
                r"it has `opt_state\[0\].count`, which this optimizer does not use",
            ),
            ((SGD,), (ADAM,), r"it lacks `opt_state\[0\].count`, an array of shape \(\)"),
            ((ADAM,), (optax.adam, [0.1, 0.2]), "it lacks `opt_state.count`"),
            ((optax.adam, [0.1, 0.2]), (ADAM,), r"it lacks `opt_state\[0\].count`"),
            (
                (SGD,),
                (optax.chain(optax.clip(1.0), optax.sgd(0.1)),),
                "it consists of other transformations",
            ),
        ],
    )
    def test_a_state_of_another_optimizer_is_refused(
        self, plain, create, cross_entropy, make_batches, strategy, made_by, used_by, message
    ):
        def make(optimizer, rates=None):
            if rates is None:
                return trainer_of(cross_entropy, optimizer, strategy=strategy)
            return Trainer(cross_entropy, optimizer, hyperparams={"learning_rate": rates}, strategy=strategy)

        state, trainer, batch = make(*made_by).init(create(plain, 2)), make(*used_by), make_batches(1)[0]
        message = f"the state is from another optimizer: {message}.*; use the optimizer that made it, or call init"
        with pytest.raises(ValueError, match=f"^Trainer.step: {message}"):
            trainer.step(state, batch)
        with pytest.raises(ValueError, match=f"^Trainer.step: {message}"):
            jax.jit(trainer.step)(state, batch)
        with pytest.raises(ValueError, match=f"^Trainer.fit: {message}"):
            trainer.fit(state, [batch], progress=False)
        trainer.step(trainer.init(state.ensemble), batch)

    def test_values_of_any_sequence_and_dtype(self, plain, create, cross_entropy):
        ens = create(plain, 2)
        for values in (range(2), (0, 1), np.float16([0, 1]), jnp.bfloat16([0, 1]), np.array([0, 1])):
            trainer = Trainer(cross_entropy, optax.adam, hyperparams={"learning_rate": values})
            np.testing.assert_array_equal(trainer.init(ens).opt_state.hyperparams["learning_rate"], [0, 1])

    def test_later_changes_of_the_callers_array_do_not_affect_the_trainer(self, plain, create, cross_entropy):
        rates = np.array([0.1, 0.2])
        trainer = Trainer(cross_entropy, optax.adam, hyperparams={"learning_rate": rates})
        rates[:] = 0
        state = trainer.init(create(plain, 2))
        np.testing.assert_array_equal(state.opt_state.hyperparams["learning_rate"], np.float32([0.1, 0.2]))


@pytest.fixture(scope="module")
def pair(plain, create, cross_entropy, make_batches):
    """Return a function that makes the state after a step of a loop, and the same state made by one program."""
    ens = create(plain, 3)

    def stepped(strategy):
        trainer = trainer_of(cross_entropy, ADAM, strategy=strategy)
        return lambda: trainer.step(trainer.init(ens), make_batches(1)[0])[0]

    return stepped("loop"), stepped("unroll")()


class Test_states_of_loops:
    """They are stacked, as with any strategy."""

    @pytest.mark.parametrize(
        "look",
        [
            lambda state: state,
            lambda state: state.ensemble,
            lambda state: state.opt_state,
            lambda state: jax.jit(lambda state: state)(state),
            lambda state: jax.tree.map(lambda x: x + 1, state),
            lambda state: copy.deepcopy(state),
            lambda state: dataclasses.replace(state, step=state.step + 1),
        ],
    )
    def test_every_access_sees_the_stacked_arrays(self, pair, assert_same, look):
        stepped, expected = pair
        seen = look(stepped())
        assert type(seen) is type(look(expected))
        assert_same(seen, look(expected), tolerance=1e-6)

    def test_repeated_access_gives_the_same_arrays(self, pair, cross_entropy, make_batches, assert_same):
        trainer = trainer_of(cross_entropy, ADAM, strategy="loop")
        state = pair[0]()
        unseen, _ = trainer.step(state, make_batches(2)[1])
        assert state.ensemble is state.ensemble
        seen, _ = trainer.step(state, make_batches(2)[1])
        assert_same(unseen, seen)

    def test_missing_attributes_are_named(self, pair):
        with pytest.raises(AttributeError, match="object has no attribute .params."):
            _ = pair[0]().params
        with pytest.raises(dataclasses.FrozenInstanceError):
            pair[0]().step = 3


class Test_grad_fn:
    def test_it_replaces_value_and_grad(self, plain, create, cross_entropy, make_batches, assert_same):
        def halved(loss):
            def gradients(model, *batch):
                value, gradient = value_and_grad(loss, has_aux=True)(model, *batch)
                return value, jax.tree.map(lambda g: g / 2, gradient)

            return gradients

        ens = create(plain, 2)
        a, _ = train(Trainer(cross_entropy, optax.sgd(0.2), grad_fn=halved), ens, make_batches(2))
        b, _ = train(Trainer(cross_entropy, optax.sgd(0.1)), ens, make_batches(2))
        assert_same(a.ensemble, b.ensemble, tolerance=1e-6)

    @pytest.mark.parametrize("in_axes", [None, 0])
    def test_it_may_clip_each_examples_gradient(self, in_axes, plain, create, cross_entropy, make_batches, assert_same):
        """Also where each member sees a batch of its own."""

        def clipped(loss):
            of = clipped_grad(
                loss,
                has_aux=True,
                batch_argnums=(1, 2),
                l2_clip_norm=0.1,
                normalize_by=6.0,
                return_values=True,
            )

            def gradients(model, *batch):
                gradient, each = of(model, *batch)
                return jax.tree.map(lambda x: x.mean(0), (each.values, each.aux)), gradient

            return gradients

        ens = create(plain, 2)
        (batch,) = make_batches(1) if in_axes is None else make_batches(1, 2)
        trainer = Trainer(cross_entropy, optax.sgd(0.1), grad_fn=clipped, in_axes=in_axes)
        state, metrics = trainer.step(trainer.init(ens), batch)
        for i in range(2):
            x, y = batch if in_axes is None else (batch[0][i], batch[1][i])
            member = ens[i]
            of_one = lambda m, x, y: cross_entropy(m, x[None], y[None])[0]
            each = [nnx.grad(of_one)(member, *example) for example in zip(x, y, strict=True)]
            norms = [optax.tree.norm(gradient) for gradient in each]
            assert min(norms) > 0.1
            scaled = [jax.tree.map(lambda g, n=n: g * 0.1 / n, one) for one, n in zip(each, norms, strict=True)]
            mean = jax.tree.map(lambda *g: sum(g) / 6, *scaled)
            expected = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(member, nnx.Param), mean)
            assert_same(nnx.state(state.ensemble[i], nnx.Param), expected, tolerance=1e-6)
            np.testing.assert_allclose(metrics["loss"][i], cross_entropy(member, x, y)[0], rtol=1e-5)

    def test_its_assignments_to_the_parameters_are_kept(self, plain, create, cross_entropy, make_batches, assert_same):
        """As in a plain Flax loop, the optimizer updates the parameters that the gradient function assigned."""

        def clipped(loss):
            def gradients(model, *batch):
                result = value_and_grad(loss, has_aux=True)(model, *batch)
                nnx.update(model, jax.tree.map(lambda p: p.clip(-0.2, 0.2), nnx.state(model, nnx.Param)))
                return result

            return gradients

        ens = create(plain, 2)
        state, _ = train(Trainer(cross_entropy, optax.sgd(0.1), grad_fn=clipped), ens, make_batches(2))

        @nnx.jit
        def step(member, batch):
            _, gradient = clipped(cross_entropy)(member, *batch)
            nnx.update(member, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(member, nnx.Param), gradient))

        for i, member in enumerate(ens):
            for batch in make_batches(2):
                step(member, batch)
            assert_same(state.ensemble[i], member, tolerance=1e-5)

    def test_sharpness_aware_steps(self, plain, create, cross_entropy, make_batches, assert_same):
        def sharpness_aware(loss):
            def gradients(model, *batch):
                value, gradient = value_and_grad(loss, has_aux=True)(model, *batch)
                climb = jax.tree.map(lambda g: 0.05 * g / optax.tree.norm(gradient), gradient)
                there = nnx.clone(model)
                nnx.update(there, jax.tree.map(jnp.add, nnx.state(model, nnx.Param), climb))
                return value, value_and_grad(loss, has_aux=True)(there, *batch)[1]

            return gradients

        ens = create(plain, 2)
        trainer = Trainer(cross_entropy, optax.sgd(0.1), grad_fn=sharpness_aware, strategy="vmap")
        state, _ = train(trainer, ens, make_batches(2))

        @nnx.jit
        def step(member, batch):
            _, gradient = sharpness_aware(cross_entropy)(member, *batch)
            nnx.update(member, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(member, nnx.Param), gradient))

        for i, member in enumerate(ens):
            for batch in make_batches(2):
                step(member, batch)
            assert_same(state.ensemble[i], member, tolerance=1e-5)

    @pytest.mark.parametrize(
        ("gradients", "error", "match"),
        [
            (lambda m, *b: (jnp.zeros(4), nnx.state(m, nnx.Param)), TypeError, r"loss must return a scalar, .* \(4,\)"),
            (lambda m, *b: 0.0, TypeError, r"must return a pair \(value, gradients\)"),
            (lambda m, *b: (0.0, {}), ValueError, "gives nothing for the parameter `first.bias`"),
            (
                lambda m, *b: (0.0, jax.tree.map(lambda p: p[0], nnx.state(m, nnx.Param))),
                ValueError,
                r"shape \(\) .* for the parameter `first.bias`, which is an array of shape \(5,\)",
            ),
        ],
    )
    def test_it_must_give_gradients_of_the_parameters(self, plain, create, make_batches, gradients, error, match):
        trainer = Trainer(lambda m, x, y: 0.0, optax.sgd(0.1), grad_fn=lambda loss: gradients, strategy="vmap")
        with pytest.raises(error, match=match):
            trainer.step(trainer.init(create(plain, 2)), make_batches(1)[0])


class Test_refusals:
    def make(self, *args, **kwargs):
        return Trainer(lambda model, x, y: (model(x) ** 2).mean(), *args, **kwargs)

    def test_things_that_cannot_be_called(self):
        with pytest.raises(TypeError, match="Trainer: loss must be a function, .* but got 3"):
            Trainer(3, optax.adam(1e-3))
        with pytest.raises(TypeError, match="optimizer must be an optax factory"):
            self.make("adam")
        with pytest.raises(TypeError, match="grad_fn must be a function, .* but got"):
            self.make(optax.adam(1e-3), grad_fn=3)

    def test_hyperparameters_that_the_factory_does_not_take_or_lacks(self):
        with pytest.raises(ValueError, match="adam takes no hyperparameter 'lr'; it takes learning_rate, b1"):
            self.make(optax.adam, hyperparams={"lr": 0.1})
        with pytest.raises(ValueError, match="adam needs learning_rate"):
            self.make(optax.adam, hyperparams={"b1": [0.1, 0.2]})
        with pytest.raises(ValueError, match="hyperparams need an optax factory"):
            self.make(optax.adam(0.1), hyperparams={"learning_rate": 0.1})

    @pytest.mark.parametrize("value", [["a", "b"], [[0.1, 0.2]], [True, False], [], [[1], [2, 3]]])
    def test_hyperparameters_that_are_not_numbers(self, value):
        with pytest.raises(TypeError, match=r"hyperparams\['learning_rate'\] must be a number or a list"):
            self.make(optax.adam, hyperparams={"learning_rate": value})

    def test_hyperparameters_that_are_not_a_dict(self):
        with pytest.raises(TypeError, match=r"hyperparams must be a dict .* but got \[0.1\] of type list"):
            self.make(optax.adam, hyperparams=[0.1])

    def test_hyperparameters_of_the_wrong_length(self, plain, create):
        trainer = self.make(optax.adam, hyperparams={"learning_rate": [0.1, 0.2, 0.3]})
        with pytest.raises(ValueError, match=r"hyperparams\['learning_rate'\] has 3 values, but the ensemble has 2"):
            trainer.init(create(plain, 2))

    def test_unknown_strategies_and_chunks(self):
        with pytest.raises(
            ValueError, match="strategy must be one of 'auto', 'vmap', 'map', 'unroll', 'loop', but got 'pmap'"
        ):
            self.make(optax.sgd(0.1), strategy="pmap")
        for chunk_size, error in ((0, ValueError), (-2, ValueError), (1.5, TypeError), (True, TypeError)):
            with pytest.raises(error, match="chunk_size must be (at least 1|an int or None), but got"):
                self.make(optax.sgd(0.1), chunk_size=chunk_size)
        with pytest.raises(
            ValueError, match='chunk_size needs strategy="vmap" or "auto", but the strategy is \'loop\''
        ):
            self.make(optax.sgd(0.1), chunk_size=2, strategy="loop")

    def test_axes_of_another_kind(self):
        with pytest.raises(TypeError, match="in_axes"):
            self.make(optax.sgd(0.1), in_axes="first")

    def test_members_in_which_nothing_trains(self):
        ens = Ensemble.stack([nnx.Dropout(0.5, rngs=nnx.Rngs(i)) for i in range(2)])
        with pytest.raises(ValueError, match="the members have no trainable arrays; give them"):
            self.make(optax.sgd(0.1)).init(ens)

    def test_budgets_and_times_of_another_kind(self):
        with pytest.raises(
            ValueError, match='memory_budget needs strategy="vmap" or "auto", but the strategy is \'map'
        ):
            self.make(optax.sgd(0.1), memory_budget="1MiB", strategy="map")
        with pytest.raises(ValueError, match="chunk_size and memory_budget both set the chunk"):
            self.make(optax.sgd(0.1), memory_budget="1MiB", chunk_size=2)
        with pytest.raises(ValueError, match="memory_budget must be a number of bytes or a string"):
            self.make(optax.sgd(0.1), memory_budget="much")
        with pytest.raises(TypeError, match="tune_seconds must be a number, but got '5' of type str"):
            self.make(optax.sgd(0.1), tune_seconds="5")
        for seconds in (-1, float("nan")):
            with pytest.raises(ValueError, match="tune_seconds must be at least 0, but got"):
                self.make(optax.sgd(0.1), tune_seconds=seconds)

    def test_arguments_that_are_not_an_ensemble_or_a_state(self, plain, create, make_batches):
        trainer = self.make(optax.sgd(0.1))
        with pytest.raises(TypeError, match="Trainer.init: needs an Ensemble, but got Plain"):
            trainer.init(plain(nnx.Rngs(0)))
        with pytest.raises(TypeError, match="Trainer.step: state must be a TrainState"):
            trainer.step(create(plain, 2), make_batches(1)[0])

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_a_batch_of_other_axes(self, plain, create, make_batches, strategy):
        ens = create(plain, 2)
        trainer = self.make(optax.sgd(0.1), in_axes=0, strategy=strategy)
        with pytest.raises(ValueError, match="the number of members is 2, but axis 0 of argument `x` has size 3"):
            trainer.step(trainer.init(ens), make_batches(1, 3)[0])
        trainer = self.make(optax.sgd(0.1), in_axes=(0,), strategy=strategy)
        with pytest.raises(ValueError, match="in_axes has 1 entries, but the call has 2"):
            trainer.step(trainer.init(ens), make_batches(1, 2)[0])

    def test_a_loss_of_another_kind(self, plain, create, make_batches):
        ens = create(plain, 2)
        for loss, error, match in (
            (lambda m, x, y: m(x), TypeError, r"loss must return a scalar, .* \(6, 3\) \(shapes\)"),
            (lambda m, x, y: (m(x).mean(), 3), TypeError, "the auxiliary output of the loss must be a dict"),
            (lambda m, x, y: (m(x).mean(), {"loss": 1}), ValueError, 'reports a value named "loss"'),
            (lambda m, x, y: (m(x).mean(), {"step": 1}), ValueError, 'reports a value named "step"'),
            (lambda m, x, y: (m(x).mean(), {"member": 1}), ValueError, 'reports a value named "member"'),
        ):
            trainer = Trainer(loss, optax.sgd(0.1), strategy="vmap")
            with pytest.raises(error, match=match):
                trainer.step(trainer.init(ens), make_batches(1)[0])

    def test_a_loss_that_changes_the_structure(self, stateful, create, make_batches):
        def loss(model, x, y):
            model.seen = nnx.Variable(jnp.ones(()))
            return model(x).mean()

        def gradients(loss):
            return lambda model, *batch: (loss(model, *batch), nnx.state(model, nnx.Param))

        for grad_fn, who in ((None, r"value_and_grad: fun .* of \w+"), (gradients, "Trainer: loss .* of the model")):
            trainer = Trainer(loss, optax.sgd(0.1), grad_fn=grad_fn, strategy="vmap")
            with pytest.raises(ValueError, match=rf"^{who} \(`seen`\), but only values of variables"):
                trainer.step(trainer.init(create(stateful, 2)), make_batches(1)[0])

    def test_a_loss_that_changes_the_shape_or_dtype_of_a_variable(self, stateful, create, make_batches):
        for change, match in (
            (lambda mean: jnp.stack([mean, mean]), r"`norm.mean` .* shape \(6,\) .* to an array of shape \(2, 6\)"),
            (lambda mean: mean.astype(jnp.bfloat16), "`norm.mean` .* float32, to .* bfloat16; keep shape"),
        ):

            def loss(model, x, y, change=change):
                model.norm.mean[...] = 0.0
                model.norm.mean.set_value(change(model.norm.mean.get_value()))
                return (model.first(x) ** 2).mean()

            trainer = Trainer(loss, optax.sgd(0.1), strategy="vmap")
            with pytest.raises(ValueError, match=match):
                trainer.step(trainer.init(create(stateful, 2)), make_batches(1)[0])

    def test_everything_promised_is_documented(self):
        assert all(name in inspect.getdoc(Trainer) for name in inspect.signature(Trainer).parameters)
