import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.ensemble import Ensemble
from plurax.transforms import grad


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


@pytest.mark.parametrize("seed", [0, 12, np.int64(3)])
def test_created_members_are_those_of_their_own_keys(stateful, leaves, seed):
    ens = Ensemble.create(stateful, 3, seed=seed)
    for i in range(3):
        alone = stateful(nnx.Rngs(jax.random.fold_in(jax.random.key(seed), i)))
        for a, b in zip(leaves(ens[i]), leaves(alone), strict=True):
            (np.testing.assert_array_max_ulp if a.dtype.kind == "f" else np.testing.assert_array_equal)(a, b)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_create_takes_a_key_of_any_kind(plain, leaves, kind):
    key = jax.random.key(5, impl=kind)
    ens = Ensemble.create(plain, 3, seed=key)
    for i in range(3):
        for a, b in zip(leaves(ens[i]), leaves(plain(nnx.Rngs(jax.random.fold_in(key, i)))), strict=True):
            np.testing.assert_array_max_ulp(a, b)


def test_members_of_a_created_ensemble_do_not_depend_on_its_size(plain, assert_same):
    assert_same(Ensemble.create(plain, 2, seed=1)[1], Ensemble.create(plain, 5, seed=1)[1])


def test_make_is_traced_once(plain):
    calls = []

    def make(rngs):
        calls.append(1)
        return plain(rngs)

    Ensemble.create(make, 7, seed=0)
    assert len(calls) == 1


def test_calling_shows_every_member_the_same(ens):
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
def test_arguments_that_are_no_arrays_reach_the_members_as_they_are(ens, flip):
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


def test_indexing(ens, assert_same):
    members = ens.unstack()
    assert len(ens) == len(members) == 3
    assert_same(ens[-1], members[2])
    assert_same(ens[np.int32(1)], members[1])
    assert [len(part) for part in (ens[1:], ens[:1], ens[::2], ens[::-1])] == [2, 1, 2, 3]
    assert_same(ens[::-1][0], members[2])
    assert isinstance(ens[1:2], Ensemble)


def test_a_member_taken_out_is_independent(ens):
    before = ens(X)
    member = ens[1]
    member.first.kernel[...] = jnp.zeros((4, 5))
    np.testing.assert_array_equal(ens(X), before)


def test_an_ensemble_of_one_is_an_ensemble(plain, assert_same):
    one = Ensemble.stack([plain(nnx.Rngs(4))])
    assert len(one) == 1
    assert one(X).shape == (1, 2, 3)
    assert_same(one[0], plain(nnx.Rngs(4)))
    assert one.predict(X).mutual_information.max() == 0


def test_it_passes_through_jit_and_tree_map(ens, assert_same):
    np.testing.assert_allclose(jax.jit(lambda e, x: e(x))(ens, X), ens(X), rtol=1e-6, atol=1e-7)
    doubled = jax.jit(lambda e: jax.tree.map(lambda a: 2 * a, e))(ens)
    assert isinstance(doubled, Ensemble)
    assert_same(doubled[1].first.kernel[...], 2 * ens[1].first.kernel[...])
    assert jax.tree.structure(ens) == jax.tree.structure(Ensemble.create(type(ens[0]), 3, seed=9))


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


def test_mixed_dtypes_and_keys_are_stacked_as_they_are():
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
    ens.predict(X)
    ens.view(deterministic=True, use_running_average=True)(X)
    ens[0](X)
    with pytest.raises(ValueError, match="changes the state of Stateful"):
        ens(X)
    for a, b in zip(before, leaves(ens), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not ens[0].dropout.deterministic


def test_it_is_frozen(ens):
    with pytest.raises(AttributeError, match="cannot assign"):
        ens.trainable = {}


def test_the_gradient_of_an_ensemble_is_that_of_its_members(ens):
    gradient = grad(lambda e, x: (e(x) ** 2).sum())(ens, X)
    for i, member in enumerate(ens):
        alone = grad(lambda m, x: (m(x) ** 2).sum())(member, X)
        np.testing.assert_allclose(gradient["first"]["kernel"][i], alone["first"]["kernel"][...], rtol=1e-5, atol=1e-6)


def test_repr_says_what_it_holds(ens):
    assert repr(ens) == "Ensemble of 3 × Plain, 43 parameters each"


class Test_refusals:
    def test_an_empty_list(self):
        with pytest.raises(ValueError, match="the list of members is empty"):
            Ensemble.stack([])

    def test_no_list(self, plain):
        with pytest.raises(TypeError, match="members must be a list of models"):
            Ensemble.stack(plain(nnx.Rngs(0)))

    def test_a_member_that_is_no_model(self, plain):
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

    @pytest.mark.parametrize(
        ("size", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
    )
    def test_a_size_that_is_none(self, plain, size, error):
        with pytest.raises(error, match="size must be"):
            Ensemble.create(plain, size, seed=0)

    @pytest.mark.parametrize("seed", [1.5, None, "a", True, jnp.ones(2), jax.random.split(jax.random.key(0))])
    def test_a_seed_that_is_none(self, plain, seed):
        with pytest.raises(TypeError, match="seed must be an int or a key"):
            Ensemble.create(plain, 2, seed=seed)

    def test_make_that_makes_no_model(self):
        with pytest.raises(TypeError, match="make must be a function"):
            Ensemble.create(3, 2, seed=0)
        with pytest.raises(TypeError, match="make must return a model"):
            Ensemble.create(lambda rngs: rngs.params(), 2, seed=0)

    def test_an_index_out_of_range_or_of_another_kind(self, ens):
        with pytest.raises(IndexError, match="member 3 is out of range for an ensemble of 3"):
            ens[3]
        with pytest.raises(IndexError, match="member -4 is out of range"):
            ens[-4]
        with pytest.raises(IndexError, match="selects none of the 3 members"):
            ens[3:]
        for index in (1.0, True, [0, 1]):
            with pytest.raises(TypeError, match="index must be an int or a slice"):
                ens[index]

    def test_a_mapped_axis_of_another_size(self, ens):
        with pytest.raises(
            ValueError, match=r"axis 0 of argument `args\[0\]` has size 2, but the number of members is 3"
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
