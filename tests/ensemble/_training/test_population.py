"""Population steps: select, exploit, perturb, combine and average members."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Trainer, exploit, greedy_selection, k_best, metrics, select, soup

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)


@pytest.fixture(scope="module")
def trained(stateful):
    def loss(model, x, *, weight):
        return weight * jnp.mean(model(x) ** 2)

    trainer = Trainer(
        loss,
        optax.adam,
        hyperparams={"learning_rate": [0.01, 0.02, 0.03, 0.04, 0.05], "weight": [1.0, 2.0, 3.0, 4.0, 5.0]},
        strategy="vmap",
    )
    state = trainer.init(Ensemble.create(stateful, 5, seed=0))
    for _ in range(2):
        state, _ = trainer.step(state, X)
    return trainer, state


def rows(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_select_takes_members_with_their_whole_state(trained, assert_same, strategy):
    trainer, state = trained
    if strategy == "loop":
        looped = Trainer(lambda m, x: jnp.mean(m(x) ** 2), optax.adam(0.1), strategy="loop")
        state, _ = looped.step(looped.init(state.ensemble), X)
    chosen = select(state, [3, 0, 3, -1])
    parts = lambda s: (s.ensemble, s.opt_state, s.standing)
    assert_same(parts(chosen), rows(parts(state), np.array([3, 0, 3, 4])))
    assert int(chosen.step) == int(state.step)
    assert_same(select(state.ensemble, np.array([1])), rows(state.ensemble, np.array([1])))
    if strategy == "vmap":
        after, _ = trainer.step(chosen, X)
        whole, _ = trainer.step(state, X)
        assert_same(parts(after), rows(parts(whole), np.array([3, 0, 3, 4])), tolerance=2e-4)


def test_select_is_a_gather_in_a_program(trained, assert_same):
    _, state = trained
    taken = jax.jit(lambda state, scores: select(state, k_best(scores, 2)))(state, jnp.array([3.0, 1, 2, 5, 4]))
    assert_same(taken, select(state, [1, 2]))
    ensembles = jax.jit(lambda e, i: select(e, i))(state.ensemble, jnp.array([4, 4]))
    assert_same(ensembles, select(state.ensemble, [4, 4]))


@pytest.mark.parametrize("scores", [np.int32([2**24 + 1, 2**24, -(2**31)]), np.uint8([255, 254, 0])])
def test_k_best_of_integers_is_exact(scores):
    np.testing.assert_array_equal(k_best(scores, 3), [2, 1, 0])
    np.testing.assert_array_equal(k_best(scores, 3, mode="max"), [0, 1, 2])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_k_best(dtype):
    scores = np.array([3, 1, 1, 2, 0], dtype)
    np.testing.assert_array_equal(k_best(scores, 3), [4, 1, 2])
    np.testing.assert_array_equal(k_best(scores, 5, mode="max"), [0, 3, 1, 2, 4])
    if dtype != np.int32:
        ill = np.array([np.nan, 1, -np.inf, np.inf, 0], dtype)
        np.testing.assert_array_equal(k_best(ill, 2), [4, 1])
        np.testing.assert_array_equal(k_best(ill, 2, mode="max"), [1, 4])


class Test_exploit:
    def test_the_worst_become_the_best_with_other_values(self, trained, assert_same):
        _, state = trained
        scores = jnp.array([0.5, jnp.nan, 0.1, 0.2, 0.9])
        factors = {"learning_rate": (0.5, 2.0), "weight": (0.1,)}
        after, drawn = exploit(state, scores, key=jax.random.key(1), fraction=0.4, perturb=factors)
        source = np.asarray(drawn)
        assert list(source[[0, 2, 3]]) == [0, 2, 3]
        assert set(source[[1, 4]]) <= {2, 3}
        assert_same(after.ensemble.trainable, rows(state.ensemble.trainable, source))
        assert_same(after.opt_state.inner_state, rows(state.opt_state.inner_state, source))
        rates, before = (s.opt_state.hyperparams["learning_rate"] for s in (after, state))
        weights, old = (s.standing.hyperparams["weight"] for s in (after, state))
        for i in range(5):
            ratio = float(rates[i] / before[source[i]])
            assert ratio == pytest.approx(1) if i == source[i] else ratio in (0.5, 2.0)
            assert float(weights[i] / old[source[i]]) == pytest.approx(1 if i == source[i] else 0.1)
        # Copies get new random keys.
        keys = [x for x in jax.tree.leaves(after.ensemble.rest) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
        assert keys
        for key in keys:
            data = np.asarray(jax.random.key_data(key)).reshape(5, -1)
            assert len(np.unique(data, axis=0)) == 5

    def test_sources_are_drawn_uniformly(self, trained):
        _, state = trained
        counts = np.zeros(5)
        for seed in range(60):
            _, source = exploit(state, jnp.arange(5.0), key=jax.random.key(seed), fraction=0.4)
            counts += np.bincount(source[3:], minlength=5)
        assert counts[2:].sum() == 0
        assert abs(counts[0] - 60) < 5 * np.sqrt(30)  # binomial, five deviations

    def test_in_a_program(self, trained, assert_same):
        _, state = trained
        run = lambda state, scores, key: exploit(state, scores, key=key, perturb={"learning_rate": (0.8, 1.25)})
        args = state, jnp.arange(5.0), jax.random.key(0)
        assert_same(jax.jit(run)(*args), run(*args), tolerance=1e-6)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"scores": jnp.ones(4)}, ValueError, r"scores must have shape \(5,\), but got \(4,\)"),
            ({"fraction": 0.6}, ValueError, "fraction must be above 0 and at most 0.5, but got 0.6"),
            ({"fraction": 0}, ValueError, "fraction must be above 0 and at most 0.5, but got 0"),
            ({"key": 3}, TypeError, "exploit: key must be one key, such as"),
            ({"mode": "up"}, ValueError, "mode must be one of 'min', 'max', but got 'up'"),
            ({"perturb": {"momentum": (1.0,)}}, ValueError, "no 'momentum' of their own"),
            ({"perturb": {"weight": 1.5}}, TypeError, r"perturb\['weight'\] must be a tuple of numbers"),
        ],
    )
    def test_refusals(self, trained, options, error, message):
        _, state = trained
        with pytest.raises(error, match=message):
            exploit(state, **{"scores": jnp.ones(5), "key": jax.random.key(0), **options})

    def test_refuses_integers(self):
        trainer = Trainer(
            lambda m, x, *, weight: weight * jnp.mean(m(x) ** 2), optax.sgd(0.1), hyperparams={"weight": [1, 10]}
        )
        state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0))
        with pytest.raises(TypeError, match="'weight' has integer values, which cannot be scaled"):
            exploit(state, jnp.ones(2), key=jax.random.key(0), perturb={"weight": (0.8,)})

    def test_refuses_schedules_and_populations_of_one(self):
        make = lambda rngs: nnx.Linear(4, 3, rngs=rngs)
        trainer = Trainer(
            lambda m, x: jnp.mean(m(x) ** 2),
            optax.sgd,
            hyperparams={"learning_rate": [optax.constant_schedule(0.1), 0.2]},
        )
        state = trainer.init(Ensemble.create(make, 2, seed=0))
        with pytest.raises(ValueError, match="'learning_rate' is a schedule, which is not perturbed; leave it out"):
            exploit(state, jnp.ones(2), key=jax.random.key(0), perturb={"learning_rate": (0.8,)})
        alone = Trainer(lambda m, x: jnp.mean(m(x) ** 2), optax.sgd(0.1)).init(Ensemble.create(make, 1, seed=0))
        with pytest.raises(ValueError, match="a population of one has no other member to copy"):
            exploit(alone, jnp.ones(1), key=jax.random.key(0))
        with pytest.raises(TypeError, match="exploit: state must be a TrainState from Trainer.init, but got Ensemble"):
            exploit(state.ensemble, jnp.ones(2), key=jax.random.key(0))


class Test_greedy_selection:
    def slowly(self, predictions, targets, rounds, score):
        chosen: list[int] = []
        scores: list[float] = []
        for _ in range(rounds):
            tried = [float(score(np.mean(predictions[[*chosen, i]], axis=0), targets)) for i in range(len(predictions))]
            chosen.append(int(np.argmin(tried)))
            scores.append(min(tried))
        return chosen, scores

    def test_is_what_a_loop_chooses(self):
        generator = np.random.default_rng(2)
        labels = generator.integers(0, 3, 40)
        logits = generator.normal(size=(7, 40, 3)) + 1.5 * np.eye(3)[labels] * generator.uniform(0, 1, (7, 1, 1))
        p = np.asarray(jax.nn.softmax(logits.astype(np.float32), axis=-1))
        for score in (metrics.nll, metrics.brier):
            found = jax.jit(lambda p, y, s=score: greedy_selection(p, y, rounds=6, score=s))(p, labels)
            chosen, scores = self.slowly(p, labels, 6, score)
            np.testing.assert_array_equal(found.indices, chosen)
            np.testing.assert_allclose(found.scores, scores, rtol=1e-5)
            assert found.scores[0] == pytest.approx(min(float(score(x, labels)) for x in p), rel=1e-6)

    def test_of_values(self):
        generator = np.random.default_rng(2)
        y = generator.normal(size=20).astype(np.float32)
        predictions = y + generator.normal(size=(4, 20)).astype(np.float32)
        score = lambda mean, y: jnp.mean((mean - y) ** 2)
        found = greedy_selection(predictions, y, rounds=5, score=score)
        chosen, _ = self.slowly(predictions, y, 5, score)
        np.testing.assert_array_equal(found.indices, chosen)

    def test_refusals(self):
        p = jnp.ones((2, 3, 2)) / 2
        with pytest.raises(ValueError, match="rounds must be at least 1, but got 0"):
            greedy_selection(p, jnp.zeros(3, int), rounds=0)
        with pytest.raises(TypeError, match="rounds must be an int, but got"):
            greedy_selection(p, jnp.zeros(3, int), rounds=1.5)
        with pytest.raises(TypeError, match="score must be a function, .* but got"):
            greedy_selection(p, jnp.zeros(3, int), rounds=1, score=3)
        with pytest.raises(ValueError, match="score must return one number, but"):
            greedy_selection(p, jnp.zeros(3, int), rounds=1, score=lambda p, y: p)
        with pytest.raises(ValueError, match="probabilities must be in 0 to 1"):
            greedy_selection(4 * p, jnp.zeros(3, int), rounds=1)
        with pytest.raises(ValueError, match="no member has a finite score"):
            greedy_selection(p, jnp.zeros(3, int), rounds=1, score=lambda p, y: jnp.log(-p.sum()))
        with pytest.raises(ValueError, match=r"predictions must be \(members, ...\)"):
            greedy_selection(jnp.ones((0, 3, 2)), jnp.zeros(3, int), rounds=1)


class Test_soup:
    def test_is_the_weighted_mean(self, plain, create):
        ensemble = create(plain, 4)
        weights = np.array([1.0, 0, 3, 4])
        model = soup(ensemble, weights)
        shares = weights / weights.sum()
        for get in (lambda m: m.first.kernel[...], lambda m: m.second.bias[...]):
            expected = sum(s * np.asarray(get(m), np.float64) for s, m in zip(shares, ensemble, strict=True))
            np.testing.assert_allclose(get(model), expected, rtol=1e-6, atol=1e-7)
        assert model(X).shape == (6, 3)
        np.testing.assert_allclose(
            soup(ensemble).first.kernel[...], np.mean([m.first.kernel[...] for m in ensemble], axis=0), atol=1e-6
        )

    def test_keeps_dtypes_and_ignores_members_with_zero_weight(self):
        members = [{"w": jnp.full(3, x, jnp.float16), "n": jnp.int32(i)} for i, x in enumerate([1.0, np.nan, 3.0])]
        model = soup(Ensemble.from_apply(lambda v, x: v["w"] * x, members), [1, 0, 1])
        assert model.variables["w"].dtype == jnp.float16
        np.testing.assert_array_equal(model.variables["w"], [2, 2, 2])
        assert model.variables["n"] == 0

    @pytest.mark.parametrize(
        ("weights", "error", "message"),
        [
            ([1.0, 2], ValueError, r"weights must have shape \(3,\), but got \(2,\)"),
            ([1.0, -1, 0], ValueError, "must be finite and not negative, and one above 0"),
            ([0.0, 0, 0], ValueError, "must be finite and not negative, and one above 0"),
            ([True, False, True], TypeError, "weights must be real numbers"),
        ],
    )
    def test_refusals(self, plain, create, weights, error, message):
        with pytest.raises(error, match=message):
            soup(create(plain, 3), weights)
        with pytest.raises(TypeError, match="soup: needs an Ensemble, but got list"):
            soup([1])


def test_indices_of_a_narrow_dtype_select_from_more_members_than_its_maximum():
    ens = Ensemble.from_apply(jnp.multiply, [jnp.full(2, i) for i in range(300)])
    np.testing.assert_array_equal(select(ens, np.array([200, 3], np.uint8))(1), [[200, 200], [3, 3]])
    np.testing.assert_array_equal(select(ens, np.array([-1], np.int8))(1), [[299, 299]])


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([], ValueError, "indices are empty"),
        ([1.0], TypeError, "indices must be integers"),
        ([[1]], ValueError, r"indices must have shape \(count,\), but got \(1, 1\)"),
        ([0, 5], IndexError, "member 5 is out of range for an ensemble of 5"),
        ([-6], IndexError, "member -6 is out of range for an ensemble of 5"),
        (np.uint64([2**64 - 1]), IndexError, "member 18446744073709551615 is out of range for an ensemble of 5"),
    ],
)
def test_select_refuses(trained, indices, error, message):
    with pytest.raises(error, match=message):
        select(trained[1], indices)
    with pytest.raises(TypeError, match="select: needs an Ensemble or a TrainState, but got"):
        select(3, [0])


def test_k_best_refuses():
    with pytest.raises(ValueError, match="k must be at most 3, the number of scores, but got 4"):
        k_best(jnp.ones(3), 4)
    with pytest.raises(TypeError, match="k must be an int, but got"):
        k_best(jnp.ones(3), 1.5)
    with pytest.raises(ValueError, match=r"scores must have shape \(size,\), but got \(1, 3\)"):
        k_best(jnp.ones((1, 3)), 1)
    with pytest.raises(TypeError, match="scores must be real numbers"):
        k_best(jnp.ones(3, complex), 1)


def test_selection_from_numpy_arrays_of_64_bits() -> None:
    """From jax 0.11 on, a 64-bit shape warns, and warnings are errors here."""
    p = np.array([[[0.9, 0.1], [0.2, 0.8]], [[0.3, 0.7], [0.6, 0.4]]])
    expected = greedy_selection(jnp.asarray(p), jnp.array([0, 1]), rounds=3)
    np.testing.assert_allclose(greedy_selection(p, np.array([0, 1]), rounds=3), expected)
