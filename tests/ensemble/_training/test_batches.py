"""Batches drawn by a key from one copy of the data."""

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

from plurax.ensemble import Batches, EarlyStopping, Ensemble, Trainer
from plurax.ensemble._training._data import batches as batches_module
from plurax.ensemble._training._data.batches import shuffled


class LikeATensor:
    """An array of another library, with what tensors of PyTorch have in common with arrays."""

    def __init__(self, array):
        self._array = np.asarray(array)

    @property
    def shape(self):
        return self._array.shape

    @property
    def dtype(self):
        return f"torch.{self._array.dtype}"

    def __len__(self):
        return len(self._array)

    def __getitem__(self, index):
        return LikeATensor(self._array[index])

    def __array__(self, dtype=None, copy=None):
        return self._array.astype(dtype or self._array.dtype)


KEY = jax.random.key(7)
DATA: dict[str, np.ndarray] = {"x": np.arange(46.0, dtype=np.float32).reshape(23, 2), "y": np.arange(23)}


def test_shared_epochs_show_each_example_once():
    batches = Batches(DATA, 5, key=KEY, epochs=3)
    found = list(batches)
    assert len(found) == len(batches) == 12
    assert found[0]["x"].shape == (5, 2)
    epochs = [np.concatenate([b["y"] for b in found[4 * e : 4 * e + 4]]) for e in range(3)]
    for seen in epochs:
        assert len(set(seen.tolist())) == 20
    assert not np.array_equal(epochs[0], epochs[1])
    assert len(set(np.concatenate(epochs).tolist())) == 23
    np.testing.assert_array_equal(found[3]["x"][:, 0], 2 * found[3]["y"])
    for one, again in zip(found, batches, strict=True):  # from the start
        np.testing.assert_array_equal(one["y"], again["y"])


def mapped(path, x):
    np.save(path, x)
    return np.load(path, mmap_mode="r")


@pytest.mark.parametrize("options", [{}, {"members": 3}, {"members": 2, "draw": "bootstrap"}], ids=str)
def test_memory_mapped_arrays_give_the_same_batches(tmp_path, assert_same, options):
    wide = np.arange(23.0 * 6).reshape(23, 2, 3)  # float64, which becomes float32
    data = {**DATA, "wide": wide, "view": wide[::-1, 1], "labels": DATA["y"].astype(np.int8)}
    on_disk = mapped(tmp_path / "wide.npy", wide)
    kept = {
        **DATA,
        "wide": on_disk,
        "view": np.asarray(on_disk)[::-1, 1],
        "labels": mapped(tmp_path / "l.npy", data["labels"]),
    }
    batches = Batches(kept, 5, key=KEY, epochs=2, **options)
    expected = list(Batches(data, 5, key=KEY, epochs=2, **options))
    for mine, theirs in zip(batches, expected, strict=True):
        assert_same(mine, theirs)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(mine))
    resumed = iter(batches)
    resumed.skip(3)
    assert_same(next(resumed), expected[3])
    assert_same(next(iter(Batches(on_disk, 5, key=KEY, **options))), next(iter(Batches(wide, 5, key=KEY, **options))))


def test_a_selection_of_a_memory_mapped_array_is_copied(tmp_path):
    x = mapped(tmp_path / "x.npy", DATA["x"])[np.arange(23)]
    batches = Batches(x, 23, key=KEY, epochs=1)
    x[:] = -1
    assert float(next(iter(batches)).min()) == 0


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux counts the memory of a process")
def test_memory_mapped_arrays_stay_on_the_disk(tmp_path):
    script = """
import sys, jax, numpy as np
from plurax.ensemble import Batches

def megabytes():  # without the pages of files
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) / 1000

def of(data):
    return iter(Batches(data, 100, key=jax.random.key(0), members=2))

data = np.load(sys.argv[1], mmap_mode="r")
next(of(data[:1000]))  # compiles
before, batches = megabytes(), of(data)
for _ in range(20):
    next(batches)
used = megabytes() - before
copy = np.array(data)
print(used, megabytes() - before - used)
"""
    path = tmp_path / "data.npy"
    np.save(path, np.ones((50000, 1000), np.float32))
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=120, check=True)
    used, copied = map(float, done.stdout.split())
    assert copied > 150, "the measurement should notice a copy of the 200 MB"
    assert used < 60


