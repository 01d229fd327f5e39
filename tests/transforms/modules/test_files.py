"""Parameters in files: everything a network computes with is restored bit for bit, and nothing is dropped silently."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from plurax.ensemble import Ensemble
from plurax.transforms.modules import freeze, load_params, named_parameters, save_params

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


class Net(nnx.Module):
    """Parameters, statistics, random streams, a cache, a shared kernel, and arrays of many kinds."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)])
        self.norm, self.dropout = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.layers[1].kernel
        self.tree = nnx.Param({"w": jnp.full((2, 3), seed), "b": [jnp.full(3, 0.5 * seed, jnp.bfloat16)]})
        self.count, self.mask = nnx.Variable(jnp.asarray(seed)), nnx.Variable(jnp.asarray([seed > 0, False]))
        self.plain, self.number = nnx.data(jnp.full((2,), seed, jnp.float16)), nnx.Param(float(seed))
        self.empty = nnx.Param(jnp.zeros((0, 3)))
        self.complex = nnx.Param(jnp.asarray([seed + 1j]))
        self.cache, self.key = nnx.Cache(jnp.full(2, seed)), nnx.Variable(jax.random.key(seed))

    def __call__(self, x: Any) -> Any:
        x = self.dropout(self.norm(self.layers[1](nnx.relu(self.layers[0](x)))))
        self.seen = nnx.Intermediate(x)
        return x @ self.tied


def contents(model: Any) -> dict[str, np.ndarray]:
    """Return all arrays of a module, keys as their data."""
    found = {}
    for path, x in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model))):
        is_key = hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(x) if is_key else jnp.asarray(x)
        found[jax.tree_util.keystr(path, simple=True, separator=".")] = np.array(data)
    return found


