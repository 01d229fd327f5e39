"""A run goes on only from its own checkpoints. This file is also the script that a process runs."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Batches, Ensemble, Trainer
from plurax.transforms import value_and_grad
from plurax.transforms._runs import identity

if __name__ != "__main__":  # the processes run this file as a script
    from ..._files import rewrite

pytestmark = pytest.mark.smoke

X = np.sin(np.arange(60.0)).reshape(20, 3).astype(np.float32)
Y = np.cos(np.arange(20.0)).astype(np.float32)
ORDER = np.roll(np.arange(20), 1)


def make(rngs):
    return nnx.Sequential(nnx.Linear(3, 5, rngs=rngs), nnx.tanh, nnx.Linear(5, 1, rngs=rngs))


def loss(model, x, y, *, weight=1.0):
    return weight * jnp.mean((model(x)[:, 0] - y) ** 2)


def scaled(scale, model, x, y):
    return jnp.mean(scale * (model(x)[:, 0] - y[: len(scale)]) ** 2)


def with_scale(last):
    """Return a loss that closes over an array, whose values are not part of the text of a program."""
    return functools.partial(scaled, np.array([1, 2, 3, 4, last], np.float32))


def ulp_more(x):
    """Return an array whose last element is larger by an ulp."""
    numbers = np.array(x)
    numbers.flat[-1] = np.nextafter(numbers.flat[-1], np.float32(np.inf))
    return jnp.asarray(numbers)


@functools.cache
def created(seed):
    return Ensemble.create(make, 2, seed=seed)


ADAM = optax.adam(0.01)
trainer_of = functools.cache(Trainer)  # so that runs of one trainer share its programs


def run_of(**changed):
    """Return the `fit` of a run, with some of its parts changed."""
    part = {"loss": loss, "optimizer": ADAM, "seed": 0, "change": lambda x: x, "data": (X, Y), "key": 1}
    part |= {"size": 5, "in_axes": None, "strategy": "vmap", "grad_fn": None, "options": {}, "batches": None} | changed
    options = {name: part[name] for name in ("in_axes", "strategy", "grad_fn")}
    if hyperparams := part.get("hyperparams"):
        trainer = Trainer(part["loss"], part["optimizer"], hyperparams=hyperparams, **options)
    else:
        trainer = trainer_of(part["loss"], part["optimizer"], **options)
    batches = part["batches"]
    if batches is None:
        batches = Batches(part["data"], part["size"], key=jax.random.key(part["key"]), **part["options"])
    ensemble = jax.tree.map(part["change"], created(part["seed"]))
    return functools.partial(trainer.fit, trainer.init(ensemble), batches, progress=False)


BOOTSTRAP = {"in_axes": 0, "options": {"members": 2, "draw": "bootstrap"}}
OTHERS = {
    "seed": ({}, {"seed": 1}, "its state at step 0 has other weights"),
    "an ulp": ({}, {"change": ulp_more}, "its state at step 0 has other weights"),
    "loss": ({}, {"loss": lambda m, x, y: jnp.mean(abs(m(x)[:, 0] - y))}, "its steps run another program"),
    "constant": ({"loss": with_scale(5)}, {"loss": with_scale(6)}, "its steps run another program"),
    "grad_fn": ({}, {"grad_fn": lambda f: lambda *a: jax.tree.map(lambda g: 2 * g, value_and_grad(f)(*a))}, "program"),
    "ready optimizer": ({}, {"optimizer": optax.adam(0.02)}, "its steps run another program"),
    "key": ({}, {"key": 2}, "its batches have another key"),
    "batch size": ({}, {"size": 4}, "its batches have another batch_size, 5 instead of 4"),
    "order of the data": ({}, {"data": (X[ORDER], Y[ORDER])}, "its batches have another data"),
    "a label": ({}, {"data": (X, ulp_more(Y))}, "its batches have another data"),
    "draw": (BOOTSTRAP, {**BOOTSTRAP, "options": {"members": 2}}, "its batches have another draw"),
    "iterable": ({}, {"batches": [(X[:5], Y[:5])] * 9}, "its batches have another key"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(name, tmp_path):
    """The steps of one run are never returned as those of another, even if there are none left to take."""
    first, second, match = OTHERS[name]
    run_of(**first)(steps=4, checkpoint_dir=tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for steps in (4, 6):
        with pytest.raises(ValueError, match=match) as raised:
            run_of(**second)(steps=steps, checkpoint_dir=tmp_path)
        for remedy in ("Trainer.fit: the checkpoint at", "another checkpoint_dir", "resume=True", "resume=False"):
            assert remedy in str(raised.value)
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("resume", ["auto", True])
def test_a_state_of_another_structure_is_of_another_run(tmp_path, resume):
    run_of()(steps=4, checkpoint_dir=tmp_path)
    before = sorted(tmp_path.rglob("*"))
    match = r"is of another run: its state has shape .* at `.*count` in `opt_state`, .* but `state` has nothing"
    with pytest.raises(ValueError, match=match) as raised:
        run_of(optimizer=optax.sgd(0.1))(steps=6, checkpoint_dir=tmp_path, resume=resume)
    assert "another checkpoint_dir" in str(raised.value)
    assert "resume=False" in str(raised.value)
    assert "like" not in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("resume", ["auto", True])
@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            {"size": 3},
            r"learning_rate=\[0.1, 0.2\], but .*=\[0.1, 0.2, 0.3\]; its state has 2 members, but .* has 3\. ",
        ),
        ({"optimizer": optax.sgd}, "it has optimizer=adam, but the trainer has optimizer=sgd; its state has shape"),
    ],
)
def test_other_settings_with_a_state_of_another_structure(tmp_path, resume, other, match):
    """No `resume=True` is recommended, since it could not go on either."""

    def run(size=2, optimizer=optax.adam, **options):
        rates = {"learning_rate": [0.1, 0.2, 0.3][:size]}
        trainer = Trainer(loss, optimizer, hyperparams=rates, strategy="vmap")
        state = trainer.init(Ensemble.create(make, size, seed=0))
        return trainer.fit(state, [(X[:5], Y[:5])] * 2, progress=False, checkpoint_dir=tmp_path, **options)

    run()
    with pytest.raises(ValueError, match=match) as raised:
        run(**other, resume=resume)
    assert "resume=True" not in str(raised.value)
    run(**other, resume=False)  # as the error says


def test_a_dropout_rate_is_named_among_what_may_have_changed(tmp_path):
    def run(rate):
        def with_dropout(rngs):
            return nnx.Sequential(
                nnx.Linear(3, 5, rngs=rngs), nnx.Dropout(rate, rngs=rngs), nnx.Linear(5, 1, rngs=rngs)
            )

        state = trainer_of(loss, ADAM, strategy="vmap").init(Ensemble.create(with_dropout, 2, seed=0))
        return functools.partial(trainer_of(loss, ADAM, strategy="vmap").fit, state, [(X, Y)] * 2, progress=False)

    run(0.3)(steps=1, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="an attribute of the model, such as a dropout rate"):
        run(0.4)(steps=2, checkpoint_dir=tmp_path)


def test_all_differences_are_named(tmp_path):
    run_of()(steps=2, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="other weights; its batches have another key; its batches have another bat"):
        run_of(seed=1, key=2, size=4)(steps=3, checkpoint_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_the_same_run_goes_on_and_says_so(tmp_path, capsys, assert_same, strategy):
    run = {"strategy": strategy, "options": {"epochs": 2}}
    whole, history = run_of(**run)(steps=7)
    run_of(**run)(steps=3, checkpoint_dir=tmp_path)
    assert capsys.readouterr().err == ""
    state, rows = run_of(strategy=strategy)(steps=7, checkpoint_dir=tmp_path)  # for more epochs
    assert capsys.readouterr().err == f"Trainer.fit: going on from step 3 in {tmp_path}.\n"
    assert_same(state, whole)
    assert rows == history
    run_of(**run)(steps=7, checkpoint_dir=tmp_path)
    assert "going on from step 7" in capsys.readouterr().err


def test_batches_of_several_sizes_are_one_run(tmp_path, assert_same):
    """Programs are compared for the shapes of the first batch, whichever batch comes next."""
    batches = [(X[:n], Y[:n]) for n in (5, 4, 4, 3)]
    whole, _ = run_of(batches=batches)()
    run_of(batches=batches)(steps=2, checkpoint_dir=tmp_path)
    assert_same(run_of(batches=batches)(checkpoint_dir=tmp_path)[0], whole)


def test_another_run_may_go_on_if_told_to(tmp_path, capsys):
    run_of()(steps=2, checkpoint_dir=tmp_path)
    other = run_of(loss=lambda m, x, y: jnp.sum(m(x) ** 2))
    state, history = other(steps=5, checkpoint_dir=tmp_path, resume=True)
    assert "going on from step 2" in (told := capsys.readouterr().err)
    assert "although its steps run another program" in told
    assert int(state.step) == 5
    assert len(history) == 10
    other(steps=6, checkpoint_dir=tmp_path)  # now the directory is that of the other run
    assert "although" not in capsys.readouterr().err
    with pytest.raises(ValueError, match="another program"):
        run_of()(steps=6, checkpoint_dir=tmp_path)


def test_a_run_that_goes_on_with_other_hyperparameters_uses_them(tmp_path):
    """They are in the state of the optimizer and of the member, which would otherwise be those of the checkpoint."""
    rates = {"learning_rate": [0.1, 0.1], "weight": [1.0, 1.0]}, {"learning_rate": [0.1, 0.0], "weight": [1.0, 2.0]}
    first, second = (run_of(optimizer=optax.sgd, hyperparams=x) for x in rates)
    before, _ = first(steps=2, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match=r"it has weight=\[1.0, 1.0\], but the trainer has weight=\[1.0, 2.0\]. Use"):
        second(steps=3, checkpoint_dir=tmp_path)
    after, history = second(steps=3, checkpoint_dir=tmp_path, resume=True)
    kernels = [np.asarray(x.ensemble.trainable["layers"][0]["kernel"][...]) for x in (before, after)]
    assert (kernels[0][0] != kernels[1][0]).any()
    np.testing.assert_array_equal(kernels[0][1], kernels[1][1])
    _, expected = first(steps=3)
    assert [row["learning_rate"] for row in history[-2:]] == [0.1, 0.0]
    np.testing.assert_allclose([x["loss"] for x in history[-2:]], np.array([1, 2]) * [x["loss"] for x in expected[-2:]])


def test_a_run_that_starts_anew_leaves_the_checkpoints_of_the_other(tmp_path, capsys, assert_same):
    run_of()(steps=9, checkpoint_dir=tmp_path)
    (names,) = ([path.name for path in tmp_path.iterdir()],)
    held = (tmp_path / names[0] / "plurax.json").read_text()
    other = run_of(seed=1)
    state, _ = other(steps=2, checkpoint_dir=tmp_path, resume=False)
    assert "renamed to step_*.earlier, and the run starts anew" in capsys.readouterr().err
    assert_same(state, run_of(seed=1)(steps=2)[0])
    new, old = sorted(tmp_path.iterdir())
    assert (new.name, old.name[:14], old.suffix) == ("step_00000002", "step_00000009.", ".earlier")
    assert (old / "plurax.json").read_text() == held
    assert_same(other(steps=4, checkpoint_dir=tmp_path)[0], run_of(seed=1)(steps=4)[0])


def test_a_state_from_the_middle_of_a_run_is_of_that_run(tmp_path, assert_same):
    trainer = Trainer(loss, optax.adam(0.01), strategy="vmap")
    start, batches = trainer.init(created(0)), [(X + i, Y) for i in range(9)]
    fit = functools.partial(trainer.fit, progress=False, checkpoint_dir=tmp_path)
    whole, history = trainer.fit(start, batches, progress=False)
    half, _ = fit(start, batches, steps=4)
    with pytest.raises(ValueError, match="its state at step 4 has other weights"):
        fit(jax.tree.map(lambda x: x + 1 if x.dtype == jnp.float32 and x.ndim > 2 else x, half), batches[4:])
    assert_same(fit(half, batches[4:], steps=3)[0].step, np.int32(7))
    state, rows = fit(half, batches[4:])  # from step 7, to which the run from the middle came
    assert_same(state, whole)
    assert rows == history
    assert_same(fit(start, batches)[0], whole)
    later, _ = fit(whole, batches[:1])  # trained on, later than all checkpoints
    assert int(later.step) == 10
    with pytest.raises(ValueError, match="it did not start from a state at step 2"):
        fit(trainer.fit(start, batches, steps=2, progress=False)[0], batches[2:])


def test_a_checkpoint_of_no_run_is_refused(tmp_path, assert_same):
    """Somebody gave what `save` wrote the name of a checkpoint."""
    whole, _ = run_of()(steps=4)
    run_of()(steps=2, checkpoint_dir=tmp_path)
    rewrite(tmp_path / "step_00000002" / "plurax.json", lambda entries: entries["about"].update(run=None))
    with pytest.raises(ValueError, match="is of another run: no run has written it"):
        run_of()(steps=4, checkpoint_dir=tmp_path)
    assert_same(run_of()(steps=4, checkpoint_dir=tmp_path, resume=True)[0], whole)


def test_the_program_of_another_version_is_not_compared(tmp_path, monkeypatch):
    """It may print the same program in another way; all else is compared."""
    run_of()(steps=2, checkpoint_dir=tmp_path)
    monkeypatch.setattr(identity, "_libraries", lambda: {"jax": "0.10.99"})
    with pytest.raises(ValueError, match="another key"):
        run_of(key=2)(steps=3, checkpoint_dir=tmp_path)
    run_of(optimizer=optax.adam(0.02))(steps=3, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="another program"):
        run_of()(steps=4, checkpoint_dir=tmp_path)


def test_first_weights_from_another_device_may_differ_by_an_ulp(tmp_path, monkeypatch):
    """A compiled initialization on a mesh rounds differently, and another seed still differs."""
    run_of()(steps=2, checkpoint_dir=tmp_path)
    monkeypatch.setattr(identity, "_device", lambda tree: None)
    with pytest.raises(ValueError, match="other weights"):
        run_of(seed=1)(steps=3, checkpoint_dir=tmp_path)
    run_of(change=ulp_more)(steps=3, checkpoint_dir=tmp_path)


@pytest.mark.parametrize("resume", ["yes", None, 1, "True"])
def test_unknown_values_of_resume(tmp_path, resume):
    with pytest.raises(ValueError, match='Trainer.fit: resume must be "auto", True or False, but got'):
        run_of()(checkpoint_dir=tmp_path, resume=resume)


def test_resume_needs_a_directory():
    with pytest.raises(ValueError, match="resume=True needs a checkpoint_dir; pass one"):
        run_of()(resume=True)


@pytest.mark.slow
def test_a_program_is_the_same_in_every_process(tmp_path, assert_same):
    """Hashes of strings, and so the order of sets, and addresses differ between processes."""
    for seed, steps in (("1", "2"), ("2", "4")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, __file__, str(tmp_path), steps], env=environment, check=True, timeout=120)
    whole, _ = run_of(loss=with_scale(5))(steps=6)
    assert_same(run_of(loss=with_scale(5))(steps=6, checkpoint_dir=tmp_path)[0], whole)


if __name__ == "__main__":
    run_of(loss=with_scale(5))(steps=int(sys.argv[2]), checkpoint_dir=sys.argv[1])


def test_batches_of_64_bits_and_keys_can_be_resumed(tmp_path):
    """From jax 0.11 on, a 64-bit shape warns, and warnings are errors here."""

    def noisy(model, x, y, key):
        return ((model(x + jax.random.normal(key, x.shape)) - y[:, None]) ** 2).mean()

    trainer = Trainer(noisy, optax.sgd(0.1))
    batch = np.ones((4, 3)), np.arange(4), jax.random.key(0)
    state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(3, 1, rngs=rngs), 2, seed=0))
    trainer.fit(state, [batch] * 2, checkpoint_dir=tmp_path, progress=False)
    assert trainer.fit(state, [batch] * 3, checkpoint_dir=tmp_path, progress=False)[0].step == 3