def test_a_half_precision_fraction_uses_the_exact_count():
    drawn = Batches(np.arange(100_001), 4, key=KEY, members=1, draw="subset", fraction=np.float16(0.5)).indices
    assert drawn is not None
    assert drawn.shape == (1, 50_000)


@pytest.mark.parametrize(
    ("draw", "fraction"), [("all", 1.0), ("bootstrap", 1.0), ("bootstrap", 1.7), ("subset", np.float32(0.6))]
)
def test_members_have_their_own_examples_and_orders(draw, fraction):
    batches = Batches(DATA, 4, key=KEY, members=3, draw=draw, fraction=fraction, epochs=2)
    found = list(batches)
    assert found[0]["x"].shape == (3, 4, 2)
    count = 23 if draw == "all" else round(23 * fraction)
    assert len(found) == 2 * (count // 4)
    for i in range(3):
        mine = np.arange(23) if batches.indices is None else np.asarray(batches.indices[i])
        assert len(mine) == count
        if draw == "subset":
            assert len(set(mine.tolist())) == count
        for epoch in range(2):
            seen = np.concatenate([b["y"][i] for b in found[epoch * (count // 4) :][: count // 4]])
            # As often as the member holds each example, except for the remainder.
            left = np.bincount(mine, minlength=23) - np.bincount(seen, minlength=23)
            assert left.min() >= 0
            assert left.sum() == count % 4
    assert not np.array_equal(found[0]["y"][0], found[0]["y"][1])


def test_the_examples_of_a_member_do_not_depend_on_the_number_of_members():
    for draw in ("all", "bootstrap", "subset"):
        few, many = (next(iter(Batches(DATA, 4, key=KEY, members=n, draw=draw, fraction=1.0))) for n in (2, 5))
        np.testing.assert_array_equal(few["y"], many["y"][:2])


def test_bootstraps_draw_uniformly():
    batches = Batches(np.zeros(50), 1, key=KEY, members=400, draw="bootstrap")
    counts = np.bincount(np.ravel(batches.indices), minlength=50)
    assert np.abs(counts - 400).max() < 6 * np.sqrt(400)
    distinct = np.mean([len(np.unique(row)) / 50 for row in np.asarray(batches.indices)])
    assert abs(distinct - (1 - (1 - 1 / 50) ** 50)) < 0.01  # 0.636


def test_batches_that_are_skipped_are_not_made(monkeypatch):
    batches = Batches(DATA, 5, key=KEY, members=2, epochs=4)
    expected = list(batches)[9:]
    made, gathered = [], batches._gathered

    def counted(*args):
        made.append(args)
        return gathered(*args)

    monkeypatch.setattr(batches, "_gathered", counted)
    iterator = iter(batches)
    assert iterator.skip(9) == 9
    assert not made
    for one, other in zip(iterator, expected, strict=True):
        np.testing.assert_array_equal(one["y"], other["y"])
    assert iterator.skip(3) == 0


@pytest.mark.parametrize("bytes_at_once", [1, 200, 2**20])
@pytest.mark.parametrize("members", [None, 3])
def test_batches_do_not_depend_on_how_many_are_gathered_together(monkeypatch, members, bytes_at_once):
    """Nor on where an iterator starts, nor on the ends of epochs of seven batches."""
    monkeypatch.setattr(batches_module, "_BYTES", bytes_at_once)
    batches = Batches({"x": np.arange(46.0).reshape(23, 2)}, 3, key=KEY, members=members, epochs=3)
    assert batches.per_epoch == 7
    expected = [
        np.take(np.arange(46.0).reshape(23, 2), np.asarray(batches.order(epoch))[..., 3 * i : 3 * i + 3], axis=0)
        for epoch in range(3)
        for i in range(7)
    ]
    for start in (0, 1, 6, 8, 20):
        iterator = iter(batches)
        assert iterator.skip(start) == start
        found = [batch["x"] for batch in iterator]
        assert len(found) == 21 - start
        for one, other in zip(found, expected[start:], strict=True):
            np.testing.assert_array_equal(one, other)
    iterator = iter(batches)
    first = [next(iterator)["x"] for _ in range(2)]
    assert iterator.skip(7) == 7
    np.testing.assert_array_equal([*first, next(iterator)["x"]], [expected[0], expected[1], expected[9]])


@pytest.mark.parametrize("count", [2, 3, 7, 8, 15, 21])
@pytest.mark.parametrize("members", [None, 3])
@pytest.mark.parametrize("on_disk", [False, True])
def test_several_batches_are_gathered_as_one(tmp_path, monkeypatch, members, count, on_disk):
    """Across the ends of epochs of seven batches, also after single ones, by one call."""
    x = np.arange(46.0, dtype=np.float32).reshape(23, 2)
    data = {"x": mapped(tmp_path / "x.npy", x) if on_disk else x, "y": np.arange(23)}
    batches = Batches(data, 3, key=KEY, members=members, epochs=3)
    expected, calls, gathered = list(batches), [], batches._gathered

    def counted(*args):
        calls.append(args)
        return gathered(*args)

    monkeypatch.setattr(batches, "_gathered", counted)
    for start in (0, 1, 6, 13):
        iterator = iter(batches)
        assert iterator.skip(start // 2) == start // 2
        for _ in range(start - start // 2):
            next(iterator)
        calls.clear()
        first = start
        while (found := iterator._stacked(count)) is not None:
            for i, one in enumerate(expected[start : start + count]):
                for name in data:
                    np.testing.assert_array_equal(found[name][i], one[name])
                    assert found[name].dtype == one[name].dtype
            start += count
        assert 21 - start < count
        assert len(calls) == (start - first) // count
        for batch, one in zip(iterator, expected[start:], strict=True):
            np.testing.assert_array_equal(batch["y"], one["y"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "impl"), [*((n, "threefry2x32") for n in (1, 2, 3, 100, 1625, 1626)), (3, "rbg"), (5000, "rbg")]
)
def test_orders_are_the_permutations_of_jax(count, impl):
    key = jax.random.key(count, impl=impl)
    expected = jax.random.permutation(key, count)
    for found in (shuffled(key, count), jax.jit(shuffled, static_argnums=1)(key, count)):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == jnp.int32
    with jax.enable_x64(True):
        np.testing.assert_array_equal(shuffled(key, count), expected)
    several = jax.random.split(key, 3)
    np.testing.assert_array_equal(
        jax.lax.map(lambda one: shuffled(one, count), several),
        jax.lax.map(lambda one: jax.random.permutation(one, count), several),
    )


def test_the_data_is_stored_once():
    data = jnp.asarray(DATA["x"])
    batches = Batches(data, 5, key=KEY, members=4, draw="bootstrap")
    assert batches._data is data


@pytest.mark.smoke
def test_members_train_on_their_own_batches_and_resume(tmp_path, assert_same):
    trainer = Trainer(
        lambda model, b: jnp.mean((model(b["x"])[:, 0] - b["y"]) ** 2), optax.adam(0.01), in_axes=0, strategy="vmap"
    )
    start = trainer.init(of_shared_batches()[1].ensemble)
    batches = Batches(DATA, 5, key=KEY, members=3, draw="bootstrap", epochs=3)
    whole, _ = trainer.fit(start, batches, progress=False)
    trainer.fit(start, batches, steps=7, progress=False, checkpoint_dir=tmp_path)
    again, _ = trainer.fit(start, batches, progress=False, checkpoint_dir=tmp_path)
    assert_same(again, whole)


def loss_of_dict(model, b):
    return jnp.mean((model(b["x"])[..., 0] - b["y"]) ** 2)


SGD = optax.sgd(0.01)


def linear(rngs):
    return nnx.Linear(2, 1, rngs=rngs)


@functools.cache
def of_shared_batches():
    """Return a trainer, and the state before the first step, which is the same for any `in_axes`."""
    trainer = Trainer(loss_of_dict, SGD, strategy="vmap")
    return trainer, trainer.init(Ensemble.create(linear, 3, seed=0))


def a_trainer(**options):
    """Return a trainer of a loss of one dict, with its state of three members."""
    trainer, state = of_shared_batches()
    return (Trainer(loss_of_dict, SGD, strategy="vmap", **options) if options else trainer), state


@pytest.mark.parametrize("wrap", [lambda batches: batches, iter])
@pytest.mark.parametrize(
    ("members", "in_axes", "message"),
    [
        (3, None, r"the Batches have members=3, but the trainer has in_axes=None, so every member .*; pass in_axes=0"),
        (
            3,
            (None,),
            r"the Batches have members=3, but the trainer has in_axes=\(None,\), so every memb",
        ),
        (
            3,
            ({"x": 0, "y": None},),
            r"the Batches have members=3, but the trainer has in_axes=\({'x': 0, 'y': None}",
        ),
        (2, 0, "the Batches have members=2, but the ensemble has 3"),
        (2, None, "the Batches have members=2, but the ensemble has 3"),
        (None, 0, r"the trainer has in_axes=0, but the Batches are shared by all members; pass members=3"),
        (None, ({"x": 0, "y": None},), r"the trainer has in_axes=\(.*\), but the Batches are shared by all members"),
    ],
)
def test_batches_for_other_members_are_refused(wrap, members, in_axes, message):
    trainer, state = a_trainer(in_axes=in_axes)
    # As many examples as members: without the check, the shapes would fit.
    batches = Batches(DATA, 3, key=KEY, members=members, epochs=1)
    with pytest.raises(ValueError, match=f"^Trainer.fit: {message}"):
        trainer.fit(state, wrap(batches), progress=False)


@pytest.mark.parametrize("in_axes", [0, (0,), [0], ({"x": 0, "y": 0},)])
def test_batches_of_dicts_train_each_member_on_its_own(in_axes, assert_same):
    trainer, state = a_trainer(in_axes=in_axes)
    batches = Batches(DATA, 4, key=KEY, members=3, epochs=1)
    after, _ = trainer.fit(state, batches, progress=False)
    alone, start = a_trainer()
    for i in range(3):
        own = [jax.tree.map(lambda x, i=i: x[i], batch) for batch in batches]
        assert_same(after.ensemble[i], alone.fit(start, own, progress=False)[0].ensemble[i], tolerance=1e-6)


def test_endless_batches_need_steps_or_epochs():
    trainer, state = a_trainer()
    for batches in (Batches(DATA, 4, key=KEY), iter(Batches(DATA, 4, key=KEY))):
        with pytest.raises(ValueError, match="the Batches never end; pass steps= or epochs= to fit, or"):
            trainer.fit(state, batches, progress=False)
        assert int(trainer.fit(state, batches, steps=2, progress=False)[0].step) == 2
    assert int(trainer.fit(state, Batches(DATA, 4, key=KEY, epochs=1), progress=False)[0].step) == 5
    # Early stopping ends a run too.
    stopping = EarlyStopping(evaluate=lambda ensemble: jnp.zeros(len(ensemble)), every=1, patience=1)
    after, _ = trainer.fit(state, Batches(DATA, 4, key=KEY), early_stopping=stopping, progress=False)
    assert int(after.step) == 2


@pytest.mark.parametrize(
    "data",
    [
        (DATA["x"], DATA["y"]),
        (DATA["x"], DATA["y"][:5]),
        (jnp.ones((4, 2)),),
        ({"x": DATA["x"]}, DATA["y"]),
        DATA,
        DATA["x"],
        jnp.ones((4, 2)),
        (LikeATensor(DATA["x"]), LikeATensor(DATA["y"])),
        LikeATensor(DATA["x"]),
    ],
)
def test_a_data_set_is_not_batches(data):
    trainer, state = a_trainer()
    with pytest.raises(TypeError, match=r"^Trainer.fit: batches must be an iterable of batches, but got data, "):
        trainer.fit(state, data, progress=False)


def test_containers_of_batches_are_batches(assert_same):
    trainer, state = a_trainer()
    batch = jax.tree.map(lambda x: x[:4], DATA)
    expected, _ = trainer.fit(state, [batch] * 2, progress=False)
    for batches in ((batch, batch), ((batch,), (batch,)), iter([batch, [batch]]), (b for b in [batch] * 2)):
        assert_same(trainer.fit(state, batches, progress=False)[0], expected)


def test_arrays_of_other_libraries_are_converted(assert_same):
    trainer, state = a_trainer()
    tensors = jax.tree.map(LikeATensor, DATA)
    for one, other in zip(Batches(tensors, 5, key=KEY, epochs=1), Batches(DATA, 5, key=KEY, epochs=1), strict=True):
        assert_same(one, other)
    expected, metrics = trainer.step(state, DATA)
    after, found = trainer.step(state, tensors)
    assert_same((after, found), (expected, metrics))
    # As a DataLoader of PyTorch with its default collation: a list of tensors.
    pairs = Trainer(lambda model, x, y: jnp.mean((model(x)[..., 0] - y) ** 2), optax.sgd(0.01), strategy="vmap")
    start = pairs.init(state.ensemble)
    loaded = [[LikeATensor(DATA["x"]), LikeATensor(DATA["y"])]] * 2
    plain = [(DATA["x"], DATA["y"])] * 2
    assert_same(pairs.fit(start, loaded, progress=False)[0], pairs.fit(start, plain, progress=False)[0])


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("seven", "'seven' of type str"),
        (np.array(["a", "b"]), r"an array of shape \(2,\) and dtype <U1"),
        (np.array([None, 1]), r"an array of shape \(2,\) and dtype object"),
        (np.array(["2026-01-01"], "datetime64[D]"), r"an array of shape \(1,\) and dtype datetime64\[D\]"),
        ({1, 2}, "{1, 2} of type set"),
    ],
)
def test_a_batch_of_something_else_is_refused_with_its_place(name, described):
    trainer, state = a_trainer()
    message = r"`batch\['name'\]` is " + described + ", not a number or an array of numbers; convert it, or leave"
    for api, take in {
        "step": lambda batch: trainer.step(state, batch),
        "fit": lambda batch: trainer.fit(state, [batch], progress=False),
    }.items():
        with pytest.raises(TypeError, match=f"^Trainer.{api}: {message}"):
            take({**DATA, "name": name})
        with pytest.raises(TypeError, match=rf"^Trainer.{api}: `batch\[1\]\['name'\]` is "):
            take((DATA, {"name": name}))


def test_numbers_and_none_in_a_batch_reach_the_loss():
    seen = []

    def loss(model, x, weight, nothing, flag):
        seen.append(nothing)
        return jnp.where(flag, weight, 0.0) * model(x).mean()

    trainer = Trainer(loss, optax.sgd(0.1), strategy="vmap")
    state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(2, 1, rngs=rngs), 2, seed=0))
    _, metrics = trainer.step(state, (DATA["x"], 2.0, None, True))
    _, numpys = trainer.step(state, (DATA["x"], np.float32(2.0), None, np.True_))
    np.testing.assert_array_equal(metrics["loss"], numpys["loss"])
    assert set(seen) == {None}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, but got 0"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an int, but got"),
        ({"batch_size": 24}, ValueError, "batch_size is 24, but there are only 23 examples; make it smaller"),
        ({"members": 0}, ValueError, "members must be at least 1, but got 0"),
        ({"epochs": -1}, ValueError, "epochs must be at least 1, but got -1"),
        ({"key": 0}, TypeError, r"key must be one key, such as jax.random.key\(0\), but got"),
        ({"draw": "some"}, ValueError, "draw must be one of 'all', 'bootstrap', 'subset', but got 'some'"),
        ({"draw": "bootstrap"}, ValueError, "is for each member; pass the number of members as members="),
        ({"draw": "subset", "members": 2, "fraction": 1.5}, ValueError, "a subset has at most all examples"),
        ({"members": 2, "fraction": 0.5}, ValueError, 'fraction=0.5 needs draw="bootstrap" or "subset"'),
        ({"fraction": 0}, ValueError, "fraction must be finite and above 0, but got 0"),
        ({"fraction": float("inf")}, ValueError, "fraction must be finite and above 0, but got inf"),
        ({"data": 3}, TypeError, "`data` is 3 of type int, not an array with the examples along axis 0; pass one"),
        ({"data": ()}, ValueError, "data has no arrays, so there are no examples"),
        (
            {"data": {"x": np.zeros((3, 1)), "y": np.zeros(2)}},
            ValueError,
            r"`data\['x'\]` has 3 .* `data\['y'\]`",
        ),
        (
            {"data": (np.zeros(3), np.array(["a"] * 3))},
            TypeError,
            r"`data\[1\]` is an array .* <U1, not a number",
        ),
        ({"data": (np.zeros(2), [0.0, 1.0])}, TypeError, r"`data\[1\]\[0\]` is 0.0 of type float, not an array with"),
    ],
)
def test_refusals(options, error, message):
    arguments = {"data": DATA, "batch_size": 2, "key": KEY, **options}
    with pytest.raises(error, match=message):
        Batches(arguments.pop("data"), arguments.pop("batch_size"), **arguments)
    with pytest.raises(TypeError, match="without epochs= the batches never end"):
        len(Batches(DATA, 2, key=KEY))


