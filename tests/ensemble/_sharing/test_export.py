"""`export` and `load_exported`: the prediction as one file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import export as jax_export

from plurax.ensemble import Committee, Ensemble, export, load_exported
from plurax.transforms.modules import Base, batch_ensemble
from plurax.transforms.program._aot.exported import write_exported

pytestmark = pytest.mark.smoke

RNG = np.random.default_rng(0)
X, IMAGES = RNG.normal(size=(5, 4)).astype(np.float32), RNG.normal(size=(3, 6, 6, 2)).astype(np.float32)
HERE = ("cpu",)


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(36, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
        return self.out(self.dropout(x.reshape(x.shape[0], -1)))


class Tempered(nnx.Module):
    """A layer with a temperature."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.w, self.t = nnx.Param(arrays["w"]), nnx.Param(arrays["t"])

    def __call__(self, x: Any) -> Any:
        return x @ self.w[...] / self.t[...]


def mlp(rngs: nnx.Rngs) -> Any:
    return nnx.Sequential(nnx.Linear(4, 16, rngs=rngs), nnx.tanh, nnx.Linear(16, 3, rngs=rngs))


def models() -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """Return models by name, each with inputs and the options of `predict`."""
    dense = nn.Dense(3)
    linen = Ensemble.from_apply(dense.apply, [dense.init(jax.random.key(i), X) for i in range(2)])
    both = Ensemble.from_apply(
        lambda w, x: (x["a"] @ w, jnp.exp(x["b"])), [jnp.asarray(RNG.normal(size=4), jnp.float32) for _ in range(3)]
    )
    shared = Ensemble.create(lambda rngs: batch_ensemble(mlp(rngs), rngs=rngs), 3, seed=0, shared=Base)
    return {
        "MLP": (Ensemble.create(mlp, 4, seed=0), X, {}),
        "temperatures": (Ensemble.create(mlp, 2, seed=0), X, {"temperature": np.array([0.5, 2.0])}),
        "CNN with random streams": (Ensemble.create(CNN, 3, seed=0), IMAGES, {}),
        "shared kernels": (shared, X, {}),
        "a committee": (Committee([Ensemble.create(mlp, 2, seed=0), linen, mlp(nnx.Rngs(9))], [1, 2, 3, 4, 0]), X, {}),
        "regression of a dict": (both, {"a": X, "b": X[:, 0]}, {"kind": "regression"}),
        "bfloat16": (Ensemble.create(lambda r: nnx.Linear(4, 3, param_dtype=jnp.bfloat16, rngs=r), 2, seed=0), X, {}),
    }


MODELS = (
    "MLP",
    "temperatures",
    "CNN with random streams",
    "shared kernels",
    "a committee",
    "regression of a dict",
    "bfloat16",
)


@pytest.mark.parametrize("name", MODELS)
def test_the_file_predicts_to_the_bit(name: str, tmp_path: Path) -> None:
    model, x, options = models()[name]
    options = {"kind": "classification", **options}
    outputs = ("mean", "variance") if options.get("kind") == "regression" else ("mean", "entropy", "members")
    one = jax.tree.map(lambda a: a[:1], x)
    export(model, tmp_path / "model", one, outputs=outputs, platforms=HERE, **options)
    loaded = load_exported(tmp_path / "model")
    for some in (x, one, jax.tree.map(lambda a: np.concatenate([a, a]), x)):
        found, expected = loaded(some), model.predict(some, **options)
        assert set(found) == set(outputs)
        for output in outputs:
            np.testing.assert_array_equal(found[output], getattr(expected, output))
    assert loaded.description["model"] == repr(model)
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


SERVER = """
import sys
import numpy as np
from plurax.transforms.program import load_exported
model = load_exported(sys.argv[1])
np.save(sys.argv[2], model(np.load(sys.argv[3]))["mean"])
print(sorted({name.split(".")[0] for name in sys.modules} & {"flax", "optax", "tensorstore", "plurax"}))
"""


