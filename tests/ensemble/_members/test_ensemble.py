import copy
import pickle
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from plurax.ensemble import Ensemble, Trainer, export, load, load_exported, load_member, save, select, soup
from plurax.ensemble._members import call
from plurax.transforms import _vmap, grad, vmap
from plurax.transforms.modules import with_precision


@pytest.fixture(scope="module")
def ens(plain):
    return Ensemble.create(plain, 3, seed=0)


X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
EACH = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 2, 4)


def test_stack_and_unstack_are_inverse(plain, assert_same):
    members = [plain(nnx.Rngs(i)) for i in range(3)]
    for member, back in zip(members, Ensemble.stack(members).unstack(), strict=True):
        assert isinstance(back, plain)
        assert_same(back, member)


def test_members_of_a_created_ensemble_do_not_depend_on_its_size(plain, assert_same):
    assert_same(Ensemble.create(plain, 2, seed=1)[1], Ensemble.create(plain, 5, seed=1)[1])


def test_make_is_traced_once(plain):
    calls = []

    def make(rngs):
        calls.append(1)
        return plain(rngs)

    Ensemble.create(make, 7, seed=0)
    assert len(calls) == 1


def test_calling_gives_every_member_the_same_input(ens):
    np.testing.assert_allclose(ens(X), [member(X) for member in ens], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("in_axes", [0, (0,), [0], -3])
def test_calling_with_an_axis_gives_each_member_its_slice(ens, in_axes):
    expected = [member(x) for member, x in zip(ens, EACH, strict=True)]
    np.testing.assert_allclose(ens(EACH, in_axes=in_axes), expected, rtol=1e-6, atol=1e-7)


def test_calling_with_axes_for_each_argument(ens):
    scales = np.array([1.0, 2.0, 3.0], np.float32)
    expected = [member(X, scale) for member, scale in zip(ens, scales, strict=True)]
    np.testing.assert_allclose(ens(X, scales, in_axes=(None, 0)), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("flip", [False, True])
def test_non_array_arguments_reach_the_members_unchanged(ens, flip):
    expected = np.stack([member(X, flip=flip) for member in ens])
    np.testing.assert_allclose(ens(X, flip=flip), expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(ens(X, 1.0, flip), expected, rtol=1e-6, atol=1e-7)
    own = [member(x, flip=flip) for member, x in zip(ens, EACH, strict=True)]
    np.testing.assert_allclose(ens(EACH, in_axes=0, flip=flip), own, rtol=1e-6, atol=1e-7)


def test_one_and_true_are_different_arguments():
    ens = Ensemble.from_apply(lambda v, kind: v * (10 if kind is True else 1), [jnp.ones(2), jnp.ones(2)])
    assert ens(1).max() == 1
    assert ens(True).max() == 10
    assert ens(1).max() == 1


def test_an_array_keyword_is_shared_or_mapped_as_in_axes_says(ens):
    scales = np.array([1.0, 2.0, 3.0], np.float32)
    np.testing.assert_allclose(ens(X, scale=np.float32(2)), 2 * ens(X), rtol=1e-6)
    expected = [member(x, scale) for member, x, scale in zip(ens, EACH, scales, strict=True)]
    np.testing.assert_allclose(ens(EACH, in_axes=0, scale=scales), expected, rtol=1e-6, atol=1e-7)


def test_a_call_is_compiled_once_for_each_kind_of_input(plain):
    traces = []

    class Traced(plain):
        def __call__(self, x):
            traces.append(x.shape)
            return super().__call__(x)

    ens = Ensemble.create(Traced, 2, seed=0)
    for _ in range(3):
        ens(X)
    ens[:1](X)
    assert len(traces) == 2


def test_calls_after_the_first_are_checked_like_it(plain, ens):
    fresh, each = Ensemble.create(plain, 3, seed=0), jnp.asarray(EACH)
    for x in (jnp.asarray(X), X, jnp.ones((5, 4)), jnp.asarray(X)):
        for _ in range(2):
            np.testing.assert_allclose(fresh(x), np.stack([member(x) for member in ens]), rtol=1e-6, atol=1e-7)
    for _ in range(2):
        own = [member(x) for member, x in zip(ens, EACH, strict=True)]
        np.testing.assert_allclose(fresh(each, in_axes=0), own, rtol=1e-6, atol=1e-7)
        with pytest.raises(ValueError, match="number of members"):
            fresh(each[:2], in_axes=0)
        with pytest.raises(TypeError, match="in_axes"):
            fresh(each, in_axes=False)
        with pytest.raises(TypeError):
            fresh(each, "more", None, None)
    for duplicate in (copy.deepcopy(fresh), pickle.loads(pickle.dumps(fresh))):
        np.testing.assert_array_equal(duplicate(X), fresh(X))
    assert len(fresh[1:]) == len(jax.tree.map(lambda x: x[1:], fresh)(X)) == 2


def test_calls_of_one_architecture_share_a_program(plain):
    traces = []

    class Traced(plain):
        def __call__(self, x):
            traces.append(x.shape)
            return super().__call__(x)

    for seed in range(3):
        ens = Ensemble.create(Traced, 2, seed=seed)
        for _ in range(2):
            jax.tree.map(jnp.copy, ens)(X)
    assert len(traces) == 1


def test_indexing(ens, assert_same):
    members = ens.unstack()
    assert len(ens) == len(members) == 3
    assert_same(ens[-1], members[2])
    assert_same(ens[np.int32(1)], members[1])
    assert [len(part) for part in (ens[1:], ens[:1], ens[::2], ens[::-1])] == [2, 1, 2, 3]
    assert_same(ens[::-1][0], members[2])
    assert isinstance(ens[1:2], Ensemble)


@pytest.mark.parametrize("kind", [list, np.array, jnp.array])
@pytest.mark.parametrize(
    ("index", "chosen"),
    [
        ([0, 2], [0, 2]),
        ([-1, 1, -3], [2, 1, 0]),
        ([1, 1], [1, 1]),
        ([2], [2]),
        ([True, False, True], [0, 2]),
        ([False, True, False], [1]),
        ([True] * 3, [0, 1, 2]),
    ],
)
def test_indexing_with_several_indices_or_a_mask(ens, assert_same, kind, index, chosen):
    part = ens[kind(index)]
    assert_same(part, Ensemble.stack([ens[i] for i in chosen]))
    assert_same(part, select(ens, kind(index)))


def test_a_mask_selects_training_states(ens, assert_same):
    state = Trainer(lambda model, x: jnp.mean(model(x) ** 2), optax.adam(0.1)).init(ens)
    assert_same(select(state, np.array([False, True, True])), select(state, [1, 2]))


def test_traced_indices_select_members(ens, assert_same):
    assert_same(jax.jit(lambda ens, i: ens[i])(ens, jnp.array([2, 0])), ens[[2, 0]])
    with pytest.raises(TypeError, match="Ensemble: a traced mask selects an unknown number of members"):
        jax.jit(lambda ens, mask: ens[mask])(ens, jnp.array([True, False, True]))


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ([], ValueError, "Ensemble: indices are empty"),
        ([False] * 3, ValueError, "the mask selects none of the 3 members"),
        ([True, False], IndexError, "a mask needs one entry for each of the 3 members, but it has 2"),
        (np.ones(4, bool), IndexError, "a mask needs one entry for each of the 3 members, but it has 4"),
        ([0, 3], IndexError, "member 3 is out of range for an ensemble of 3"),
        ([0, -4], IndexError, "member -4 is out of range"),
        ([True, 2], TypeError, "all integers or all booleans"),
        ([np.True_, 0, 1], TypeError, "all integers or all booleans"),
        ([jnp.array(True), 0, 1], TypeError, "all integers or all booleans"),
        ([0.0, 1.0], TypeError, "integers or a mask of booleans"),
        (["0"], TypeError, "integers or a mask of booleans"),
        (np.array([[0, 1]]), ValueError, r"must have shape \(count,\), but got \(1, 2\)"),
        ((0, 1), TypeError, "index of a member must be an int"),
    ],
)
def test_several_indices_that_do_not_fit_are_refused(ens, index, error, message):
    with pytest.raises(error, match=message):
        ens[index]
    if not isinstance(index, tuple):
        with pytest.raises(error, match=message.replace("Ensemble:", "select:")):
            select(ens, index)


@pytest.mark.parametrize(
    "seed", [[4, 2, 4], (4, 2, 4), np.array([4, 2, 4]), [4, jax.random.key(2), np.int64(4)]], ids=str
)
def test_a_list_of_seeds_gives_each_member_its_own(plain, assert_same, seed):
    ens = Ensemble.create(plain, 3, seed=seed)
    keys = jnp.stack([jax.random.key(i) for i in (4, 2, 4)])
    assert_same(ens, Ensemble.create(plain, 3, seed=keys))
    for member, i in zip(ens, (4, 2, 4), strict=True):
        assert_same(member, plain(nnx.Rngs(i)), 1e-6)


def test_an_extracted_member_is_independent(ens):
    before = ens(X)
    member = ens[1]
    member.first.kernel[...] = jnp.zeros((4, 5))
    np.testing.assert_array_equal(ens(X), before)


def test_the_arguments_of_a_call_are_checked_once(ens, counted_checks):
    checks = counted_checks(call, _vmap)
    ens(EACH[:, :1], in_axes=0)  # a shape that is not compiled yet
    assert sorted(checks) == ["axes_per_argument", "mapped_size"]


def test_an_ensemble_of_one_is_an_ensemble(plain, assert_same):
    one = Ensemble.stack([plain(nnx.Rngs(4))])
    assert len(one) == 1
    assert one(X).shape == (1, 2, 3)
    assert_same(one[0], plain(nnx.Rngs(4)))
    assert one.predict(X, kind="classification").mutual_information.max() == 0


def test_it_passes_through_jit_and_tree_map(ens, assert_same):
    np.testing.assert_allclose(jax.jit(lambda e, x: e(x))(ens, X), ens(X), rtol=1e-6, atol=1e-7)
    doubled = jax.jit(lambda e: jax.tree.map(lambda a: 2 * a, e))(ens)
    assert isinstance(doubled, Ensemble)
    assert_same(doubled[1].first.kernel[...], 2 * ens[1].first.kernel[...])
    assert jax.tree.structure(ens) == jax.tree.structure(Ensemble.create(type(ens[0]), 3, seed=9))


@pytest.fixture(scope="module")
def square():
    """Three members with 3 by 3 kernels, so that slices have plausible shapes."""
    return Ensemble.create(lambda rngs: nnx.Linear(3, 3, rngs=rngs), 3, seed=0)


@pytest.mark.parametrize(
    "use",
    [
        lambda e: e(jnp.ones((3, 3))),
        lambda e: e.view()(jnp.ones((3, 3))),
        lambda e: e.predict(jnp.ones((3, 3)), kind="classification").mean,
        lambda e: with_precision(e, jnp.float32)(jnp.ones((3, 3))),
        lambda e: len(e) * jnp.ones(3),
        lambda e: e[0](jnp.ones((3, 3))),
        lambda e: jax.tree.leaves(select(e, jnp.array([0, 1])))[0],
        lambda e: jax.tree.leaves(soup(e).kernel)[0],
        lambda e: vmap(e, None)(jnp.ones((3, 3))),
        lambda e: vmap(lambda m: m(jnp.ones(3)))(e),
        lambda e: vmap(lambda x, *, m: m(x))(jnp.ones((3, 3)), m=e),
        lambda e: vmap(lambda m, x: m[0](x), (None, 0))(e, jnp.ones((3, 3))),
        lambda e: grad(lambda m: m(jnp.ones((3, 3))).sum())(e)["bias"],
        lambda e: Trainer(lambda m, x: m(x).sum(), optax.sgd(1.0)).init(e).step,
    ],
)
@pytest.mark.parametrize(
    "over",
    [
        lambda use, ens: jax.vmap(use)(ens),
        lambda use, ens: jax.jit(jax.vmap(use))(ens),
        lambda use, ens: jax.lax.map(use, ens),
        lambda use, ens: jax.lax.scan(lambda carry, e: (carry, use(e)), 0, ens),
        lambda use, ens: use(jax.tree.map(lambda x: x[0], ens)),
        lambda use, ens: use(jax.tree.map(lambda x: x[None], ens)),
    ],
)
def test_code_unaware_of_members_does_not_silently_slice_them(square, over, use):
    with pytest.raises(ValueError, match="their axis 0 is not the members"):
        over(use, square)


def test_stacked_ensembles_are_ensembles_when_mapped(ens):
    both = jax.tree.map(lambda *arrays: jnp.stack(arrays), ens, Ensemble.create(type(ens[0]), 3, seed=1))
    found = jax.vmap(lambda e, x: (e(x), len(e)), (0, None), (0, None))(both, X)
    np.testing.assert_allclose(found[0][0], ens(X), rtol=1e-6, atol=1e-7)
    assert found[1] == 3


def test_an_ensemble_of_axes_or_of_shardings_is_a_prefix_of_any(square):
    """An ensemble may hold axes or shardings in place of its arrays."""
    x, axes = jnp.ones((3, 3)), Ensemble(square.structure, 0, None)
    both = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), square)
    found = jax.vmap(lambda e: e(x), (axes,))(both)
    np.testing.assert_allclose(found[1], 2 * found[0], rtol=1e-6)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    there = jax.jit(lambda e: e(x), in_shardings=(Ensemble(square.structure, here, None),))(square)
    np.testing.assert_allclose(there, square(x), rtol=1e-6)
    with pytest.raises(ValueError, match="their axis 0 is not the members"):
        jax.vmap(lambda e: e(x), (axes,))(square)