def linear(seed: int = 0, **options: Any) -> Any:
    return nnx.Linear(4, 3, rngs=nnx.Rngs(seed), **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "model.safetensors"


@pytest.fixture
def saved(path: Path) -> Path:
    """A file with a kernel of shape (4, 3) and a bias of shape (3,)."""
    save_params(path, linear())
    return path


class TestBackAndForth:
    """The contents of a file, and round trips."""

    def test_everything_a_network_computes_with_is_restored(self, path: Path) -> None:
        trained, other = Net(3), Net(0)
        trained(X)
        save_params(path, trained)
        before = contents(other)
        found = load_params(path, other)
        left = {"cache", "key", "dropout.rngs.key", "dropout.rngs.count", "seen"}
        after, expected = contents(found), contents(trained)
        for name in expected.keys() - left:
            assert after[name].dtype == expected[name].dtype
            assert after[name].shape == expected[name].shape
            assert after[name].tobytes() == expected[name].tobytes()
        for name in left & before.keys():
            np.testing.assert_array_equal(after[name], before[name])
        assert safetensors.numpy.load_file(path).keys() == expected.keys() - left
        assert found.tied is found.layers[1].kernel
        for name, x in contents(other).items():
            np.testing.assert_array_equal(x, before[name])
        evaluated = (nnx.view(model, deterministic=True, use_running_average=True)(X) for model in (found, trained))
        np.testing.assert_array_equal(*evaluated)

    @pytest.mark.parametrize("change", [lambda m: m, lambda m: freeze(m, "layers.0"), lambda m: freeze(m, True)])
    def test_frozen_parameters_keep_their_names(self, path: Path, change: Any) -> None:
        save_params(path, change(Net(1)))
        for like in (Net(0), freeze(Net(0), ["tied", "tree"])):
            found = load_params(path, like)
            assert nnx.graphdef(found) == nnx.graphdef(like)
            np.testing.assert_array_equal(found.layers[0].kernel[...], Net(1).layers[0].kernel[...])

    def test_modules_without_arrays(self, path: Path) -> None:
        save_params(path, nnx.Dropout(0.5))
        assert isinstance(load_params(path, nnx.Dropout(0.5)), nnx.Dropout)

    def test_shapes_suffice(self, saved: Path) -> None:
        found = load_params(saved, nnx.eval_shape(linear))
        np.testing.assert_array_equal(found(X), linear()(X))

    def test_arrays_are_placed_as_those_they_replace(self, saved: Path) -> None:
        device = jax.devices()[0]
        like = linear(1)
        like.kernel[...] = jax.device_put(like.kernel[...], device)
        found = load_params(saved, like)
        assert (found.kernel[...].committed, found.bias[...].committed) == (True, False)
        assert found.kernel[...].sharding == like.kernel[...].sharding

    def test_arrays_of_any_memory_order_are_written_correctly(self, path: Path) -> None:
        turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
        save_params(
            path, nnx.Dict(w=nnx.Param(turned), s=nnx.Param(np.float32(2)), big=nnx.Param(turned.astype(">f4")))
        )
        for x in safetensors.numpy.load_file(path).values():
            np.testing.assert_array_equal(x, turned if x.ndim else 2)

    def test_double_precision(self, path: Path) -> None:
        with jax.enable_x64(True):
            model = linear(param_dtype=jnp.float64)
            save_params(path, model)
            np.testing.assert_array_equal(load_params(path, model).kernel[...], model.kernel[...])
        with pytest.raises(
            ValueError, match="load_params: `bias` has dtype float64, which needs jax_enable_x64; enable it"
        ):
            load_params(path, model)
        with pytest.raises(ValueError, match="has .*`kernel`, an .* dtype float64, in place of .* float32"):
            load_params(path, linear())

    def test_it_works_under_jit(self, saved: Path) -> None:
        found = nnx.jit(lambda model: load_params(saved, model))(linear(1))
        np.testing.assert_array_equal(found.kernel[...], linear().kernel[...])


class TestFromElsewhere:
    """Other names and axis orders."""

    def write(self, path: Path, **arrays: np.ndarray) -> Path:
        path.parent.mkdir(exist_ok=True)
        safetensors.numpy.save_file(arrays, path, {"format": "pt"})
        return path

    def test_names_and_axes(self, path: Path) -> None:
        kernel, bias = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones(3, np.float32)
        file = self.write(path, **{"fc.weight": kernel, "fc.bias": bias, "seen": np.asarray(7)})
        calls: list[Any] = []

        def turn(name: str, x: np.ndarray) -> Any:
            calls.append((name, x.shape))
            return jnp.asarray(x.T)

        short = {"weight": "kernel", "bias": "bias", "seen": None}
        for rename in (
            {"fc.weight": "kernel", "fc.bias": "bias", "seen": None},
            lambda name: short[name.removeprefix("fc.")],
        ):
            found = load_params(file, linear(), rename=rename, transform=turn)
            np.testing.assert_array_equal(found.kernel[...], kernel.T)
            np.testing.assert_array_equal(found.bias[...], bias)
        assert calls == [("bias", (3,)), ("kernel", (3, 4))] * 2

    def test_a_dict_may_rename_some_names_only(self, path: Path) -> None:
        file = self.write(path, w=np.zeros((4, 3), np.float32), bias=np.ones(3, np.float32))
        assert load_params(file, linear(), rename={"w": "kernel"}).bias[0] == 1

    def test_names_may_be_swapped(self, path: Path) -> None:
        model = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.zeros(2)))
        save_params(path, model)
        found: Any = load_params(path, model, rename={"a": "b", "b": "a"})
        assert (found.a[0], found.b[0]) == (0, 1)

    @pytest.mark.parametrize(
        ("rename", "match"),
        [
            ({"kernl": "kernel"}, "rename has names that .* lacks: `kernl`; it has `bias`, `kernel`"),
            ({"kernel": "bias"}, "`bias` and `kernel` of .* would both be `bias`; rename one"),
            (lambda name: "x", "`bias` and `kernel` of .* would both be `x`; rename one"),
        ],
    )
    def test_invalid_names(self, saved: Path, rename: Any, match: str) -> None:
        with pytest.raises(ValueError, match=f"load_params: {match}"):
            load_params(saved, linear(), rename=rename)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"rename": "kernel"}, "rename must be a dict or a function of names, but got 'kernel'"),
            ({"rename": {"kernel": 3}}, "rename must give a name or None, but gave 3 of type int for `kernel`"),
            ({"rename": lambda name: ("a", name)}, "rename must give a name or None, but gave .* for `bias`"),
            ({"transform": {}}, "transform must be a function"),
            ({"strict": "no"}, "strict must be True or False, but got 'no'"),
        ],
    )
    def test_arguments_of_a_wrong_type(self, saved: Path, options: Any, match: str) -> None:
        with pytest.raises(TypeError, match=f"load_params: {match}"):
            load_params(saved, linear(), **options)

    def test_a_dtype_that_cannot_be_read(self, path: Path) -> None:
        path.parent.mkdir()
        header = b'{"bias":{"dtype":"F8_E4M3","shape":[3],"data_offsets":[0,3]}}'
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
        with pytest.raises(ValueError, match="load_params: `bias` of .* has dtype F8_E4M3, which cannot be read"):
            load_params(path, linear())


