"""Training of parameters that members share, against a loop by hand over members that share an array."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import EarlyStopping, Ensemble, Restarts, Trainer, TrainState, exploit, load, save, select
from plurax.transforms import value_and_grad
from plurax.transforms._models.split_model import split
from plurax.transforms.modules import freeze

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 4)).astype(np.float32), RNG.integers(0, 3, 8)
SIZE, STEPS = 3, 4
STRATEGIES: Any = ["vmap", "map", "unroll", "loop"]


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, norm: bool = False) -> None:
        self.trunk = nnx.Linear(4, 6, use_bias=not norm, rngs=rngs)  # before a norm, a bias has gradients of rounding
        self.norm = nnx.BatchNorm(6, rngs=rngs) if norm else None
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.trunk(x)
        return self.head(nnx.relu(x if self.norm is None else self.norm(x)))


def normed(rngs: nnx.Rngs) -> Net:
    return Net(rngs, norm=True)


def loss(net: Any, x: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(net(x), y).mean()


def created(make: Any = Net, shared: Any = "trunk") -> Ensemble[Any]:
    return Ensemble.create(make, SIZE, seed=0, shared=shared)


def by_hand(ens: Ensemble[Any], optimizer: Any, of_shared: Any, steps: int = STEPS, left_out: Any = ()) -> Any:
    """Return the shared parameters and those of each member, with gradients of one member at a time."""
    structure, shared = ens.structure, ens.shared.trainable
    own = [jax.tree.map(lambda x, i=i: x[i], (ens.trainable, ens.rest)) for i in range(len(ens))]

    def of(mine: Any, shared: Any, rest: Any) -> Any:
        net = structure.merge({**mine, **shared}, rest)
        value = loss(net, X, Y)
        return value, split(net).rest

    states, shared_state = [optimizer(i).init(mine) for i, (mine, _) in enumerate(own)], of_shared.init(shared)
    for _ in range(steps):
        found = []
        for i, (mine, rest) in enumerate(own):
            if i in left_out:
                continue
            gradients, rest = jax.grad(of, (0, 1), has_aux=True)(mine, shared, rest)
            updates, states[i] = optimizer(i).update(gradients[0], states[i], mine)
            own[i] = optax.apply_updates(mine, updates), rest
            found.append(gradients[1])
        mean = jax.tree.map(lambda *g: sum(g) / len(g), *found)
        updates, shared_state = of_shared.update(mean, shared_state, shared)
        shared = optax.apply_updates(shared, updates)
    return shared, own


def trained(trainer: Trainer, ens: Ensemble[Any], steps: int = STEPS) -> TrainState[Any]:
    state = trainer.init(ens)
    for _ in range(steps):
        state, _ = trainer.step(state, (X, Y))
    return state


def assert_close(state: TrainState[Any], expected: Any) -> None:
    shared, own = expected
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
    jax.tree.map(close, state.ensemble.shared.trainable, shared)
    for i, (mine, rest) in enumerate(own):
        jax.tree.map(lambda a, b, i=i: close(a[i], b), (state.ensemble.trainable, state.ensemble.rest), (mine, rest))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_the_loop_by_hand(strategy: Any) -> None:
    adam = optax.adam(0.05)
    assert_close(trained(Trainer(loss, adam, strategy=strategy), created()), by_hand(created(), lambda i: adam, adam))


def test_one_member_alone_is_a_module_that_trains_as_ever() -> None:
    ens = Ensemble.create(Net, 1, seed=0, shared="trunk")
    net = ens[0]
    optimizer = nnx.Optimizer(net, optax.adam(0.05), wrt=nnx.Param)
    for _ in range(STEPS):
        optimizer.update(net, nnx.grad(loss)(net, X, Y))
    found = trained(Trainer(loss, optax.adam(0.05), strategy="vmap"), ens).ensemble[0]
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, *(nnx.to_pure_dict(nnx.state(each, nnx.Param)) for each in (found, net)))


@pytest.mark.slow
def test_chunks_own_norms_and_two_optimizers() -> None:
    rates = [0.1, 0.05, 0.2]
    options: Any = {"hyperparams": {"learning_rate": rates}, "shared_optimizer": optax.adam(0.01)}
    trainer = Trainer(loss, optax.sgd, strategy="vmap", chunk_size=2, **options)
    expected = by_hand(created(normed), lambda i: optax.sgd(rates[i]), optax.adam(0.01))
    assert_close(trained(trainer, created(normed)), expected)


def test_a_run_is_the_steps_and_goes_on_exactly(tmp_path: Path) -> None:
    trainer = Trainer(loss, optax.adam(0.05), strategy="vmap")
    steps = trained(trainer, created(), 6)
    batches = [(X, Y)] * 6
    for options in ({}, {"steps_per_call": 2}):
        state, history = trainer.fit(trainer.init(created()), batches, progress=False, **options)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, steps)
        assert len(history) == 6 * SIZE
    whole, _ = trainer.fit(trainer.init(created()), batches, progress=False)
    trainer.fit(trainer.init(created()), batches[:4], progress=False, checkpoint_dir=tmp_path)
    resumed, _ = trainer.fit(trainer.init(created()), batches, progress=False, checkpoint_dir=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    save(tmp_path / "state", whole)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "state", trainer.init(created())), whole)
    other = Ensemble.create(Net, SIZE, seed=1, shared="trunk")
    with pytest.raises(ValueError, match=r"is of another run: .*other shared arrays"):
        trainer.fit(trainer.init(other), batches, progress=False, checkpoint_dir=tmp_path)


def spoiled(ens: Ensemble[Any], i: int) -> Ensemble[Any]:
    """Return an ensemble whose member `i` has NaNs for its own parameters."""
    trainable = jax.tree.map(lambda x: x.at[i].set(jnp.nan), ens.trainable)
    return Ensemble(ens.structure, trainable, ens.rest, ens.shared)


EXECUTIONS = [{"strategy": "vmap"}, {"strategy": "vmap", "chunk_size": 2}, {"strategy": "map"}]


@pytest.mark.parametrize("options", EXECUTIONS, ids=["vmap", "chunks", "map"])
@pytest.mark.parametrize("nonfinite", ["freeze", "ignore"])
def test_a_member_of_nans_does_not_spoil_what_is_shared(nonfinite: Any, options: Any) -> None:
    ens, sgd = spoiled(created(), 1), optax.sgd(0.1)
    state = trained(Trainer(loss, sgd, nonfinite=nonfinite, **options), ens)
    shared, own = by_hand(ens, lambda i: sgd, sgd, left_out=(1,))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.ensemble.shared.trainable, shared)
    np.testing.assert_allclose(state.ensemble.trainable["head"]["bias"][2], own[2][0]["head"]["bias"], rtol=1e-5)
    assert state.standing.stopped.tolist() == [0, int(nonfinite == "freeze"), 0]
    # If no member has a finite gradient, nothing that is shared moves.
    nothing = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), ens.trainable)
    ens = Ensemble(ens.structure, nothing, ens.rest, ens.shared)
    state = trained(Trainer(loss, optax.adam(0.1), nonfinite=nonfinite, **options), ens, 1)
    jax.tree.map(np.testing.assert_array_equal, state.ensemble.shared.trainable, ens.shared.trainable)


def only_shared_overflows(net: Any, x: Any, y: Any, *, scale: Any) -> Any:
    """Return a loss that adds 0, whose gradient by the trunk is `scale`, and by the own parameters 0."""
    bias = net.trunk.bias[0]
    return loss(net, x, y) + scale * (bias - jax.lax.stop_gradient(bias))


def test_a_member_counts_if_its_loss_and_all_its_gradients_are_finite() -> None:
    ens, sgd = created(), optax.sgd(0.1)
    expected = by_hand(ens, lambda i: sgd, sgd, 2, left_out=(1,))
    for each, options in (
        (only_shared_overflows, {"scale": [0.0, np.inf, 0.0]}),  # the gradient by the trunk, and the loss 0 · inf
        (lambda net, x, y, *, add: loss(net, x, y) + add, {"add": [0.0, np.inf, 0.0]}),  # the loss alone
    ):
        state = trained(Trainer(each, sgd, hyperparams=options, strategy="vmap"), ens, 2)
        assert state.standing.stopped.tolist() == [0, 1, 0]
        shared, own = expected
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.ensemble.shared.trainable, shared)
        bias = state.ensemble.trainable["head"]["bias"]
        np.testing.assert_allclose(bias[2], own[2][0]["head"]["bias"], rtol=1e-5)
        np.testing.assert_array_equal(bias[1], ens.trainable["head"]["bias"][1])


@pytest.mark.slow
def test_gradients_of_a_grad_fn_are_added_member_by_member() -> None:
    adam = optax.adam(0.05)
    for options in EXECUTIONS:
        trainer = Trainer(loss, adam, grad_fn=lambda loss: value_and_grad(loss), **options)
        assert_close(trained(trainer, created()), by_hand(created(), lambda i: adam, adam))


def test_a_loss_that_cannot_be_differentiated_is_refused_as_ever() -> None:
    for wrong, dtype in (
        (lambda net, x: net(x).sum().astype(int), "int32"),
        (lambda net, x: net(x).sum() + 1j, "comp"),
    ):
        trainer = Trainer(wrong, optax.sgd(0.1), strategy="vmap")
        with pytest.raises(TypeError, match=rf"^value_and_grad: .*{dtype}"):
            trainer.step(trainer.init(created()), X)


def test_members_that_stop_leave_the_mean() -> None:
    """Three of four stop after two evaluations, and leave the run; the last one goes on with the trunk alone."""
    ens, sgd = Ensemble.create(Net, 4, seed=0, shared="trunk"), optax.sgd(0.1)
    values = iter([[1, 1, 1, 1], [2, 2, 2, 0], [-1], [-2]])
    options: Any = {"every": 1, "patience": 1, "restore_best": False}
    stopping = EarlyStopping(evaluate=lambda _: np.array(next(values), np.float32), **options)
    trainer = Trainer(loss, sgd, strategy="vmap")
    state, _ = trainer.fit(trainer.init(ens), [(X, Y)] * 4, progress=False, early_stopping=stopping)
    shared, own = by_hand(ens, lambda i: sgd, sgd, 2)
    trainable, rest = jax.tree.map(lambda *x: jnp.stack(x), *own)
    moved = Ensemble(ens.structure, trainable, rest, type(ens.shared)(shared, {}, ens.shared.paths))
    shared, last = by_hand(moved, lambda i: sgd, sgd, 2, left_out=(0, 1, 2))
    assert_close(state, (shared, last))
    assert state.standing.step.tolist() == [2, 2, 2, 4]
    with pytest.raises(ValueError, match=r"^Trainer.fit: a member cannot be restored, since .*restore_best=False"):
        trainer.fit(trainer.init(ens), [(X, Y)], progress=False, early_stopping=EarlyStopping(evaluate=len))


def test_what_shared_parameters_need() -> None:
    per_member = Trainer(loss, optax.sgd, hyperparams={"learning_rate": [0.1, 0.2, 0.3]})
    with pytest.raises(ValueError, match=r"^Trainer.init: the members share parameters, but not .*\['learning_rate'\]"):
        per_member.init(created())
    per_member.init(freeze(created(), "trunk"))
    nothing = Trainer(loss, optax.sgd(0.1), shared_optimizer=optax.sgd(0.1))
    for ens in (Ensemble.create(Net, SIZE, seed=0), freeze(created(), "trunk")):
        with pytest.raises(ValueError, match=r"^Trainer.init: shared_optimizer has nothing to train"):
            nothing.init(ens)
    with pytest.raises(TypeError, match=r"^Trainer: shared_optimizer must be a GradientTransformation"):
        Trainer(loss, optax.sgd(0.1), shared_optimizer=optax.sgd)
    trainer, norms = Trainer(loss, optax.sgd(0.1)), created(normed, shared=nnx.BatchNorm)
    with pytest.raises(
        ValueError, match=r"^Trainer: loss changes `norm.(mean|var)`, which all members share; .*view\("
    ):
        trainer.step(trainer.init(norms), (X, Y))
    trainer.step(trainer.init(norms.view(use_running_average=True)), (X, Y))


def test_a_frozen_trunk_is_neither_copied_nor_changed() -> None:
    trainer = Trainer(loss, optax.adam, hyperparams={"learning_rate": [0.1, 0.2, 0.3]}, strategy="vmap")
    state = trainer.init(freeze(created(), "trunk"))
    assert state.shared_opt_state is None
    after, _ = trainer.step(state, (X, Y))
    for x, y in zip(jax.tree.leaves(after.ensemble.shared), jax.tree.leaves(state.ensemble.shared), strict=True):
        assert x is y
    frozen = freeze(Ensemble.create(Net, SIZE, seed=0), "trunk")
    copies = Ensemble.stack([_with_trunk(frozen[i], frozen[0]) for i in range(SIZE)])
    expected = trained(Trainer(loss, optax.adam, hyperparams={"learning_rate": [0.1, 0.2, 0.3]}), copies, 1)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, after.ensemble.trainable, expected.ensemble.trainable)


def _with_trunk(net: Any, other: Any) -> Any:
    net.trunk = nnx.clone(other.trunk)
    return net


@pytest.mark.optimized
@pytest.mark.parametrize("options", EXECUTIONS, ids=["vmap", "chunks", "map"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_step_holds_one_trunk_and_one_gradient_of_it(frozen: bool, options: Any) -> None:
    def wide(rngs: nnx.Rngs) -> Any:
        net: Any = Net(rngs)
        net.trunk = nnx.Sequential(nnx.Linear(4, 128, rngs=rngs), nnx.Linear(128, 512, rngs=rngs), lambda x: x[:, :6])
        return net

    trainer = Trainer(loss, optax.sgd(0.1), **options)
    ens = Ensemble.create(wide, 16, seed=0, shared="trunk")
    state = trainer.init(freeze(ens, "trunk") if frozen else ens)
    compiled = jax.jit(lambda state, x, y: trainer.step(state, (x, y))).lower(state, X[:1], Y[:1]).compile()
    memory: Any = compiled.memory_analysis()
    trunk = sum(x.nbytes for x in jax.tree.leaves(state.ensemble.shared))
    total = sum(x.nbytes for x in jax.tree.leaves((state.ensemble, state.opt_state, state.standing)))
    assert memory.argument_size_in_bytes <= total + 1000
    assert memory.temp_size_in_bytes < (1 if frozen else 4) * trunk


@pytest.mark.parametrize("options", [{"strategy": "vmap"}, {"strategy": "map"}, {"chunk_size": 2}])
def test_a_sum_of_gradients_beyond_float16_has_a_mean(options: Any) -> None:
    class Product(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.own, self.trunk = (nnx.Param(jnp.ones(3, jnp.float16)) for _ in range(2))

    def product(model: Any, x: Any) -> Any:
        return (model.own * (model.trunk - jax.lax.stop_gradient(model.trunk)) * x).sum()  # 0, with the gradient x

    trainer = Trainer(product, optax.sgd(2.0**-14), **options)
    state = trainer.init(Ensemble.create(Product, 3, seed=0, shared="trunk"))
    x = np.array([1, 30_000, 60_000], np.float16)
    after = trainer.step(state, x)[0].ensemble.shared.trainable["trunk"]
    assert after.dtype == jnp.float16
    np.testing.assert_allclose(after, 1 - x.astype(np.float32) * 2.0**-14, rtol=1e-3)


def test_populations_and_restarts_keep_the_shared_part() -> None:
    trainer = Trainer(loss, optax.sgd(0.1), strategy="vmap")
    state = trained(trainer, created(), 1)
    for some in (select(state, [2, 0]), exploit(state, jnp.arange(3.0), key=jax.random.key(0))[0]):
        jax.tree.map(np.testing.assert_array_equal, some.ensemble.shared, state.ensemble.shared)
        after, _ = trainer.step(some, (X, Y))
        assert not np.array_equal(after.ensemble.shared.trainable["trunk"]["bias"], _bias(state))
    with pytest.warns(UserWarning, match="not finite"):
        ended, _ = trainer.fit(
            trainer.init(created()),
            [(X, Y), (np.full_like(X, np.nan), Y), (X, Y), (X, Y)],
            progress=False,
            restarts=Restarts(every=2),
        )
    assert np.isfinite(_bias(ended)).all()


def _bias(state: TrainState[Any]) -> Any:
    return state.ensemble.shared.trainable["trunk"]["bias"]


def test_validation_uses_the_shared_part() -> None:
    trainer = Trainer(loss, optax.sgd(0.0), strategy="vmap")
    ens = created()
    _, history = trainer.fit(trainer.init(ens), [(X, Y)], progress=False, validation=(X, Y), validate_every=1)
    expected = [float(loss(member, X, Y)) for member in ens]
    np.testing.assert_allclose([row["validation_loss"] for row in history], expected, rtol=1e-5)


ON_EIGHT = """
import jax, jax.numpy as jnp, numpy as np, optax, re, tempfile
from jax.sharding import PartitionSpec as P
from plurax.ensemble import Ensemble, Trainer, load, save
from tests.ensemble._training import test_shared_training as own
MESHES = [
    ((4,), ("ensemble",), 6),
    ((4,), ("ensemble",), 8),
    ((4, 2), ("ensemble", "data"), 4),
    ((4, 2), ("ensemble", "model"), 6),
    ((1, 2), ("ensemble", "model"), 3),
    ((2, 2, 2), ("ensemble", "data", "model"), 4),
]
for shape, axes, size in MESHES:
    mesh = jax.make_mesh(shape, axes)
    split = 2 if "model" in axes else 1
    ens = Ensemble.create(own.Net, size, seed=0, shared="trunk")
    one = own.trained(Trainer(own.loss, optax.adam(0.05), strategy="vmap"), ens)
    trainer = Trainer(own.loss, optax.adam(0.05), strategy="vmap", mesh=mesh)
    many = own.trained(trainer, ens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), many, one)
    assert own._bias(many).sharding.is_fully_replicated
    for of_shared in (many.ensemble.shared.trainable, many.shared_opt_state[0].mu):
        assert of_shared["trunk"]["kernel"].addressable_shards[0].data.shape == (4, 6 // split)
    head = many.ensemble.trainable["head"]["kernel"]
    assert head.addressable_shards[0].data.shape == (size if size % shape[0] else size // shape[0], 6 // split, 3)
    np.testing.assert_allclose(many.ensemble(own.X), one.ensemble(own.X), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(many.ensemble[1](own.X), one.ensemble[1](own.X), rtol=1e-4, atol=1e-5)
    with_nans = own.trained(trainer, own.spoiled(ens, 1))
    expected = own.trained(Trainer(own.loss, optax.adam(0.05), strategy="vmap"), own.spoiled(ens, 1))
    assert with_nans.standing.stopped.tolist() == [0, 1] + [0] * (size - 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), with_nans, expected)
    watched = {"validation": (own.X, own.Y), "validate_every": own.STEPS}
    fitted, history = trainer.fit(trainer.init(ens), [(own.X, own.Y)] * own.STEPS, progress=False, **watched)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), fitted, one)
    expected = [float(own.loss(member, own.X, own.Y)) for member in fitted.ensemble]
    last = [row["validation_loss"] for row in history if "validation_loss" in row]
    np.testing.assert_allclose(last, expected, rtol=1e-4)
    with tempfile.TemporaryDirectory() as place:
        save(place + "/state", fitted)
        again = load(place + "/state", trainer.init(ens))
        jax.tree.map(np.testing.assert_array_equal, again, fitted)
        there = {len(x.sharding.device_set) for x in jax.tree.leaves(again)}
        assert there == {mesh.size}, there
    bare = Ensemble.create(lambda rngs: own.Net(rngs, norm=True).trunk, size, seed=0)  # without a bias
    square = Trainer(lambda net, x, y: (net(x) ** 2).mean(), optax.sgd(0.1), strategy="vmap", mesh=mesh)
    ended, _ = square.fit(square.init(bare), [(own.X, own.Y)] * 2, progress=False)
    assert np.isfinite(ended.ensemble(own.X)).all()
    if size % shape[0]:
        continue
    made = Ensemble.create(own.Net, size, seed=0, shared="trunk", mesh=mesh)
    np.testing.assert_allclose(made(own.X), ens(own.X), rtol=1e-5, atol=1e-6)
    text = jax.jit(lambda s, x, y: trainer.step(s, (x, y))).lower(many, own.X, own.Y).compile().as_text()
    sent = re.findall(r"= .*? (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\\(", text)
    print(shape, sorted(sent))
"""


@pytest.mark.slow
def test_eight_devices_are_as_one_and_add_up_gradients_only() -> None:
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", ON_EIGHT],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, **environment},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    first, second, *split = run.stdout.splitlines()
    assert set(first.split("[")[1].strip("]").replace("'", "").split(", ")) == {"all-reduce"}
    assert set(second.split("[")[1].strip("]").replace("'", "").split(", ")) == {"all-reduce"}
    assert len(split) == 2  # what these send among the devices of a member is the compiler's choice