def test_an_ensemble_built_from_slices_is_refused_but_not_a_mapped_one(square):
    x = jnp.ones((3, 3))
    built = jax.vmap(lambda e: Ensemble(e.structure, e.trainable, e.rest))(square)
    with pytest.raises(ValueError, match="their axis 0 is not the members"):
        built(x)
    np.testing.assert_array_equal(jax.vmap(lambda e: jax.tree.map(jnp.asarray, e))(square)(x), square(x))


def test_an_ensemble_is_carried_through_a_loop(ens):
    def step(carried, x):
        return jax.tree.map(lambda a: 2 * a, carried), carried(x)

    last, outputs = jax.lax.scan(step, ens, np.stack([X, X]))
    np.testing.assert_allclose(outputs[0], ens(X), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(last.trainable["first"]["bias"], 4 * ens.trainable["first"]["bias"])


@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_members_returned_by_a_mapped_function_form_an_ensemble_of_the_same_kind(ens, around, chunk_size):
    back = around(vmap(lambda m: m, chunk_size=chunk_size))(ens)
    assert jax.tree.structure(back) == jax.tree.structure(ens)
    np.testing.assert_array_equal(back(X), ens(X))


def test_shared_weights_stay_shared(leaves):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.encoder = nnx.Linear(4, 4, rngs=rngs)
            self.decoder = self.encoder

        def __call__(self, x):
            return self.decoder(self.encoder(x))

    ens = Ensemble.create(Tied, 2, seed=0)
    assert len(leaves(ens)) == 2
    member = ens[0]
    assert member.encoder is member.decoder
    np.testing.assert_allclose(ens(X), [member(X) for member in ens], rtol=1e-6, atol=1e-7)


def test_mixed_dtypes_and_keys_are_stacked_unchanged():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.half = nnx.Param(jnp.ones((2, 1), jnp.bfloat16))
            self.count = nnx.Variable(jnp.zeros((), jnp.int32))
            self.empty = nnx.Param(jnp.ones((0, 3)))
            self.rngs = rngs.fork()

    ens = Ensemble.stack([Mixed(nnx.Rngs(i)) for i in range(3)])
    member = ens[2]
    assert (member.half.dtype, member.half.shape) == (jnp.bfloat16, (2, 1))
    assert (member.count.dtype, member.count.shape) == (jnp.int32, ())
    assert member.empty.shape == (0, 3)
    expected = Mixed(nnx.Rngs(2)).rngs.default.key[...]
    np.testing.assert_array_equal(jax.random.key_data(member.rngs.default.key[...]), jax.random.key_data(expected))


class Held(nnx.Module):
    """A module whose variables hold pytrees."""

    def __init__(self, rngs, width=3):
        self.weights = nnx.Param({"w": rngs.params.normal((4, width)), "b": [jnp.zeros(width)]})
        self.seen = nnx.BatchStat((jnp.zeros(4), {"count": jnp.zeros((), jnp.int32)}))

    def __call__(self, x):
        weights = self.weights.get_value()
        return x @ weights["w"] + weights["b"][0]


@pytest.mark.slow
def test_variables_may_hold_pytrees(tmp_path, assert_same):
    members = [Held(nnx.Rngs(jax.random.fold_in(jax.random.key(0), i))) for i in range(3)]
    ens = Ensemble.stack(members)
    assert_same(ens.unstack(), members)
    assert_same(Ensemble.create(Held, 3, seed=0).unstack(), members, 1e-6)
    np.testing.assert_allclose(ens(X), [member(X) for member in members], rtol=1e-6)
    save(tmp_path / "held", ens)
    assert_same(load(tmp_path / "held", ens), ens)
    assert_same(load_member(tmp_path / "held", 1, members[0]), members[1])
    with pytest.raises(ValueError, match=r"at `weights.b.0`: it has shape \(2,\)"):
        Ensemble.stack([members[0], Held(nnx.Rngs(0), width=2)])

    def loss(model, x):
        total, counted = model.seen.get_value()
        model.seen.set_value((total + x.sum(0), {"count": counted["count"] + 1}))
        return (model(x) ** 2).mean()

    trainer = Trainer(loss, optax.sgd(0.1))
    state = trainer.init(ens)
    for _ in range(2):
        state, _ = trainer.step(state, X)
    for member, trained in zip(members, state.ensemble, strict=True):
        weights = member.weights.get_value()
        for _ in range(2):
            gradient = jax.grad(lambda p: ((X @ p["w"] + p["b"][0]) ** 2).mean())(weights)
            weights = jax.tree.map(lambda p, g: p - 0.1 * g, weights, gradient)
        assert_same(trained.weights.get_value(), weights, 1e-5)
        assert trained.seen.get_value()[1]["count"] == 2
        np.testing.assert_allclose(trained.seen.get_value()[0], 2 * X.sum(0), rtol=1e-6)


@pytest.mark.parametrize("number", [0.5, 3, True])
def test_python_numbers_are_stacked_as_created(number, assert_same):
    def make(rngs):
        return nnx.Dict(number=nnx.Variable(number), weight=nnx.Param(jnp.ones(2)))

    stacked, created = Ensemble.stack([make(None) for _ in range(3)]), Ensemble.create(make, 3, seed=0)
    assert_same(stacked, created)
    assert stacked[2].number[...] == number


@pytest.mark.parametrize("collect", [list, tuple, nnx.List])
def test_members_come_in_any_sequence(plain, collect, assert_same):
    members = [plain(nnx.Rngs(i)) for i in range(2)]
    assert_same(Ensemble.stack(collect(members)).unstack(), members)


class Weak(nnx.Module):
    """A module with weakly typed arrays, as `jnp.full` and Python numbers make them."""

    def __init__(self, rngs):
        self.scale, self.offset = nnx.Param(jnp.full(3, 2.0)), nnx.Variable(0.5)

    def __call__(self, x):
        return x * self.scale + self.offset[...]


@pytest.mark.parametrize("make", [lambda: Ensemble.stack([Weak(None)] * 1), lambda: Ensemble.create(Weak, 2, seed=0)])
def test_weak_types_become_strong_so_that_only_the_first_step_compiles(make):
    traces = []

    def loss(model, x):
        traces.append(1)
        return model(x).sum()

    assert Weak(None).scale[...].weak_type
    ens = make()
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(ens))
    assert {leaf.dtype for leaf in jax.tree.leaves(ens)} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(ens[0].scale[...], np.full(3, 2.0, np.float32))
    trainer = Trainer(loss, optax.adam(0.1))
    state, _ = trainer.step(trainer.init(ens), jnp.ones(3))
    traces.clear()
    for _ in range(3):
        state, _ = trainer.step(state, jnp.ones(3))
    assert not traces