class TestMisfits:
    """One error lists all mismatches, and nothing is loaded."""

    def test_all_are_named_at_once(self, saved: Path) -> None:
        class Other(nnx.Module):
            def __init__(self) -> None:
                self.kernel, self.scale = nnx.Param(jnp.ones((3, 4))), nnx.Param(jnp.ones(2))
                self.shift = nnx.Param(jnp.ones(3, jnp.bfloat16))

        model = Other()
        match = (
            r"load_params: .*model\.safetensors does not fit the Other: it lacks `scale`, `shift`, and has in addition "
            r"`bias`, and has `kernel`, an array of shape \(4, 3\) and dtype float32, in place of shape \(3, 4\) and "
            r"dtype float32; rename= is for other names, transform= for other shapes and dtypes, strict=False for"
        )
        with pytest.raises(ValueError, match=match):
            load_params(saved, model)
        match = (
            r"has in addition `kernel`, and has `shift`, an .* float32, in place of shape \(3,\) and dtype bfloat16;"
        )
        with pytest.raises(ValueError, match=match):
            load_params(saved, model, rename={"kernel": "move", "bias": "shift"})
        match = r"has `kernel`, an .* \(4, 3\) and dtype float16, in place of shape .* float32; .* transform= for"
        with pytest.raises(ValueError, match=match):
            load_params(saved, model, strict=False, transform=lambda name, x: x.astype(np.float16))
        assert (model.kernel[...] == 1).all()

    def test_long_lists_are_truncated(self, saved: Path) -> None:
        model = nnx.List([nnx.Param(jnp.ones(1)) for _ in range(20)])
        with pytest.raises(
            ValueError, match=r"lacks `0`, `1`, `2`, `3`, `4`, `5`, `6`, `7` and 12 more, and has in addition"
        ):
            load_params(saved, model)

    def test_another_module_class_needs_equal_shapes(self, saved: Path) -> None:
        model = nnx.Dict(kernel=nnx.Param(jnp.ones((4, 3))), bias=nnx.Param(jnp.ones((1, 3))))
        with pytest.raises(ValueError, match=r"has `bias`, an array of shape \(3,\) .*, in place of shape \(1, 3\)"):
            load_params(saved, model)

    def test_common_names_are_loaded_if_not_strict(self, saved: Path) -> None:
        model = nnx.Dict(kernel=nnx.Param(jnp.ones((4, 3))), scale=nnx.Param(jnp.ones(2)))
        match = "does not fit the Dict: it lacks `scale`, and has in addition `bias`; the rest is loaded"
        with pytest.warns(UserWarning, match=match) as warned:
            found = load_params(saved, model, strict=False)
        assert warned[0].filename == __file__
        np.testing.assert_array_equal(found.kernel[...], linear().kernel[...])
        assert (found.scale[...] == 1).all()
        with pytest.warns(UserWarning, match="does not fit the Linear: it has in addition `bias`; the rest is loaded"):
            load_params(saved, linear(use_bias=False), strict=False)
        load_params(saved, linear(), strict=False)

    def test_the_result_of_a_transform_is_validated(self, saved: Path) -> None:
        with pytest.raises(ValueError, match=r"has `bias`, None, in place of shape \(3,\) .*, `kernel`, None"):
            load_params(saved, linear(), transform=lambda name, x: None)

    def test_no_common_name_is_an_error_even_if_not_strict(self, saved: Path) -> None:
        with pytest.raises(
            ValueError, match="does not fit the Dict: it lacks `w`, and has in addition `bias`, `kernel`"
        ):
            load_params(saved, nnx.Dict(w=nnx.Param(jnp.ones(2))), strict=False)


