"""`DPSGD.fit`, `save` and `load`: budgets are kept, and a resumed run ends in the same bits."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import stat
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Trainer, export, load, save
from plurax.transforms._core.prng import is_key
from plurax.transforms._files.schema import decode
from plurax.transforms._runs import checkpoint_writer
from plurax.transforms._runs.processes import Group
from plurax.transforms._runs.run_directory import RunDirectory
from plurax.transforms.modules import save_params
from plurax.transforms.privacy import DPSGD
from plurax.transforms.privacy._dpsgd.accounting import Ledger

from ...._files import entries_of

N = 40
X = np.sin(np.arange(N * 4.0)).reshape(N, 4).astype(np.float32)
Y = np.arange(N) % 3
SIZES = (20,)  # one program
SETTINGS: dict[str, Any] = {
    "l2_clip_norm": 0.7,
    "noise_multiplier": 1.3,
    "target_delta": 1e-3,
    "num_examples": N,
    "expected_batch_size": 8.0,
    "num_steps": 12,
    "accountant": "rdp",
}


def loss(model: Any, x: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def network(rngs: nnx.Rngs) -> Any:
    return nnx.Sequential(nnx.Dropout(0.2, rngs=rngs), nnx.tanh, nnx.Linear(4, 3, rngs=rngs))


def make(**settings: Any) -> DPSGD:
    return DPSGD(settings.pop("loss", loss), settings.pop("optimizer", optax.adam(1e-2)), **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def dp() -> DPSGD:
    return make()


@pytest.fixture(scope="module")
def state(dp: DPSGD) -> Any:
    return dp.init(network(nnx.Rngs(0)), key=jax.random.key(1))


@pytest.fixture(autouse=True)
def ctrl_c_is_pythons() -> Iterator[None]:
    """Restore Python's handler: background jobs of a shell ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def fit(dp: DPSGD, state: Any, **options: Any) -> Any:
    return dp.fit(state, (X, Y), **{"progress": False, "sizes": SIZES, **options})


