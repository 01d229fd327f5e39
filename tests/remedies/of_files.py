"""Remedies of files that cannot be read, or that are in the way."""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import export as jax_export

from plurax.ensemble import Ensemble, Trainer, export, from_orbax, load, load_exported, save, to_orbax
from plurax.transforms._runs import checkpoint
from plurax.transforms.curvature import laplace
from plurax.transforms.program._aot.exported import write_exported

from .._files import rewrite
from ._registry import Fails, remedy

X = np.ones((4, 2), np.float32)


def make(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(2, 1, rngs=rngs)


def loss(model: Any, x: Any) -> jax.Array:
    return jnp.mean(model(x) ** 2)


ENSEMBLE = Ensemble.create(make, 2, seed=0)


def same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@remedy("{} is damaged: {}; restore a copy, or write it anew.")
def damaged_arrays(fails: Fails) -> None:
    save("a", ENSEMBLE)
    shutil.copytree("a", "copy")
    for restore in (lambda: shutil.copytree("copy", "a"), lambda: save("a", ENSEMBLE)):
        Path("a/arrays/0/ensemble.bin").write_bytes(b"")
        fails(load, "a", ENSEMBLE)
        shutil.rmtree("a")
        restore()
        same(load("a", ENSEMBLE), ENSEMBLE)


@remedy("{} is damaged:{} {}; restore a copy, or write it anew.")
def damaged_file(fails: Fails) -> None:
    write = partial(export, ENSEMBLE, "model", X[:1], platforms=("cpu",), kind="regression", outputs=("mean",))
    write()
    whole = Path("model").read_bytes()
    for restore in (write, lambda: Path("model").write_bytes(whole)):
        Path("model").write_bytes(whole[:-1])
        fails(load_exported, "model")
        restore()
        same(load_exported("model")(X)["mean"], ENSEMBLE.predict(X, kind="regression").mean)


@remedy("{} is {}, not a file; put a file there.", "{} is a link; put the file itself there.")
def no_plain_file(fails: Fails) -> None:
    save("a", ENSEMBLE)
    manifest = Path("a/plurax.json")
    manifest.rename("elsewhere")
    os.mkfifo(manifest)
    fails(load, "a", ENSEMBLE)
    manifest.unlink()
    manifest.symlink_to(Path("elsewhere").resolve())
    fails(load, "a", ENSEMBLE)
    manifest.unlink()
    shutil.copyfile("elsewhere", manifest)
    same(load("a", ENSEMBLE), ENSEMBLE)


@remedy("from_orbax: {} is damaged: {} is a link; remove it.")
def link_in_a_checkpoint_of_orbax(fails: Fails) -> None:
    to_orbax("a", ENSEMBLE)
    Path("a/more").symlink_to("/")
    fails(from_orbax, "a", ENSEMBLE)
    Path("a/more").unlink()
    same(from_orbax("a", ENSEMBLE), ENSEMBLE)


@remedy("{}: {} is not a lock of this library; move it, or use another directory.")
def file_with_the_name_of_a_lock(fails: Fails) -> None:
    trainer = Trainer(loss, optax.sgd(0.1), strategy="vmap")
    fit = lambda directory: trainer.fit(trainer.init(ENSEMBLE), [(X,)], progress=False, checkpoint_dir=directory)[0]
    Path("run").mkdir()
    Path("run/run.lock").write_text("mine")
    fails(fit, "run")
    same(fit("other"), fit(None))
    Path("run/run.lock").rename("mine")
    same(fit("run"), fit(None))
    assert Path("mine").read_text() == "mine"


@remedy("the files are replaced faster than they can be read; read them when their writer has ended")
def replaced_all_the_time(fails: Fails) -> None:
    save("a", ENSEMBLE)
    Path("a/arrays/0/ensemble.bin").unlink()
    with patch.object(checkpoint, "identity", side_effect=itertools.count()):
        fails(load, "a", ENSEMBLE)
    shutil.rmtree("a")
    save("a", ENSEMBLE)
    same(load("a", ENSEMBLE), ENSEMBLE)


@remedy(
    "{}; fit the distribution anew.",
    "Laplace.load: {} has the curvature of other parameters; pass its model and wrt.",
)
def another_posterior(fails: Fails) -> None:
    model, squares = lambda net, x: net(x), lambda out, y: 0.5 * jnp.mean((out - y) ** 2)
    data = X, np.ones((4, 1), np.float32)
    fit = lambda: laplace(model, squares, make(nnx.Rngs(0)), data, prior_precision=1.0)
    read = partial(type(fit()).load, "posterior", model, make(nnx.Rngs(1)))
    replace(fit(), mean_loss=jnp.float32(jnp.nan)).save("posterior")
    fails(read)
    fit().save("posterior")
    assert float(read().mean_loss) == float(fit().mean_loss)
    fails(read, wrt=nnx.PathContains("bias"))
    assert float(read(wrt=None).log_marginal_likelihood()) == float(fit().log_marginal_likelihood())


@remedy("if you trust the file, and this code is yours, pass allow_custom_calls={}")
def code_outside_the_program(fails: Fails) -> None:
    def calls(arrays: Any, x: Any) -> Any:
        return jax.ffi.ffi_call("my_python_op", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    allowed = [jax_export.DisabledSafetyCheck.custom_call("my_python_op")]
    spec = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    program = jax_export.export(jax.jit(calls), platforms=["cpu"], disabled_checks=allowed)([], spec)
    description = {"model": "", "kind": "", "inputs": [], "outputs": {}, "platforms": ["cpu"], "versions": {}}
    write_exported(Path("model"), program, [], description)
    said = fails(load_exported, "model")
    assert "allow_custom_calls=['my_python_op']" in said
    assert load_exported("model", allow_custom_calls=["my_python_op"]).custom_calls == ("my_python_op",)
    rewrite(Path("model"))