class TestRefusals:
    """Not a module, not a path, not an array."""

    def test_ensembles_are_refused(self, path: Path) -> None:
        ensemble = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0)
        with pytest.raises(
            TypeError, match=r"save_params: model must be one module, but got an ensemble; use .* save or load"
        ):
            save_params(path, ensemble)
        with pytest.raises(TypeError, match=r"load_params: model must be one module, .* save or load"):
            load_params(path, ensemble)
        save_params(path, ensemble[1])

    @pytest.mark.parametrize("other", [{"w": jnp.ones(2)}, jnp.ones(2), None])
    def test_other_models(self, saved: Path, other: Any) -> None:
        for call in (save_params, load_params):
            with pytest.raises(TypeError, match=f"{call.__name__}: model must be a Flax NNX module, but got"):
                call(saved, other)

    def test_paths(self, tmp_path: Path) -> None:
        for call in (save_params, load_params):
            with pytest.raises(TypeError, match=r"not '?int'?"):
                call(3, linear())
        with pytest.raises(IsADirectoryError, match=f"Is a directory: .*{tmp_path}"):
            save_params(tmp_path, linear())
        with pytest.raises(ValueError, match=f"^load_params: {tmp_path} is a directory, not a file; put a file there"):
            load_params(tmp_path, linear())
        assert not [*tmp_path.iterdir()]
        with pytest.raises(FileNotFoundError, match="No such file or directory: .*nothing"):
            load_params(tmp_path / "nothing", linear())

    def test_a_tilde_is_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.chdir(tmp_path)
        save_params("~/nets/linear.safetensors", linear())
        assert (tmp_path / "home" / "nets" / "linear.safetensors").is_file()
        assert not (tmp_path / "~").exists()
        found = load_params(Path("~") / "nets" / "linear.safetensors", linear(1))
        np.testing.assert_array_equal(found.kernel[...], linear().kernel[...])

    def test_arguments_may_be_swapped_by_mistake(self, path: Path) -> None:
        with pytest.raises(TypeError, match="save_params: model must be a Flax NNX module, but got"):
            save_params(linear(), path)

    @pytest.mark.parametrize(
        ("value", "error", "match"),
        [
            ("text", TypeError, "`w` holds 'text' of type str, not an array; make it a plain attribute"),
            (
                np.ones(1, complex),
                ValueError,
                "`w` has dtype complex128, but safetensors supports bool, int8, .*; convert it",
            ),
            (jnp.ones(2, jnp.int4), ValueError, "`w` has dtype int4, but safetensors supports"),
            (
                jax.ShapeDtypeStruct((2,), jnp.float32),
                TypeError,
                "`w` is an array of shape .* without values in this process",
            ),
        ],
    )
    def test_values(self, path: Path, value: Any, error: Any, match: str) -> None:
        with pytest.raises(error, match=f"save_params: {match}"):
            save_params(path, nnx.Dict(w=nnx.Variable(value)))
        assert not path.exists()

    def test_values_under_jit(self, path: Path) -> None:
        with pytest.raises(TypeError, match=r"save_params: `bias` is .* without values in this process: .* traced"):
            nnx.jit(lambda model: save_params(path, model))(linear())

    def test_values_that_other_processes_hold(self, path: Path) -> None:
        class Spread:
            shape, dtype, is_fully_addressable = (2,), np.dtype(np.float32), False

            def __array__(self, *_: Any, **__: Any) -> np.ndarray:
                raise RuntimeError("fetching spans other processes; use process_allgather")  # JAX's error

        with pytest.raises(
            TypeError, match="save_params: `w` is an array .* without values in this process: .* process_allgather"
        ):
            save_params(path, nnx.Dict(w=nnx.Variable(Spread())))
        assert not path.exists()

    def test_names(self, path: Path) -> None:
        model = nnx.Dict({"a.b": nnx.Param(jnp.ones(1)), "a": nnx.Dict(b=nnx.Param(jnp.ones(2)))})
        with pytest.raises(ValueError, match=r"save_params: two arrays of the model are called `a\.b`"):
            save_params(path, model)

    def test_without_safetensors(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
        for call in (save_params, load_params):
            match = rf"{call.__name__} needs safetensors; install it with pip install 'plurax\[files\]'"
            with pytest.raises(ModuleNotFoundError, match=match):
                call(saved, linear())


REPEATEDLY = """
import sys
import jax.numpy as jnp
from flax import nnx
from plurax.transforms.modules import save_params
while True:
    for value in (1.0, 2.0):
        save_params(sys.argv[1], nnx.Dict(w=nnx.Param(jnp.full(500_000, value)), v=nnx.Param(jnp.full(7, value))))
"""


class TestWholeOrNotThere:
    """A file is replaced atomically."""

    def test_a_failure_keeps_the_old_file(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise OSError("the disk is full")

        before = saved.read_bytes()
        for name in ("fsync", "replace"):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, fail) if name == "fsync" else patch.setattr(Path, name, fail)
                with pytest.raises(OSError, match="the disk is full"):
                    save_params(saved, linear(1))
            assert saved.read_bytes() == before
            assert [*saved.parent.iterdir()] == [saved]
        save_params(saved, linear(1))
        assert saved.read_bytes() != before

    def test_a_link_is_kept(self, saved: Path) -> None:
        link = saved.with_name("link")
        link.symlink_to(saved)
        save_params(link, linear(1))
        assert link.is_symlink()
        np.testing.assert_array_equal(load_params(saved, linear()).kernel[...], linear(1).kernel[...])

    def test_the_file_has_the_default_permissions(self, saved: Path, tmp_path: Path) -> None:
        (tmp_path / "plain").touch()
        assert saved.stat().st_mode == (tmp_path / "plain").stat().st_mode

    def test_a_killed_process_leaves_a_complete_file(self, path: Path) -> None:
        like = nnx.Dict(w=nnx.Param(jnp.zeros(500_000)), v=nnx.Param(jnp.zeros(7)))
        reads: list[float] = []
        with subprocess.Popen([sys.executable, "-c", REPEATEDLY, str(path)]) as process:
            try:
                # Meanwhile readers see only complete files: at least twenty reads, and both versions.
                while len(reads) < 20 or len(set(reads)) < 2:
                    assert process.poll() is None
                    if not path.exists():
                        time.sleep(0.01)
                        continue
                    arrays = named_parameters(load_params(path, like)).values()
                    (value,) = {float(x) for array in arrays for x in np.unique(array)}
                    reads.append(value)
            finally:
                process.kill()
        assert float(load_params(path, like).w[0]) in reads