def assert_same(one: Any, other: Any) -> None:
    """Assert that two states are equal bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(*(jax.random.key_data(x) if key else x for x in (a, b)))


def test_the_helper_detects_differences(dp: DPSGD, state: Any) -> None:
    with pytest.raises(AssertionError):
        assert_same(state, dp.init(network(nnx.Rngs(0)), key=jax.random.key(2)))


def test_fit_takes_a_step_for_each_batch(dp: DPSGD, state: Any) -> None:
    fitted, history = fit(dp, state)
    by_hand, losses = state, []
    for batch in dp.batches((X, Y), state, sizes=SIZES):
        by_hand, metrics = dp.step(by_hand, batch)
        losses.append(float(metrics["loss"]))
    assert_same(fitted, by_hand)
    table = pd.DataFrame(history)
    assert set(table) == {"step", "loss", "clipped"}
    assert list(table.step) == list(range(1, 13))
    np.testing.assert_array_equal(table.loss, losses)
    assert {row["step"] for row in fit(dp, state, history_every=5)[1]} == {5, 10}


def test_fit_resumes_at_the_step_of_its_state(dp: DPSGD, state: Any) -> None:
    whole, _ = fit(dp, state)
    half, _ = fit(dp, state, steps=5)
    assert int(half.step) == 5
    assert_same(fit(dp, half)[0], whole)
    with pytest.warns(UserWarning, match=r"^DPSGD.fit: no step was taken, since the state has taken all 12 steps of t"):
        assert_same(fit(dp, whole)[0], whole)
    with pytest.warns(UserWarning, match=r"^DPSGD.fit: no step was taken, since steps=0"):
        assert_same(fit(dp, half, steps=0)[0], half)
    assert int(state.step) == 0


def test_a_state_beyond_the_run_is_unchanged(dp: DPSGD, state: Any) -> None:
    shorter = make(num_steps=4)
    after, _ = fit(dp, state, steps=6)
    with pytest.warns(UserWarning, match=r"^DPSGD.fit: no step was taken, since the state has taken all 6 steps"):
        assert_same(fit(shorter, after)[0], after)
    with pytest.raises(ValueError, match=r"^DPSGD.fit: the state has taken 6 steps, which are all of num_steps=4; use"):
        fit(shorter, after, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_a_budget_is_never_passed(together: bool, dp: DPSGD) -> None:
    ensemble = Ensemble.create(network, 2, seed=0)
    state = dp.init(ensemble, key=jax.random.key(1))
    models = 2 if together else 1
    spent = [dp.ledger.epsilon(steps, 1e-3, "rdp", models) for steps in range(13)]
    for budget in (spent[7], 0.999 * spent[8]):
        after, history = fit(dp, state, epsilon_budget=budget, together=together)
        assert int(after.step) == 7
        assert len(history) == 14
        assert np.max(dp.epsilon(after, together=together)) <= budget
        with pytest.warns(UserWarning, match=rf"^DPSGD.fit: no step was taken, since one would exceed .*={budget}"):
            assert_same(fit(dp, after, epsilon_budget=budget, together=together)[0], after)
    assert int(fit(dp, state, epsilon_budget=99.0, together=together)[0].step) == 12
    with pytest.raises(ValueError, match=r"^DPSGD.fit: 7 steps already spent more than epsilon_budget=0.1; pass"):
        fit(dp, after, epsilon_budget=0.1, together=together)


def test_progress_shows_what_is_spent(dp: DPSGD, state: Any, capsys: Any) -> None:
    fit(dp, state, progress=True)
    last = re.split(r"[\r\n]", capsys.readouterr().err.strip())[-1]
    assert "12/12" in last
    assert f"ε ≤ {np.ceil(1000 * dp.epsilon(12)) / 1000:.3f}" in last
    fit(dp, state, progress=True, epsilon_budget=dp.epsilon(7))
    printed = capsys.readouterr()
    shown = [float(found) for found in re.findall(r"ε ≤ (\d+\.\d+)", printed.err)]
    assert shown
    assert dp.epsilon(7) <= max(shown) <= dp.epsilon(7) + 1e-3
    assert f"Stopped after step 7: one more would exceed ε = {dp.epsilon(7)}." in printed.out + printed.err


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("members", [None, 2])
def test_interrupted_and_resumed_equals_uninterrupted_to_the_bit(tmp_path: Any, members: Any) -> None:
    model = network(nnx.Rngs(0)) if members is None else Ensemble.create(network, members, seed=0)
    dp = make(noise_strategy=[1.0, 0.5])
    state = dp.init(model, key=jax.random.key(1))
    whole, whole_history = fit(dp, state)

    batches = dp.batches

    def interrupted(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for number, batch in enumerate(batches(*args, **kwargs), 1):
            if number == 5:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    dp.batches = interrupted  # type: ignore[method-assign, assignment]  # Ctrl-C during a run
    half, _ = fit(dp, state, checkpoint_dir=tmp_path, checkpoint_every=3)
    assert int(half.step) == 5
    # Another process makes its own `DPSGD`, and a state with another key, as if it had drawn a secret one.
    again = make(noise_strategy=[1.0, 0.5])
    fresh = again.init(model, key=jax.random.key(2))
    after, history = fit(again, fresh, checkpoint_dir=tmp_path, checkpoint_every=3)
    assert_same(after, whole)
    assert history == whole_history
    assert_same(fit(again, fresh, checkpoint_dir=tmp_path)[0], whole)  # no step is left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000009", "step_00000012"]


def test_a_checkpoint_at_the_step_of_the_state_does_not_replace_it(tmp_path: Any, dp: DPSGD, state: Any) -> None:
    fit(dp, state, steps=2, checkpoint_dir=tmp_path)
    other, _ = fit(dp, dp.init(network(nnx.Rngs(5)), key=jax.random.key(5)), steps=2)
    options = {"steps": 1, "checkpoint_dir": tmp_path}
    with pytest.raises(ValueError, match=r"its state at step 2 has other weights and other optimizer states\. Use"):
        fit(dp, other, **options)
    assert_same(fit(dp, other, resume=True, **options)[0], fit(dp, other, steps=1)[0])


def other_loss(model: Any, x: Any, y: Any) -> Any:
    return loss(model, x, y) + 1e-4 * jnp.mean(x**2)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "weights": ({"seed": 1}, "its state at step 0 has other weights"),
    "weights and key": ({"seed": 1, "key": 2}, r"its state at step 0 has other weights\. Use another"),
    "loss": ({"loss": other_loss}, "its steps run another program"),
    "optimizer": ({"optimizer": optax.adam(2e-2)}, "its steps run another program"),
    "data": ({"data": (X, np.roll(Y, 1))}, "its batches have another data"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(name: str, tmp_path: Any, dp: DPSGD, capsys: Any) -> None:
    """The steps of one run are never returned as those of another, even if there are none left to take."""

    def run(
        seed: int = 0, key: int = 1, data: Any = (X, Y), steps: int = 2, resume: Any = "auto", **changed: Any
    ) -> Any:
        of = other if changed else dp
        state = of.init(network(nnx.Rngs(seed)), key=jax.random.key(key))
        options: dict[str, Any] = {"sizes": SIZES, "progress": False, "checkpoint_dir": tmp_path, "resume": resume}
        return of.fit(state, data, steps=steps, **options)

    changed, match = OTHERS[name]
    other = make(**{setting: changed[setting] for setting in ("loss", "optimizer") if setting in changed})
    run()
    for steps in (2, 3):
        with pytest.raises(ValueError, match=f"^DPSGD.fit: the checkpoint at .* is of another run: {match}"):
            run(steps=steps, **changed)
    assert capsys.readouterr().err == ""
    run(steps=3)
    assert f"DPSGD.fit: going on from step 2 in {tmp_path}." in capsys.readouterr().err
    run(steps=4, resume=True, **changed)
    assert f"going on from step 3 in {tmp_path}, although its " in capsys.readouterr().err
    run(steps=1, resume=False, **changed)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".earlier", ".earlier"]


def test_a_run_goes_on_with_the_key_of_its_checkpoint(tmp_path: Any, dp: DPSGD, state: Any, capsys: Any) -> None:
    """One line says so; it is said as often as another key is passed, and never of the same one."""
    whole, history = fit(dp, state)

    def run(key: int, steps: int, seed: int = 0) -> Any:
        return fit(dp, dp.init(network(nnx.Rngs(seed)), key=jax.random.key(key)), steps=steps, checkpoint_dir=tmp_path)

    taken = ", with the key of its checkpoint instead of that of `state`"
    for key, steps, said in ((1, 3, None), (7, 5, taken), (8, 5, taken), (1, 9, ""), (9, 12, taken)):
        before = max((int(path.name[5:]) for path in tmp_path.iterdir()), default=0)
        after, rows = run(key, steps)
        lines = [] if said is None else [f"DPSGD.fit: going on from step {before} in {tmp_path}{said}."]
        assert capsys.readouterr().err.splitlines() == lines
    assert_same(after, whole)
    assert rows == history
    with pytest.raises(ValueError, match="is of another run: its state at step 0 has other weights"):
        run(9, 12, seed=1)


def test_the_key_of_a_checkpoint_at_the_same_step_is_used(tmp_path: Any, dp: DPSGD, state: Any) -> None:
    half, _ = fit(dp, state, steps=4, checkpoint_dir=tmp_path)
    other = dp.init(network(nnx.Rngs(0)), key=jax.random.key(3))
    keys = {name: getattr(other, name) for name in ("noise_state", "mask_key", "seed")}
    after, _ = fit(dp, replace(half, **keys), checkpoint_dir=tmp_path)
    assert_same(after, fit(dp, state)[0])


@pytest.mark.parametrize("resumed", [False, True])
def test_only_the_owner_can_read_checkpoints(tmp_path: Any, dp: DPSGD, state: Any, resumed: bool) -> None:
    before = os.umask(0)
    try:
        for steps in (2, 4) if resumed else (4,):
            after, _ = fit(dp, state, steps=steps, checkpoint_dir=tmp_path / "run", checkpoint_keep=1)
        for _ in range(2):  # the second replaces the first
            dp.save(tmp_path / "saved", after)
    finally:
        os.umask(before)
    paths = [tmp_path / "saved", tmp_path / "run" / "step_00000004"]
    found = [file for path in paths for file in [path, *path.rglob("*")]]
    assert len(found) > 8
    assert {stat.S_IMODE(file.stat().st_mode) for file in found if file.is_file()} == {0o600}
    assert {stat.S_IMODE(file.stat().st_mode) for file in found if file.is_dir()} == {0o700}


def test_an_unfinished_checkpoint_is_closed_to_others_too(
    tmp_path: Any, dp: DPSGD, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, write = [], checkpoint_writer._write_rows

    def look(path: Any, *args: Any) -> Any:
        found = write(path, *args)
        seen.append(stat.S_IMODE(path.parents[2].stat().st_mode))
        return found

    monkeypatch.setattr(checkpoint_writer, "_write_rows", look)
    before = os.umask(0)
    try:
        dp.save(tmp_path / "saved", state)
    finally:
        os.umask(before)
    assert seen == [0o700]


@pytest.mark.parametrize("members", [None, 2])
def test_a_model_that_is_saved_or_exported_has_no_key(tmp_path: Any, dp: DPSGD, members: Any) -> None:
    """Nor has its random state any number of the secret ones, though its dropout drew masks from these."""
    words = np.frombuffer(np.random.default_rng(3).bytes(8), np.uint32)
    made = network(nnx.Rngs(0)) if members is None else Ensemble.create(network, members, seed=0)
    first = dp.init(made, key=jax.random.wrap_key_data(jnp.asarray(words)))
    state, _ = fit(dp, first, steps=3)
    secret = {"given": words, "mask": jax.random.key_data(state.mask_key), "seed": state.seed}
    for name, held in (("noise before", first), ("noise", state)):
        (secret[name],) = (jax.random.key_data(x) for x in jax.tree.leaves(held.noise_state) if is_key(x))
    ensemble = Ensemble.stack([state.model]) if members is None else state.model
    save_params(tmp_path / "params.safetensors", ensemble[0])
    save(tmp_path / "ensemble", ensemble)
    export(ensemble, tmp_path / "model.bin", X[:2], platforms=("cpu",), kind="classification")
    dp.save(tmp_path / "secret", state)

    def has(path: Any, number: Any) -> bool:
        rows = np.asarray(number).reshape(-1, np.shape(number)[-1])
        data = [file.read_bytes() for file in [path, *path.rglob("*")] if file.is_file()]
        return any(row.tobytes() in one for row in rows for one in data)

    for name, number in secret.items():
        if name not in ("given", "noise before"):
            assert has(tmp_path / "secret", number), name  # the search finds what is there
        for path in ("params.safetensors", "ensemble", "model.bin"):
            assert not has(tmp_path / path, number), (name, path)


def test_a_run_with_other_sizes_of_batches_goes_on(tmp_path: Any, dp: DPSGD, state: Any) -> None:
    fit(dp, state, steps=2, checkpoint_dir=tmp_path)
    assert int(fit(dp, state, steps=3, checkpoint_dir=tmp_path, sizes=(24,))[0].step) == 3


def test_a_disk_that_fails_ends_no_run(tmp_path: Any, dp: DPSGD, state: Any, monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("plurax.transforms._runs.checkpoint_writer._write_rows", fail)
        match = rf"^DPSGD.fit: the checkpoint of step 12 in {tmp_path} cannot be written: .*No space left on device"
        with pytest.warns(UserWarning, match=match) as warned:
            after, _ = fit(dp, state, checkpoint_dir=tmp_path)
    assert warned[0].filename == __file__
    assert_same(after, fit(dp, state)[0])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(OSError, match="^.*DPSGD.fit: a checkpoint after step 0 needs .*, but the disk has 100 B left"):
        fit(dp, state, checkpoint_dir=tmp_path)


def test_two_runs_do_not_share_a_directory(tmp_path: Any, dp: DPSGD, state: Any) -> None:
    match = f"^DPSGD.fit: a run of process {os.getpid()} on .* is writing to"
    other = RunDirectory.open("other", tmp_path, 2, Group.of(state), "auto", 0)
    with other, pytest.raises(BlockingIOError, match=match):
        fit(dp, state, checkpoint_dir=tmp_path)


def test_a_state_is_saved_and_loaded_bit_for_bit(tmp_path: Any, dp: DPSGD, state: Any) -> None:
    after, _ = fit(dp, state, steps=3)
    dp.save(tmp_path / "a", after)
    loaded = dp.load(tmp_path / "a", dp.init(network(nnx.Rngs(9)), key=jax.random.key(9)))
    assert_same(loaded, after)
    assert loaded.ledger == after.ledger
    assert dp.epsilon(loaded) == dp.epsilon(3)
    assert_same(fit(dp, loaded)[0], fit(dp, after)[0])
    dp.save(tmp_path / "a", loaded)
    assert not any(file.suffix in (".pkl", ".pickle") for file in tmp_path.rglob("*"))


def test_the_ledger_can_be_read_by_a_person(tmp_path: Any, dp: DPSGD, state: Any) -> None:
    dp.save(tmp_path / "a", state)
    about = entries_of(tmp_path / "a" / "plurax.json")["about"]
    assert about["step"] == 0
    assert about["ledger"] == {
        "noise_multiplier": 1.3,
        "sampling_probability": 0.2,
        "l2_clip_norm": 0.7,
        "expected_batch_size": 8.0,
        "strategy": [1.0],
        "clip_groups": 1,
        "adaptive": None,
        "sampling": "poisson",
        "separation": None,
        "truncation": None,
    }
    assert decode(Ledger, about["ledger"], "ledger") == dp.ledger
    of_groups = make(l2_clip_norm={"first": 0.7, "last": 0.7}).ledger
    assert decode(Ledger, json.loads(json.dumps(asdict(of_groups))), "ledger") == of_groups


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Any, dp: DPSGD, state: Any) -> None:
    fit(dp, state, steps=2, checkpoint_dir=tmp_path)
    other = make(noise_multiplier=2.0)
    like = other.init(network(nnx.Rngs(0)), key=jax.random.key(1))
    message = r"the checkpoint at .* was made with noise_multiplier=1.3, but this DPSGD has 2.0; use the same set"
    with pytest.raises(ValueError, match=f"^DPSGD.fit: {message}"):
        fit(other, like, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match=f"^DPSGD.load: {message}"):
        other.load(tmp_path / "step_00000002", like)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Any, dp: DPSGD, state: Any) -> None:
    dp.save(tmp_path / "a", state)
    like = dp.init(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"^DPSGD.load: the checkpoint at .* but `like` has .*; pass as `like`"):
        dp.load(tmp_path / "a", like)


@pytest.mark.smoke
def test_foreign_checkpoints_are_refused(tmp_path: Any, dp: DPSGD, state: Any) -> None:
    ensemble = Ensemble.create(network, 2, seed=0)
    trainer = Trainer(loss, optax.adam(1e-2))
    dp.save(tmp_path / "a", state)
    with pytest.raises(ValueError, match=r"^load: the checkpoint at .* holds private state, but no ensemble; read it"):
        load(tmp_path / "a", ensemble)
    fit(dp, state, steps=2, checkpoint_dir=tmp_path / "runs")
    with pytest.raises(ValueError, match=r"^Trainer.fit: another kind of run wrote .*; use another"):
        trainer.fit(trainer.init(ensemble), [(X, Y)], progress=False, checkpoint_dir=tmp_path / "runs")
    trainer.fit(trainer.init(ensemble), [(X, Y)], progress=False, checkpoint_dir=tmp_path / "others")
    with pytest.raises(
        ValueError, match=r"^DPSGD.fit: the checkpoint at .* holds ensemble, opt_state, standing, but no privat"
    ):
        fit(dp, state, checkpoint_dir=tmp_path / "others")


def test_a_damaged_checkpoint_is_skipped(tmp_path: Any, dp: DPSGD, state: Any) -> None:
    fit(dp, state, checkpoint_dir=tmp_path, checkpoint_every=6)
    manifest = tmp_path / "step_00000012" / "plurax.json"
    manifest.write_text(manifest.read_text().replace('"noise_multiplier": 1.3', '"noise_multiplier": 9.9'))
    with pytest.warns(UserWarning, match=r"plurax.json: its checksum does not match .* It is skipped") as warned:
        after, _ = fit(dp, state, checkpoint_dir=tmp_path)
    assert warned[0].filename == __file__  # the caller's line
    assert int(after.step) == 12
    assert_same(after, fit(dp, state)[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"steps": 13},
            ValueError,
            "step 13 is beyond num_steps=12; pass fewer steps.",
        ),
        ({"steps": 1.5}, TypeError, "steps must be an int or None, but got 1.5 of type float."),
        ({"steps": -1}, ValueError, "steps must be at least 0, but got -1."),
        ({"history_every": 0}, ValueError, "history_every must be at least 1, but got 0."),
        ({"checkpoint_keep": 0}, ValueError, "checkpoint_keep must be at least 1, but got 0."),
        ({"checkpoint_every": 2}, ValueError, "checkpoint_every needs a checkpoint_dir to write to; pass one."),
        ({"epsilon_budget": 0.0}, ValueError, "epsilon_budget must be positive, but got 0.0."),
        ({"epsilon_budget": "8"}, TypeError, "epsilon_budget must be a number, but got '8' of type str."),
    ],
)
def test_invalid_options_are_refused(dp: DPSGD, state: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match="^DPSGD(.fit)?: " + re.escape(message)):
        fit(dp, state, **options)


def test_a_checkpoint_beyond_the_requested_steps_is_refused(tmp_path: Any, dp: DPSGD, state: Any) -> None:
    fit(dp, state, steps=4, checkpoint_dir=tmp_path)
    with pytest.raises(
        ValueError, match=r"^DPSGD.fit: the newest checkpoint in .* is at step 4, after step 2; pass more"
    ):
        fit(dp, state, steps=2, checkpoint_dir=tmp_path)