class Looped:
    """A data loader that can be iterated again, with or without a length."""

    def __init__(self, batches, sized):
        self.batches, self.passes = batches, 0
        if sized:
            self.__class__ = type("Sized", (Looped,), {"__len__": lambda self: len(self.batches)})

    def __iter__(self):
        self.passes += 1
        return iter(self.batches)


@pytest.fixture(scope="module")
def trainer(cross_entropy):
    return Trainer(cross_entropy, optax.adam(0.01), strategy="vmap")


@pytest.fixture
def ens(plain, create):
    return create(plain, 2)


class Test_epochs:
    @pytest.mark.parametrize("kind", ["list", "tuple", "sized", "unsized"])
    def test_batches_are_iterated_again(self, trainer, ens, make_batches, assert_same, kind):
        batches = make_batches(4)
        kinds = {"list": batches, "tuple": tuple(batches), "sized": Looped(batches, True)}
        source = kinds.get(kind, Looped(batches, False))
        state, history = trainer.fit(trainer.init(ens), source, epochs=3, progress=False)
        expected, rows = trainer.fit(trainer.init(ens), batches * 3, progress=False)
        assert_same(state, expected)
        assert history == rows
        assert int(state.step) == 12

    @pytest.mark.parametrize("members", [None, 2])
    def test_batches_of_ours(self, cross_entropy, ens, make_batches, assert_same, members):
        trainer = Trainer(cross_entropy, optax.adam(0.01), strategy="vmap", in_axes=None if members is None else 0)
        data, options = make_batches(1, batch=23)[0], {"key": jax.random.key(1), "members": members}
        state, _ = trainer.fit(trainer.init(ens), Batches(data, 5, **options), epochs=3, progress=False)
        expected, _ = trainer.fit(trainer.init(ens), Batches(data, 5, epochs=3, **options), progress=False)
        assert_same(state, expected)
        assert int(state.step) == 12

    def test_count_from_the_state(self, trainer, ens, make_batches):
        state, _ = trainer.fit(trainer.init(ens), make_batches(3), progress=False)
        state, _ = trainer.fit(state, make_batches(4), epochs=2, progress=False)
        assert int(state.step) == 11

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["list", "unsized", "ours"])
    @pytest.mark.parametrize("cut", [2, 4, 7])
    def test_a_run_resumes_within_any_epoch(self, tmp_path, trainer, ens, make_batches, assert_same, kind, cut):
        batches, data = make_batches(4), make_batches(1, batch=23)[0]

        def fit(**options):
            kinds = {"list": batches, "ours": Batches(data, 5, key=jax.random.key(1))}
            source = kinds[kind] if kind in kinds else Looped(batches, False)
            return trainer.fit(trainer.init(ens), source, epochs=3, progress=False, **options)

        class Stopped(Exception):
            pass

        def stop(step, metrics):
            if step == cut:
                raise Stopped

        expected, rows = fit()
        options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
        with pytest.raises(Stopped):
            fit(callbacks=[stop], **options)
        state, history = fit(**options)
        assert_same(state, expected)
        assert history == rows

    @pytest.mark.parametrize(
        ("kind", "shown"), [*((x, "12/12") for x in ("list", "sized", "ours")), ("unsized", "12step")]
    )
    def test_the_bar_shows_the_total_if_it_is_known(self, trainer, ens, make_batches, capsys, kind, shown):
        batches, data = make_batches(4), make_batches(1, batch=23)[0]
        kinds = {"list": batches, "sized": Looped(batches, True), "unsized": Looped(batches, False)}
        source = kinds.get(kind, Batches(data, 5, key=jax.random.key(1)))
        trainer.fit(trainer.init(ens), source, epochs=3)
        assert shown in capsys.readouterr().err

    def test_validates_once_in_an_epoch(self, trainer, ens, make_batches):
        batches, batch = make_batches(4), make_batches(1)[0]
        state, history = trainer.fit(trainer.init(ens), batches, epochs=3, validation=batch, progress=False)
        assert [row["step"] for row in history if "validation_loss" in row][::2] == [4, 8, 12]
        # At the end of each, also if the first begins at another step than a multiple of its length.
        state, _ = trainer.fit(trainer.init(ens), batches, steps=3, progress=False)
        for steps_per_call in (1, 4):
            options = {"epochs": 2, "validation": batch, "progress": False, "steps_per_call": steps_per_call}
            _, history = trainer.fit(state, batches, **options)
            assert [row["step"] for row in history if "validation_loss" in row][::2] == [7, 11]
        _, history = trainer.fit(state, batches, epochs=2, validation=batch, validate_every=4, progress=False)
        assert [row["step"] for row in history if "validation_loss" in row][::2] == [4, 8]

    def test_validates_in_epochs_that_resume(self, tmp_path, trainer, ens, make_batches):
        batches, batch = make_batches(4), make_batches(1)[0]
        start, _ = trainer.fit(trainer.init(ens), batches, steps=3, progress=False)

        def fit(**options):
            stopping = EarlyStopping(evaluate="loss", patience=9)
            options |= {"validation": batch, "early_stopping": stopping, "progress": False}
            return trainer.fit(start, batches, epochs=3, **options)

        class Stopped(Exception):
            pass

        def stop(step, metrics):
            if step == 9:
                raise Stopped

        with pytest.raises(Stopped):
            fit(checkpoint_dir=tmp_path, checkpoint_every=2, callbacks=[stop])
        _, history = fit(checkpoint_dir=tmp_path, checkpoint_every=2)
        assert history == fit()[1]
        assert [row["step"] for row in history if "validation_loss" in row][::2] == [7, 11, 15]

    def test_an_empty_list_is_no_step(self, trainer, ens):
        with pytest.warns(UserWarning, match="no step was taken, since there are no batches"):
            trainer.fit(trainer.init(ens), [], epochs=2, progress=False)

    def test_refusals(self, trainer, ens, make_batches):
        state, batches = trainer.init(ens), make_batches(2)
        ours = Batches(make_batches(1, batch=23)[0], 5, key=jax.random.key(1), epochs=2)

        class Once:
            def __init__(self):
                self.rest = iter(batches)

            def __iter__(self):
                return self.rest

        for source, options, error, message in (
            (batches, {"steps": 3}, ValueError, "got steps=3 and epochs=2; pass one of them"),
            (ours, {}, ValueError, "epochs=2 is given, but the Batches have epochs=2 themselves"),
            (iter(batches), {}, TypeError, "epochs=2 needs batches that can be iterated again; pass what it iterates"),
            ((x for x in batches), {}, TypeError, "can be iterated again"),
            (iter(ours), {}, TypeError, "can be iterated again"),
            (Once(), {}, ValueError, "epoch 2 has no batches; pass batches that can be iterated 2 times"),
            (5, {}, TypeError, "batches must be an iterable of batches, but got 5"),
            (batches[0], {}, TypeError, "batches must be an iterable of batches, but got data"),
        ):
            with pytest.raises(error, match=message):
                trainer.fit(state, source, epochs=2, progress=False, **options)
        for wrong, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
            with pytest.raises(error, match=r"Trainer\.fit: epochs must be"):
                trainer.fit(state, batches, epochs=wrong, progress=False)
        endless = Looped(batches, False)
        with pytest.raises(ValueError, match="validate_every is needed .* for batches without a length"):
            trainer.fit(state, endless, epochs=2, validation=batches[0], progress=False)


def test_a_dataset_of_pytorch_is_refused(create, plain, cross_entropy):
    """Python would iterate over its single examples. PyTorch is not needed for the class of that name."""
    base = type("Dataset", (), {"__module__": "torch.utils.data.dataset", "__getitem__": lambda self, i: DATA["x"][i]})
    trainer = Trainer(cross_entropy, optax.sgd(0.1))
    with pytest.raises(TypeError, match="got a Images, a data set that yields single examples; pass a DataLoader"):
        trainer.fit(trainer.init(create(plain, 2)), type("Images", (base,), {})(), progress=False)