class Active(nnx.Module):
    def __init__(self, rngs, act):
        self.linear, self.act = nnx.Linear(4, 3, rngs=rngs), act

    def __call__(self, x):
        return self.act(self.linear(x))


def test_recreated_partials_are_equal_configurations():
    members = [Active(nnx.Rngs(i), partial(nnx.gelu, approximate=False)) for i in range(3)]
    np.testing.assert_allclose(Ensemble.stack(members)(X), [member(X) for member in members], rtol=1e-5, atol=1e-6)
    nested = [Active(nnx.Rngs(i), partial(partial(jnp.add, i // 2), 1)) for i in range(2)]
    assert len(Ensemble.stack(nested)) == 2


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_works_as_the_original(duplicate, assert_same):
    ens = Ensemble.stack([Active(nnx.Rngs(i), nnx.relu) for i in range(2)])
    trainer = Trainer(lambda model, x: (model(x) ** 2).mean(), optax.adam(0.1))
    state = trainer.init(ens)
    assert_same(duplicate(ens), ens)
    assert_same(duplicate(ens)[1], ens[1])
    np.testing.assert_array_equal(duplicate(ens)(X), ens(X))
    assert_same(trainer.step(duplicate(state), X), trainer.step(state, X))


def test_an_ensemble_is_pickled(assert_same):
    ens = Ensemble.stack([nnx.Linear(4, 3, rngs=nnx.Rngs(i)) for i in range(2)])
    again = pickle.loads(pickle.dumps(ens))
    assert_same(again, ens)
    np.testing.assert_array_equal(again(X), ens(X))


def test_a_view_changes_a_copy(stateful, assert_same):
    ens = Ensemble.create(stateful, 2, seed=0)
    evaluating = ens.view(deterministic=True, use_running_average=True)
    assert evaluating[0].dropout.deterministic
    assert not ens[0].dropout.deterministic
    assert_same(jax.tree.leaves(evaluating), jax.tree.leaves(ens))
    np.testing.assert_allclose(
        evaluating(X), [nnx.view(m, deterministic=True, use_running_average=True)(X) for m in ens], rtol=1e-5, atol=1e-6
    )


def test_calling_indexing_viewing_and_predicting_change_nothing(stateful, leaves):
    ens = Ensemble.create(stateful, 2, seed=0)
    before = leaves(ens)
    ens.predict(X, kind="classification")
    ens.view(deterministic=True, use_running_average=True)(X)
    ens[0](X)
    with pytest.raises(ValueError, match="changes the state of Stateful"):
        ens(X)
    for a, b in zip(before, leaves(ens), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not ens[0].dropout.deterministic


class Judged(nnx.Module):
    """A module whose `eval` method is unrelated to evaluation mode."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.own = _Own()

    def __call__(self, x):
        return self.own(self.dropout(self.inner(x)))

    def eval(self, x, y):  # type: ignore[override]  # a module may define any `eval`
        raise AssertionError


class _Own(nnx.Module):
    """A module with `deterministic` but no `set_view`."""

    def __init__(self):
        self.deterministic = False

    def __call__(self, x):
        return x if self.deterministic else x + 100


def test_evaluation_mode_calls_no_method_of_the_members():
    members = [Judged(nnx.Rngs(i)) for i in range(2)]
    ens = Ensemble.stack(members)
    expected = [jax.nn.softmax(member.inner(X)) for member in members]
    np.testing.assert_allclose(ens.predict(X, kind="classification").members, expected, rtol=1e-5, atol=1e-6)
    assert ens.view(deterministic=True)[0].dropout.deterministic
    assert not ens[0].dropout.deterministic


def test_it_is_frozen(ens):
    with pytest.raises(AttributeError, match="cannot assign"):
        ens.trainable = {}


def test_the_gradient_of_an_ensemble_is_that_of_its_members(ens):
    gradient = grad(lambda e, x: (e(x) ** 2).sum())(ens, X)
    for i, member in enumerate(ens):
        alone = grad(lambda m, x: (m(x) ** 2).sum())(member, X)
        np.testing.assert_allclose(gradient["first"]["kernel"][i], alone["first"]["kernel"][...], rtol=1e-5, atol=1e-6)


def test_repr_shows_the_contents(ens):
    assert repr(ens) == "Ensemble of 3 × Plain, 43 parameters each"


@pytest.mark.parametrize(
    "change",
    [lambda x: None, lambda x: 0.5, lambda x: object(), lambda x: x.sum(), lambda x: x[:0], lambda x: "text"],
)
def test_repr_never_raises(ens, change):
    assert repr(jax.tree.map(change, ens)).startswith("Ensemble")


def test_repr_of_shapes_is_that_of_arrays(ens):
    assert repr(jax.eval_shape(lambda: ens)) == repr(ens)


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.rngs = nnx.Linear(4, 3, rngs=rngs), rngs

    def __call__(self, x):
        return self.linear(x) + self.rngs.noise.normal((3,))


class Test_refusals:
    def test_members_that_share_an_rngs(self):
        rngs = nnx.Rngs(0)
        with pytest.raises(
            ValueError,
            match=r"members 0 and 1 share a variable, `rngs.default.count` of the first and `rngs.default.count` of "
            r"the second; .* a separate nnx.Rngs, or pass nnx.clone\(member\)",
        ):
            Ensemble.stack([Noisy(rngs) for _ in range(3)])
        assert len(Ensemble.stack([Noisy(nnx.Rngs(i)) for i in range(3)])) == 3

    def test_members_that_share_a_module(self):
        backbone = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        heads = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(3)]
        members = [nnx.Sequential(heads[0], heads[1]), nnx.Sequential(heads[2], backbone), nnx.Sequential(backbone)]
        with pytest.raises(ValueError, match="members 1 and 2 share a variable, `layers.1.bias` .* `layers.0.bias`"):
            Ensemble.stack(members)

    def test_one_member_listed_twice(self, plain):
        member = plain(nnx.Rngs(0))
        with pytest.raises(ValueError, match="members 0 and 1 share a variable, `first.bias` .* `first.bias`"):
            Ensemble.stack([member, member])
        assert len(Ensemble.stack([member, nnx.clone(member)])) == 2

    def test_recreated_functions(self):
        def make(i, act):
            return Active(nnx.Rngs(i), act)

        with pytest.raises(ValueError, match="act of the model is .*lambda.*, a different object in each; define it "):
            Ensemble.stack([make(i, lambda x: x) for i in range(2)])
        with pytest.raises(ValueError, match=r"at module level, or use Ensemble.create\.$"):
            Ensemble.stack([make(i, partial(nnx.gelu, approximate=[])) for i in range(2)])
        with pytest.raises(ValueError, match="approximate=1.*, but there .*approximate=True.*; build all members"):
            Ensemble.stack([make(i, partial(nnx.gelu, approximate=a)) for i, a in enumerate([True, 1])])

    def test_variables_of_other_kinds(self):
        def pair(*values):
            return Ensemble.stack([nnx.Dict(a=value) for value in values])

        with pytest.raises(ValueError, match="the class of a is 'BatchStat', but there 'Param'"):
            pair(nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.ones(2)))
        with pytest.raises(ValueError, match="they differ in the containers"):
            pair(nnx.Param([jnp.ones(2)]), nnx.Param((jnp.ones(2),)))
        with pytest.raises(ValueError, match=r"at `a`: it has shape \(\) and dtype int32, but .* dtype float32"):
            pair(nnx.Variable(0.5), nnx.Variable(3))

    def test_a_variable_without_an_array(self):
        def make(rngs):
            return nnx.Dict(name=nnx.Variable("text"))

        with pytest.raises(TypeError, match="`name` of member 0 holds 'text' of type str, but only arrays"):
            Ensemble.stack([make(None)])
        with pytest.raises(TypeError, match="`name` of the model that make returns holds 'text'"):
            Ensemble.create(make, 2, seed=0)

    def test_an_empty_list(self):
        with pytest.raises(ValueError, match="the list of members is empty"):
            Ensemble.stack([])

    def test_not_a_list(self, plain):
        with pytest.raises(TypeError, match="members must be a list of models"):
            Ensemble.stack(plain(nnx.Rngs(0)))
        with pytest.raises(TypeError, match="members must be a list of models, but got 'ab' of type str"):
            Ensemble.stack("ab")

    def test_a_message_is_one_line(self, plain):
        with pytest.raises(TypeError, match=r"^Ensemble.stack: .*, but got .{0,120} of type Sequential\.$"):
            Ensemble.stack(nnx.Sequential(*[plain(nnx.Rngs(i)) for i in range(9)]))

    def test_a_member_that_is_not_a_model(self, plain):
        with pytest.raises(TypeError, match="member 1 is function, not an NNX module; .*from_apply"):
            Ensemble.stack([plain(nnx.Rngs(0)), lambda x: x])

    def test_members_of_other_shapes(self, plain):
        with pytest.raises(
            ValueError,
            match=r"member 2 differs from member 0 at `first.bias`: it has shape \(7,\) and dtype float32, but member "
            r"0 has shape \(5,\) and dtype float32",
        ):
            Ensemble.stack([plain(nnx.Rngs(0)), plain(nnx.Rngs(1)), plain(nnx.Rngs(2), width=7)])

    def test_members_of_other_dtypes(self):
        members = [nnx.Linear(2, 3, param_dtype=dtype, rngs=nnx.Rngs(0)) for dtype in (jnp.float32, jnp.bfloat16)]
        with pytest.raises(ValueError, match="member 1 differs .* at `bias`: .*bfloat16.*float32"):
            Ensemble.stack(members)

    def test_a_missing_and_an_added_array(self):
        members = [nnx.Linear(2, 3, use_bias=bias, rngs=nnx.Rngs(0)) for bias in (True, False)]
        with pytest.raises(ValueError, match="at `bias`: it has no array there"):
            Ensemble.stack(members)
        with pytest.raises(ValueError, match="at `bias`: it has shape .* but member 0 has no array there"):
            Ensemble.stack(members[::-1])

    def test_members_of_other_classes(self, plain, stateful):
        with pytest.raises(TypeError, match="member 1 is a Stateful, but member 0 is a Plain"):
            Ensemble.stack([plain(nnx.Rngs(0)), stateful(nnx.Rngs(0))])

    def test_members_of_another_configuration(self, stateful):
        with pytest.raises(ValueError, match=r"configuration: rate of dropout is 0.5, but there 0.3"):
            Ensemble.stack([stateful(nnx.Rngs(0)), stateful(nnx.Rngs(0), rate=0.5)])
        evaluating = nnx.view(stateful(nnx.Rngs(0)), deterministic=True, use_running_average=True)
        with pytest.raises(ValueError, match="(deterministic|use_running_average) of (dropout|norm)"):
            Ensemble.stack([stateful(nnx.Rngs(0)), evaluating])

    def test_models_without_arrays(self):
        with pytest.raises(ValueError, match="hold no arrays"):
            Ensemble.stack([nnx.Dropout(0.5), nnx.Dropout(0.5)])
        with pytest.raises(ValueError, match="Ensemble.create: the models hold no arrays"):
            Ensemble.create(lambda rngs: nnx.Dropout(0.5), 2, seed=0)

    @pytest.mark.parametrize(
        ("size", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
    )
    def test_an_invalid_size(self, plain, size, error):
        with pytest.raises(error, match="size must be"):
            Ensemble.create(plain, size, seed=0)

    @pytest.mark.parametrize(
        "seed", [1.5, None, "a", True, jnp.ones(2), jnp.arange(2), [0, True], [0, 1.5], [[0], [1]]]
    )
    def test_an_invalid_seed(self, plain, seed):
        message = "seed must be an int, a key such as .*, or a list of 2 ints or keys, but got"
        with pytest.raises(TypeError, match=message):
            Ensemble.create(plain, 2, seed=seed)

    @pytest.mark.parametrize(
        "seed",
        [
            jax.random.PRNGKey(0),
            [jax.random.PRNGKey(0)] * 2,
            np.ones((2, 2), int),
            [jax.random.key(0), jax.random.key(0, impl="rbg")],
            jax.random.split(jax.random.key(0), (2, 1)),
        ],
        ids=["old key", "old keys", "2-d", "two kinds", "2-d keys"],
    )
    def test_seeds_that_could_be_misread(self, plain, seed):
        with pytest.raises(TypeError, match="seed must be an int"):
            Ensemble.create(plain, 2, seed=seed)

    @pytest.mark.parametrize("seed", [[1, 2, 3], [1], [], np.arange(3), jax.random.split(jax.random.key(0), 3)])
    def test_another_number_of_seeds(self, plain, seed):
        with pytest.raises(ValueError, match=rf"seed has {len(seed)} entries for 2 members; pass one for each"):
            Ensemble.create(plain, 2, seed=seed)

    def test_make_without_a_model(self):
        with pytest.raises(TypeError, match="make must be a function"):
            Ensemble.create(3, 2, seed=0)
        with pytest.raises(TypeError, match="make must return an NNX module, but .*; for models of Linen"):
            Ensemble.create(lambda rngs: rngs.params(), 2, seed=0)

    def test_a_model_instead_of_a_function(self, plain, ens):
        of_ours = r"; pass a function, or use Ensemble.stack for models that exist\.$"
        others = r"; for models of Linen or Equinox, and for functions, use Ensemble.from_apply\(apply, variables\)\.$"
        for model, name, remedy in (
            (plain(nnx.Rngs(0)), "Plain", of_ours),
            (ens, "Ensemble", of_ours),
            (ens[0], "Plain", of_ours),
            (linen.Dense(3), "Dense", others),
            (eqx.nn.Linear(2, 3, key=jax.random.key(0)), "Linear", others),
        ):
            message = rf"^Ensemble.create: make must be a function of nnx.Rngs .*, but got a model, {name}{remedy}"
            with pytest.raises(TypeError, match=message):
                Ensemble.create(model, 2, seed=0)
        for make in (lambda rngs: linen.Dense(3), lambda rngs: eqx.nn.Linear(2, 3, key=rngs())):
            with pytest.raises(TypeError, match="make must return an NNX module, .* use Ensemble.from_apply"):
                Ensemble.create(make, 2, seed=0)

    def test_callable_objects_are_functions(self, plain, leaves):
        class Factory:
            def __call__(self, rngs):
                return plain(rngs)

        expected = leaves(Ensemble.create(plain, 2, seed=0))
        for make in (Factory(), Factory().__call__, partial(plain, width=5), jax.tree_util.Partial(plain)):
            for x, y in zip(leaves(Ensemble.create(make, 2, seed=0)), expected, strict=True):
                np.testing.assert_array_equal(x, y)

    def test_an_index_out_of_range_or_of_another_kind(self, ens):
        with pytest.raises(IndexError, match="member 3 is out of range for an ensemble of 3"):
            ens[3]
        with pytest.raises(IndexError, match="member -4 is out of range"):
            ens[-4]
        with pytest.raises(IndexError, match="selects none of the 3 members"):
            ens[3:]
        for index in (1.0, True, np.True_):
            with pytest.raises(TypeError, match="index of a member must be an int"):
                ens[index]

    def test_a_mapped_axis_of_another_size(self, ens):
        with pytest.raises(
            ValueError, match=r"the number of members is 3, but axis 0 of argument `args\[0\]` has size 2"
        ):
            ens(X, in_axes=0)

    def test_in_axes_of_a_wrong_kind(self, ens):
        with pytest.raises(TypeError, match="in_axes must be"):
            ens(X, in_axes=0.5)
        with pytest.raises(ValueError, match="in_axes has 2 entries, but the call has 1"):
            ens(X, in_axes=(0, None))

    def test_a_view_of_an_unknown_attribute(self, ens):
        with pytest.raises(ValueError, match=r"no module of Plain takes \['deterministic'\]"):
            ens.view(deterministic=True)


def test_a_call_without_keywords_is_not_that_with_keywords_of_no_array():
    class Scaled(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(()))

        def __call__(self, x, scale=2.0):
            return self.w * x * (1.0 if scale is None else scale)

    x = jnp.ones(3)
    for calls in ([{"scale": None}, {}], [{}, {"scale": None}]):
        ensemble = Ensemble.create(Scaled, 2, seed=0)
        for kwargs in [*calls, *calls]:
            np.testing.assert_array_equal(ensemble(x, **kwargs)[0], x if kwargs else 2 * x)
        for given in ((x, None), (x, 3.0), (x,)):
            expected = {None: x, 3.0: 3 * x, 2.0: 2 * x}[given[1] if len(given) > 1 else 2.0]
            for _ in range(2):
                np.testing.assert_array_equal(ensemble(*given)[1], expected)


class Recurrent(nnx.Module):
    """A recurrent layer, which draws keys for its initial carry and uses them if that is random."""

    def __init__(self, rngs, carry_init=None):
        cell = nnx.GRUCell(3, 4, rngs=rngs)
        cell.carry_init = carry_init  # Flax warns of it as an argument
        self.rnn = nnx.RNN(cell, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x, **kwargs):
        return self.norm(self.rnn(x, **kwargs))


def test_recurrent_layers_are_called_and_exported(tmp_path, leaves):
    members = Ensemble.create(Recurrent, 3, seed=0).view(use_running_average=True)
    xs = np.sin(np.arange(90.0, dtype=np.float32)).reshape(3, 2, 5, 3)
    before = leaves(members)
    for got, inputs in ((members(xs[0]), [xs[0]] * 3), (members(xs, in_axes=0), xs), (vmap(members)(xs), xs)):
        expected = [member(x) for member, x in zip(members, inputs, strict=True)]
        np.testing.assert_allclose(got, np.stack(expected), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(members.predict(xs[0], kind="regression").members, members(xs[0]), rtol=1e-6)
    export(
        members, tmp_path / "file", xs[0], outputs=("members",), kind="regression", platforms=[jax.default_backend()]
    )
    exported = load_exported(tmp_path / "file")(xs[0])["members"]
    np.testing.assert_allclose(exported, members(xs[0]), rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, leaves(members), before)


def test_state_that_a_call_would_lose_is_refused_with_what_keeps_it():
    made = Ensemble.create(Recurrent, 2, seed=0)
    random = Ensemble.create(partial(Recurrent, carry_init=nnx.initializers.normal()), 2, seed=0)
    x = np.ones((2, 5, 3), np.float32)
    for ensemble, state, cure in (
        (made, "norm.mean", r"use its evaluation mode: ensemble\.view\(use_running_average=True\)\."),
        (random, "norm.mean", r"ensemble\.view\(use_running_average=True\), or call nnx\.RNN with initial_carry=\."),
        (random.view(use_running_average=True), "rnn.rngs.count", r"ensemble, x\), or call nnx\.RNN with initial"),
    ):
        with pytest.raises(ValueError, match=rf"^Ensemble: a call changes .* \(`{state}`\), which would be .*{cure}"):
            ensemble(x)
        kept, outputs = vmap(lambda member, x: (member, member(x)), (0, None))(ensemble, x)
        assert isinstance(kept, Ensemble)
        assert outputs.shape == (2, 2, 5, 4)
    assert random.view(use_running_average=True)(x, initial_carry=jnp.zeros((2, 4))).shape == (2, 2, 5, 4)
