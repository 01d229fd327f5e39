"""Ensembles whose members share variables: `Ensemble.create(shared=)` and `Ensemble.stack(shared=)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, load, load_member, save, select, soup
from plurax.transforms import grad, vmap
from plurax.transforms.modules import freeze
from plurax.transforms.privacy import DPSGD

X = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
SIZE = 3


class Trunk(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0) -> None:
        self.layers = nnx.List([nnx.Linear(4, 16, rngs=rngs), nnx.Linear(16, 5, rngs=rngs)])
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, x: Any) -> Any:
        x = nnx.tanh(self.layers[1](nnx.relu(self.layers[0](x))))
        return x if self.dropout is None else self.dropout(x)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, trunk: Any = None, rate: float = 0.0) -> None:
        self.trunk = Trunk(rngs, rate) if trunk is None else trunk
        self.head = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.trunk(x))


def created(**options: Any) -> Ensemble[Net]:
    return Ensemble.create(Net, SIZE, seed=0, shared="trunk", **options)


def alone(i: int, trunk: int = 0) -> Net:
    """Return a network with the head of one member and the trunk of another, as made from their seeds."""
    key = jax.random.key(0)
    net, other = (Net(nnx.Rngs(jax.random.fold_in(key, j))) for j in (i, trunk))
    net.trunk = other.trunk
    return net


def test_members_have_heads_of_their_own_and_the_trunk_of_the_first() -> None:
    ens = created()
    assert {x.ndim for x in jax.tree.leaves(ens.trainable)} == {2, 3}
    assert jax.tree.map(jnp.shape, ens.shared.trainable["trunk"]["layers"][0]) == {"bias": (16,), "kernel": (4, 16)}
    assert repr(ens) == f"Ensemble of {SIZE} × Net, 12 parameters each, 165 shared"
    expected = np.stack([alone(i)(X) for i in range(SIZE)])
    np.testing.assert_allclose(ens(X), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda ens, x: ens(x))(ens, X), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(vmap(ens, in_axes=None)(X), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(vmap(ens, in_axes=None, chunk_size=2)(X), expected, rtol=1e-5, atol=1e-6)
    own = vmap(lambda net, x: net(x), in_axes=(0, 0))(ens, np.stack([X, 2 * X, 3 * X]))
    np.testing.assert_allclose(own[2], alone(2)(3 * X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ens.predict(X, kind="regression").mean, expected.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ens(np.stack([X] * SIZE), in_axes=0), expected, rtol=1e-5, atol=1e-6)


def test_every_way_to_take_members() -> None:
    ens = created()
    for i, member in enumerate(ens):
        np.testing.assert_allclose(member(X), alone(i)(X), rtol=1e-5, atol=1e-6)
    for some, places in ((ens[1:], [1, 2]), (ens[[2, 0]], [2, 0]), (select(ens, jnp.array([2, 2])), [2, 2])):
        assert len(some) == 2
        assert some.shared is ens.shared
        np.testing.assert_allclose(some(X)[0], alone(places[0])(X), rtol=1e-5, atol=1e-6)
    again = Ensemble.stack(ens.unstack(), shared="trunk")
    np.testing.assert_array_equal(again(X), ens(X))
    mean = soup(ens)
    np.testing.assert_array_equal(
        mean.trunk.layers[0].kernel[...], ens.shared.trainable["trunk"]["layers"][0]["kernel"]
    )
    np.testing.assert_allclose(nnx.state(mean)["head"]["bias"][...], ens.trainable["head"]["bias"].mean(0), rtol=1e-6)


def test_a_mapped_function_may_return_the_member() -> None:
    ens = created()

    def moved(net: Any) -> Any:
        net.trunk.layers[0].bias[...] += net.head.bias[...].sum() + 1.0
        return net

    found = vmap(moved)(ens)
    assert found.shared is None  # each member now has another trunk
    assert len(found) == SIZE
    assert found.trainable["trunk"]["layers"][0]["bias"].shape == (SIZE, 16)


def test_stacked_members_share_equal_copies_or_the_same_variables() -> None:
    nets = [alone(i) for i in range(SIZE)]
    for net in nets[1:]:
        net.trunk = nets[0].trunk
    one = Ensemble.stack(nets, shared="trunk")
    two = Ensemble.stack([nnx.clone(net) for net in nets], shared=nnx.PathContains("trunk"))
    three = Ensemble.stack([nnx.clone(net) for net in nets], shared=Trunk)
    for ens in (one, two, three):
        np.testing.assert_allclose(ens(X), created()(X), rtol=1e-5, atol=1e-6)
    nets = [nnx.clone(net) for net in nets]
    nets[2].trunk.layers[1].kernel[...] *= 1 + 1e-6
    with pytest.raises(ValueError, match=r"^Ensemble.stack: members 0 and 2 share `trunk.layers.1.kernel`, but differ"):
        Ensemble.stack(nets, shared="trunk")
    with pytest.raises(ValueError, match=r"^Ensemble.stack: members 0 and 1 share a variable"):
        Ensemble.stack([Net(nnx.Rngs(i), nets[0].trunk) for i in range(2)], shared="trunk.layers.0")


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Ensemble.create: shared= selects no variable of Net, which has \['head.b"):
        Ensemble.create(Net, SIZE, seed=0, shared="encoder")
    with pytest.raises(ValueError, match=r"^Ensemble.create: shared= selects all variables"):
        Ensemble.create(Net, SIZE, seed=0, shared=True)
    with pytest.raises(TypeError, match=r"^Ensemble.create: shared must be a dotted name"):
        Ensemble.create(Net, SIZE, seed=0, shared=3)
    dp = DPSGD(
        lambda net, x: net(x).sum(),
        optax.sgd(0.1),
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        target_delta=1e-3,
        num_examples=100,
        expected_batch_size=10,
        num_steps=1,
    )
    with pytest.raises(ValueError, match=r"^DPSGD.init: the members share variables, so that each would see"):
        dp.init(created(), key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"^Ensemble: its arrays were sliced"):
        len(jax.tree.map(lambda x: x[0], created()))


def test_random_streams_are_not_shared() -> None:
    ens = Ensemble.create(lambda rngs: Net(rngs, rate=0.5), SIZE, seed=0, shared="trunk")
    assert "dropout" in ens.rest["trunk"]
    assert not jax.tree.leaves(ens.shared.rest)
    first, last = (nnx.view(member, deterministic=True)(X) for member in (ens[0], ens[-1]))
    np.testing.assert_allclose(ens.view(deterministic=True)(X)[::2], np.stack([first, last]), rtol=1e-5, atol=1e-6)


def test_freezing_keeps_what_is_shared() -> None:
    ens = freeze(created(), "trunk")
    assert ens.shared is not None
    assert not jax.tree.leaves(ens.shared.trainable)
    np.testing.assert_array_equal(ens(X), created()(X))
    gradient = grad(lambda ens: ens(X).sum())(created())
    assert gradient["shared"]["trunk"]["layers"][0]["kernel"].shape == (4, 16)
    assert gradient["own"]["head"]["bias"].shape == (SIZE, 2)
    by_hand = sum(jax.grad(lambda k, i=i: _with_kernel(alone(i), k)(X).sum())(_kernel(alone(0))) for i in range(SIZE))
    np.testing.assert_allclose(gradient["shared"]["trunk"]["layers"][0]["kernel"], by_hand, rtol=1e-4, atol=1e-5)


def _kernel(net: Net) -> Any:
    return net.trunk.layers[0].kernel[...]


def _with_kernel(net: Net, kernel: Any) -> Any:
    structure, state = nnx.split(net)
    flat = dict(nnx.to_flat_state(state))
    path = ("trunk", "layers", 0, "kernel")
    flat[path] = flat[path].replace(kernel)
    return nnx.merge(structure, nnx.from_flat_state(flat))


def test_a_checkpoint_has_the_shared_arrays_once(tmp_path: Path) -> None:
    ens = created()
    save(tmp_path / "shared", ens)
    again = load(tmp_path / "shared", Ensemble.create(Net, SIZE, seed=1, shared="trunk"))
    jax.tree.map(np.testing.assert_array_equal, again, ens)
    for like in (ens, Net(nnx.Rngs(5))):
        member = load_member(tmp_path / "shared", 2, like)
        assert isinstance(member, Net)
        np.testing.assert_array_equal(member(X), ens[2](X))
    with pytest.raises(ValueError, match=r"`like` has"):
        load(tmp_path / "shared", Ensemble.create(Net, SIZE, seed=1))
    copies = Ensemble.create(Net, SIZE, seed=1)
    save(tmp_path / "copies", copies)
    np.testing.assert_array_equal(load_member(tmp_path / "copies", 1, Net(nnx.Rngs(5)))(X), copies[1](X))
    with pytest.raises(ValueError, match=r"`like` has|no shared"):
        load(tmp_path / "copies", ens)


@pytest.mark.optimized
def test_a_call_holds_one_trunk() -> None:
    """The program takes the trunk once, and its temporaries are smaller than two trunks."""

    def wide(rngs: nnx.Rngs) -> Any:
        trunk = nnx.Sequential(nnx.Linear(4, 512, rngs=rngs), nnx.relu, nnx.Linear(512, 5, rngs=rngs))
        return Net(rngs, trunk)

    ens = Ensemble.create(wide, 16, seed=0, shared="trunk")
    compiled = jax.jit(lambda ens, x: ens(x)).lower(ens, X[:1]).compile()
    memory: Any = compiled.memory_analysis()
    trunk = sum(x.nbytes for x in jax.tree.leaves(ens.shared))
    own = sum(x.nbytes for x in jax.tree.leaves((ens.trainable, ens.rest)))
    assert memory.argument_size_in_bytes <= trunk + own + X[:1].nbytes
    assert memory.temp_size_in_bytes < 2 * trunk