def test_a_server_needs_jax_alone(tmp_path: Path) -> None:
    ens = Ensemble.create(mlp, 4, seed=0)
    export(ens, tmp_path / "model", X, kind="classification")  # for all platforms
    np.save(tmp_path / "x.npy", X)
    paths = [str(tmp_path / name) for name in ("model", "mean.npy", "x.npy")]
    run = subprocess.run([sys.executable, "-c", SERVER, *paths], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "['plurax']"
    # The tests turn some of the compiler's optimizations off, which the server does not.
    np.testing.assert_allclose(np.load(tmp_path / "mean.npy"), ens.predict(X, kind="classification").mean, rtol=1e-5)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    ens, path = Ensemble.create(mlp, 2, seed=0), tmp_path / "model"
    with pytest.raises(TypeError, match=r"^export: model must be an Ensemble or a Committee, but got"):
        export(mlp(nnx.Rngs(0)), path, X, kind="classification")
    with pytest.raises(
        ValueError, match=r"^export: outputs has 'median', but a prediction of kind 'classification' has"
    ):
        export(ens, path, X, outputs=("median",), kind="classification")
    with pytest.raises(ValueError, match=r"^export: outputs has 'entropy', but a prediction of kind 'regression' has"):
        export(ens, path, X, kind="regression")
    with pytest.raises(TypeError, match=r"^export: example must hold arrays with the batch along axis 0, but has"):
        export(ens, path, 1.0, kind="classification")
    fixed = Ensemble.from_apply(lambda w, x: x.reshape(len(x), -1) @ w, [jnp.ones((4, 3))])
    with pytest.raises(ValueError, match=r"^export: a model needs a batch of a fixed size; write x.shape\[0\] instead"):
        export(fixed, path, X, kind="classification")
    assert not path.exists()
    export(ens, path, X, platforms=HERE, kind="classification")
    loaded = load_exported(path)
    for wrong in (X.astype(np.float64), X[:, :2], X[0]):
        with pytest.raises(TypeError, match=r"^load_exported: `x` is .*; pass float32 of shape \(batch, 4\)"):
            loaded(wrong)
    with pytest.raises(TypeError, match=r"^load_exported: x has structure"):
        loaded([X])
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"^load_exported: .* is damaged: its checksum does not"):
        load_exported(path)
    path.write_bytes(data[:100])
    with pytest.raises(ValueError, match=r"^load_exported: .* is damaged"):
        load_exported(path)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"^load_exported: .* is damaged: it does not begin"):
        load_exported(path)
    with pytest.raises(FileNotFoundError):
        load_exported(tmp_path / "nothing")


def test_a_number_that_members_share(tmp_path: Path) -> None:
    members = [{"w": jnp.ones((4, 3)) * i, "t": jnp.float32(2.0)} for i in range(2)]
    ens = Ensemble.stack([Tempered(x) for x in members], shared="t")
    export(ens, tmp_path / "model", X, platforms=HERE, kind="classification", outputs=("mean",))
    found = load_exported(tmp_path / "model")(X)["mean"]
    np.testing.assert_allclose(found, ens.predict(X, kind="classification").mean, rtol=1e-6)


def foreign(fun: Any, path: Path, *calls: str) -> None:
    """Write a program that `export` would not."""
    allowed = [jax_export.DisabledSafetyCheck.custom_call(name) for name in calls]
    spec = jax.ShapeDtypeStruct((5, 4), np.float32)
    program = jax_export.export(jax.jit(fun), platforms=HERE, disabled_checks=allowed)([], spec)
    description = {"model": "", "kind": "", "inputs": [], "outputs": {}, "platforms": [], "versions": {}}
    write_exported(path, program, [], description)


@pytest.mark.parametrize(
    "name",
    [
        "xla_ffi_python_cpu_callback",
        "xla_python_cpu_callback",
        "CustomSPMDPartitioning",
        "mine",
        "two words",
        'a"b',
        "Qr2",
    ],
)
def test_code_that_may_reach_python_is_refused(name: str, tmp_path: Path) -> None:
    def calls(arrays: Any, x: Any) -> Any:
        inner = lambda x: jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((4,), x.dtype))(x)
        return {"mean": jax.lax.map(inner, x)}  # within the body of a loop

    foreign(calls, tmp_path / "model", name)
    with pytest.raises(
        ValueError, match=r"^load_exported: .* calls code that may reach Python: .*; if you trust"
    ) as said:
        load_exported(tmp_path / "model")
    (asked,) = ast.literal_eval(str(said.value).partition("allow_custom_calls=")[2].rstrip("."))
    with pytest.raises(ValueError, match="calls code that may reach Python"):
        load_exported(tmp_path / "model", allow_custom_calls=["other"])
    assert load_exported(tmp_path / "model", allow_custom_calls=[asked]).custom_calls == (asked,)


def test_libraries_of_numerics_are_no_such_code(tmp_path: Path) -> None:
    foreign(lambda arrays, x: {"mean": jnp.linalg.svd(x)[1]}, tmp_path / "model")
    loaded = load_exported(tmp_path / "model")
    assert loaded.custom_calls == ("lapack_sgesdd_ffi",)
    np.testing.assert_allclose(loaded(X)["mean"], np.linalg.svd(X)[1], rtol=1e-5)
    export(Ensemble.create(mlp, 2, seed=0), tmp_path / "none", X, kind="classification")
    assert load_exported(tmp_path / "none").custom_calls == ("shape_assertion",)  # of the batch


@pytest.mark.parametrize("x", [np.zeros((1, 3)), np.zeros((1, 3), np.int64)])
def test_an_example_of_64_bits_has_the_dtype_that_jax_gives_it(x: np.ndarray, tmp_path: Path) -> None:
    """From jax 0.11 on, a 64-bit shape warns, and warnings are errors here."""
    ensemble = Ensemble.from_apply(lambda w, x: x @ w, [jnp.ones((3, 2)), jnp.zeros((3, 2))])
    export(ensemble, tmp_path / "model", x, platforms=HERE, kind="classification")
    given = x.astype(jax.typeof(x).dtype)
    assert load_exported(tmp_path / "model")(given)["mean"].shape == (1, 2)
