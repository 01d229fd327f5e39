"""Members with non-finite losses or gradients stop, without effect on the others."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import plurax.ensemble
from plurax.ensemble import EarlyStopping, Ensemble, MemberStatus, Restarts, Trainer
from plurax.ensemble._step.member_status import finite, still_finite

STRATEGIES = [("vmap", None), ("vmap", 2), ("map", None), ("unroll", None), ("loop", None)]


def poisoned(batches, member, at):
    """Per-member batches, where `member` has a NaN in batch `at`."""
    batches = [tuple(np.array(x) for x in batch) for batch in batches]
    batches[at][0][member, 0, 0] = np.nan
    return batches


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "chunk_size"), STRATEGIES)
@pytest.mark.parametrize("in_fit", [False, True])
def test_others_are_the_same_to_the_bit(
    strategy, chunk_size, in_fit, stateful, create, cross_entropy, make_batches, assert_same
):
    trainer = Trainer(cross_entropy, optax.adam(0.01), in_axes=0, strategy=strategy, chunk_size=chunk_size)
    batches = make_batches(5, 5)
    runs = {}
    for name, given in (("sound", batches), ("ill", poisoned(batches, 3, 2)), ("short", batches[:2])):
        state = trainer.init(create(stateful, 5))
        if in_fit:
            if name == "ill":
                with pytest.warns(UserWarning, match="member 3 stopped at step 3, since the loss or the gradients"):
                    runs[name] = trainer.fit(state, given, progress=False)
            else:
                runs[name] = trainer.fit(state, given, progress=False)
        else:
            for batch in given:
                state, _ = trainer.step(state, batch)
            runs[name] = state, []
    states = {name: state for name, (state, _) in runs.items()}
    others = np.array([0, 1, 2, 4])
    rows = {name: jax.tree.map(lambda x: x[others], (s.ensemble, s.opt_state)) for name, s in states.items()}
    assert_same(rows["ill"], rows["sound"])
    of_ill = {name: jax.tree.map(lambda x: x[3], (s.ensemble, s.opt_state)) for name, s in states.items()}
    assert_same(of_ill["ill"], of_ill["short"])
    np.testing.assert_array_equal(states["ill"].standing.stopped, [0, 0, 0, 1, 0])
    np.testing.assert_array_equal(states["ill"].standing.step, [5, 5, 5, 3, 5])
    assert int(states["ill"].step) == 5
    if in_fit:
        of_member = [row for row in runs["ill"][1] if row["member"] == 3]
        assert [row["step"] for row in of_member] == [1, 2, 3]
        assert np.isnan(of_member[-1]["loss"])
        assert len(runs["ill"][1]) == 4 * 5 + 3


def loss_of(term):
    def loss(model, x):
        return term(model.kernel[...].sum()) + 0 * model(x).sum()

    return loss


@pytest.mark.parametrize(
    ("loss", "optimizer"),
    [
        (loss_of(lambda w: jnp.log(w - w - 1)), optax.sgd(0.1)),
        (loss_of(lambda w: jnp.exp(1e9 + w)), optax.sgd(0.1)),
        (loss_of(lambda w: jnp.sqrt(w - w)), optax.sgd(0.1)),  # only the gradient is not finite
        (loss_of(lambda w: 1e38 * w), optax.sgd(1e-36)),  # finite entries, but their sum is not
    ],
)
def test_a_loss_or_a_gradient_that_is_not_finite(loss, optimizer, assert_same):
    ensemble = Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 2, seed=0)
    trainer = Trainer(loss, optimizer)
    before = trainer.init(ensemble)
    after, _ = trainer.step(before, jnp.ones((1, 3)))
    assert_same(after.ensemble, before.ensemble)
    np.testing.assert_array_equal(after.standing.stopped, [1, 1])
    after, _ = Trainer(loss, optimizer, nonfinite="ignore").step(before, jnp.ones((1, 3)))
    np.testing.assert_array_equal(after.standing.stopped, [0, 0])


def test_parameters_of_eight_bits_train():
    class Small(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.BatchStat(jnp.ones(2, jnp.float8_e4m3fn))
            self.weight = nnx.Param(jnp.ones(2))

        def __call__(self, x):
            return x * self.weight[...] * self.scale[...].astype(jnp.float32)

    trainer = Trainer(lambda model, x: jnp.sum(model(x) ** 2), optax.sgd(0.1))
    state = trainer.init(Ensemble.create(Small, 2, seed=0))
    state, _ = trainer.fit(state, [jnp.ones(2)] * 4, progress=False, restarts=Restarts(every=2))
    np.testing.assert_array_equal(state.standing.stopped, [0, 0])
    assert finite(jnp.ones(3, jnp.float8_e4m3fn))
    assert not finite(jnp.array([1.0, jnp.nan], jnp.float8_e4m3fn))


def test_large_numbers_of_a_mask_are_finite():
    mask = jnp.full(4, jnp.finfo(jnp.float32).min)
    assert still_finite(mask, jnp.zeros(4))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_single_non_finite_number_is_detected(dtype, value):
    tree = {"a": jnp.full((30, 7), 6e4, dtype), "b": jnp.ones((), dtype), "c": jnp.arange(3), "d": jnp.zeros((0, 2))}
    assert jax.jit(finite)(tree)
    assert not jax.jit(finite)({**tree, "a": tree["a"].at[29, 3].set(value)})
    assert not jax.jit(finite)({**tree, "a": tree["a"].at[29, 3].set(value).at[2, 1].set(-value)})
    assert still_finite(tree, tree)
    masked = {**tree, "a": tree["a"].at[29, 3].set(value)}
    assert jax.jit(still_finite)(masked, masked)
    assert not jax.jit(still_finite)(masked, tree)


def ends_with_parameters_that_are_not_finite():
    """Two members, where the fourth update of the second is infinite though its gradient is finite."""
    trainer = Trainer(lambda model, scale: scale * model(jnp.ones((1, 3))).sum(), optax.sgd(100.0), in_axes=0)
    state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 2, seed=0))
    batches = [np.float32([1e-3, 1e-3])] * 12
    batches[3] = np.float32([1e-3, 3e37])
    return trainer, state, batches


def test_parameters_that_are_not_finite_show_in_the_next_loss():
    trainer, state, batches = ends_with_parameters_that_are_not_finite()
    with (
        pytest.warns(UserWarning, match="member 1 stopped at step 5, since the loss or the gradients were not finite"),
        pytest.warns(UserWarning, match="the parameters of member 1 are no longer finite"),
    ):
        state, _ = trainer.fit(state, batches, progress=False)
    np.testing.assert_array_equal(state.standing.stopped, [0, 1])


def test_parameters_made_non_finite_by_the_last_step_are_reported(tmp_path):
    trainer, start, batches = ends_with_parameters_that_are_not_finite()
    for _ in range(2):  # a resumed run warns too
        with pytest.warns(UserWarning, match="the parameters of member 1 are no longer finite, though the gradients"):
            state, _ = trainer.fit(start, batches[:4], progress=False, checkpoint_dir=tmp_path)
        np.testing.assert_array_equal(state.standing.stopped, [0, 0])


def test_parameters_that_are_not_finite_on_purpose_may_stay():
    class Masked(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.array([1.0, -jnp.inf]))

        def __call__(self, x):
            return nnx.softmax(self.scale[...]) * x

    trainer = Trainer(lambda model, x: ((model(x) - 3) ** 2)[0], optax.sgd(0.1))
    state = trainer.init(Ensemble.create(Masked, 2, seed=0))
    state, _ = trainer.step(state, jnp.ones(2))
    np.testing.assert_array_equal(state.standing.stopped, [0, 0])


@pytest.mark.parametrize("options", [{}, {"early_stopping": EarlyStopping(evaluate=lambda ens: np.zeros(len(ens)))}])
@pytest.mark.parametrize("every", [None, 1, 2, 3])
def test_a_run_ends_when_no_member_trains(every, options, tmp_path):
    ensemble = Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 2, seed=0)
    trainer = Trainer(lambda model, x: jnp.log(x).sum() + 0 * model(x).sum(), optax.sgd(0.1))
    batches = [jnp.ones((1, 3))] * 2 + [-jnp.ones((1, 3))] * 20
    start = trainer.init(ensemble)
    told = []
    options = {**options, "callbacks": [lambda step, _: told.append(step)], "progress": False}
    options |= {"checkpoint_dir": tmp_path, "checkpoint_every": every} if every else {}
    with (
        pytest.warns(UserWarning, match="members 0, 1 stopped at step 3"),
        pytest.warns(UserWarning, match="all members have stopped after step 3, 19 steps before the 22 requested"),
    ):
        state, history = trainer.fit(start, batches, steps=22, **options)
    assert int(state.step) == 3
    assert told == [1, 2, 3]
    assert [row["step"] for row in history] == [1, 1, 2, 2, 3, 3]
    if every:
        assert max(path.name for path in tmp_path.iterdir()) == "step_00000003"
        with pytest.warns(UserWarning, match="all members have stopped after step 3, 19 steps before the 22 requested"):
            again, rows = trainer.fit(start, batches, steps=22, **options)
        assert int(again.step) == 3
        np.testing.assert_equal(rows, history)


class Test_restarts:
    def make(self, **options):
        """A member fails while its random number is below a bound that only its first key falls below."""

        class Fragile(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(3, 2, rngs=rngs)
                self.rngs = rngs.fork()

            def __call__(self, x):
                return self.linear(x) + jax.random.uniform(self.rngs(), ())

        def loss(model, x, fails):
            return jnp.mean(model(x) ** 2) + jnp.where(fails, jnp.nan, 0.0)

        trainer = Trainer(loss, optax.adam(0.05), in_axes=(None, 0), **options)
        return trainer, trainer.init(Ensemble.create(Fragile, 3, seed=0))

    def batches(self, count, failures):
        x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
        return [(x, np.array([(i, m) in failures for m in range(3)])) for i in range(1, count + 1)]

    def test_put_a_member_back_with_new_keys(self, leaves, assert_same):
        trainer, start = self.make()
        with pytest.warns(UserWarning, match="member 1 stopped at step 6"):
            state, history = trainer.fit(
                start, self.batches(12, {(6, 1)}), progress=False, restarts=Restarts(every=4, times=1)
            )
        np.testing.assert_array_equal(state.standing.restarts, [0, 1, 0])
        np.testing.assert_array_equal(state.standing.stopped, [0, 0, 0])
        steps = [row["step"] for row in history if row["member"] == 1]
        assert steps == [1, 2, 3, 4, 5, 6, 9, 10, 11, 12]
        # Four more steps from the state after step 4, with another key.
        calm, _ = trainer.fit(start, self.batches(12, set()), progress=False)
        for other in (0, 2):
            assert_same(*(jax.tree.map(lambda x, i=other: x[i], (s.ensemble, s.opt_state)) for s in (state, calm)))
        fourth, _ = trainer.fit(start, self.batches(4, set()), progress=False)
        again = jax.tree.map(
            lambda x: x.at[1].set(jax.random.fold_in(x[1], 1)) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
            fourth,
        )
        expected, _ = trainer.fit(again, self.batches(4, set()), progress=False)
        mine, its = (jax.tree.map(lambda x: x[1], (s.ensemble, s.opt_state)) for s in (state, expected))
        assert_same(mine, its)

    def test_end_after_the_maximum_count(self):
        trainer, start = self.make()
        failures = {(i, 2) for i in range(1, 40)}
        with pytest.warns(UserWarning, match="member 2 stopped"):
            state, _ = trainer.fit(
                start, self.batches(16, failures), progress=False, restarts=Restarts(every=3, times=2)
            )
        np.testing.assert_array_equal(state.standing.restarts, [0, 0, 2])
        np.testing.assert_array_equal(state.standing.stopped, [0, 0, 1])

    @pytest.mark.filterwarnings("ignore:Trainer.fit. member . stopped")
    @pytest.mark.parametrize("every", [2, 4])
    @pytest.mark.parametrize("cut", [None, 4, 7])
    def test_go_back_to_finite_parameters(self, every, cut, tmp_path, assert_same):
        # Step 4 makes the parameters of member 1 non-finite, which the check after that step does not see.
        trainer, start, batches = ends_with_parameters_that_are_not_finite()
        options = {"progress": False, "restarts": Restarts(every=every, times=1)}
        if cut:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer.fit(start, batches, steps=cut, checkpoint_dir=tmp_path, **options)
            options["checkpoint_dir"] = tmp_path
        state, _ = trainer.fit(start, batches, **options)
        np.testing.assert_array_equal(state.standing.restarts, [0, 1])
        assert np.isfinite(state.ensemble.trainable["kernel"]).all()
        whole, _ = trainer.fit(start, batches, progress=False, restarts=options["restarts"])
        assert_same(state, whole)

    @pytest.mark.filterwarnings("ignore:Trainer.fit")
    @pytest.mark.parametrize("every", [None, 1, 3])
    @pytest.mark.parametrize("cut", [None, 6, 7])
    def test_end_at_the_last_step_that_counted(self, every, cut, tmp_path, assert_same):
        trainer, start = self.make()
        batches = self.batches(20, {(i, m) for i in (2, 5) for m in range(3)})  # all stop for good at step 5
        options = {"progress": False, "restarts": Restarts(every=4, times=1)}
        expected, _ = trainer.fit(start, batches, **options)
        assert int(expected.step) == 5
        options |= {"checkpoint_dir": tmp_path, "checkpoint_every": every, "checkpoint_keep": 1}
        if cut:
            assert_same(trainer.fit(start, batches, steps=cut, **options)[0], expected)
        for _ in range(2):
            assert_same(trainer.fit(start, batches, **options)[0], expected)
            assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]

    @pytest.mark.parametrize("cut", [5, 7, 8])
    @pytest.mark.filterwarnings("ignore:Trainer.fit. member . stopped")
    def test_resume_in_another_run(self, tmp_path, cut, assert_same):
        trainer, start = self.make()
        batches, restarts = self.batches(14, {(6, 1), (7, 0), (10, 2)}), Restarts(every=4, times=1)
        whole, history = trainer.fit(start, batches, progress=False, restarts=restarts)
        trainer.fit(start, batches, steps=cut, progress=False, restarts=restarts, checkpoint_dir=tmp_path)
        state, again = trainer.fit(start, batches, progress=False, restarts=restarts, checkpoint_dir=tmp_path)
        assert_same(state, whole)
        np.testing.assert_equal(again, history)

    def test_are_refused(self):
        trainer, start = self.make(nonfinite="ignore")
        with pytest.raises(
            ValueError, match='restarts need nonfinite="freeze", since only frozen members are restarted'
        ):
            trainer.fit(start, [], restarts=Restarts())
        with pytest.raises(TypeError, match="restarts must be of type Restarts, but got"):
            trainer.fit(start, [], restarts=3)
        with pytest.raises(ValueError, match="Restarts: every must be at least 1, but got 0"):
            Restarts(every=0)
        with pytest.raises(TypeError, match="Restarts: times must be an int, but got"):
            Restarts(times=1.5)
        with pytest.raises(ValueError, match="nonfinite must be one of 'freeze', 'ignore', but got None"):
            self.make(nonfinite=None)


def test_the_old_class_name_warns_and_is_an_alias():
    said = "^plurax.ensemble: `Standing` is deprecated and will be removed in 0.4; use `MemberStatus`.$"
    with pytest.warns(DeprecationWarning, match=said) as caught:
        old = plurax.ensemble.Standing
    assert old is MemberStatus
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(DeprecationWarning, match=said):
        from plurax.ensemble import Standing
    assert Standing is MemberStatus
    assert "Standing" not in plurax.ensemble.__all__
    with pytest.raises(AttributeError, match="no attribute 'Sitting'"):
        getattr(plurax.ensemble, "Sitting")  # noqa: B009 (mypy reports the missing attribute)
