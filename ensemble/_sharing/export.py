"""`export`: the prediction of an ensemble or a committee as one file, for a server that has only JAX."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export as jax_export
from jax import lax
from jax.typing import ArrayLike

from ...transforms._core.arguments import describe
from ...transforms._core.prediction import Kind, Prediction
from ...transforms._core.prng import is_key
from ...transforms._core.version import __version__
from ...transforms.program._aot.exported import check_library, write_exported
from .._members.ensemble import Ensemble
from .._members.prediction import check_temperature, kind_for
from .._members.sharding import everywhere
from .committee import Committee, predicted_from, together


def export(
    model: Ensemble[Any] | Committee,
    path: str | os.PathLike[str],
    example: Any,
    *,
    outputs: Sequence[str] = ("mean", "entropy"),
    kind: Kind | None = None,
    temperature: ArrayLike | None = None,
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
) -> None:
    """Write the prediction of an ensemble or a committee to one file, for batches of any size.

    The file holds the program, as `jax.export` stores it, the arrays, a description and a checksum, and no Python code.
    `load_exported` reads it; a server needs no Flax and none of the code of the models.

    Args:
      model: an `Ensemble` or a `Committee`.
      path: the file. An earlier one is replaced.
      example: an input of `predict`, of which only shapes and dtypes count; axis 0 of each array is the batch.
      outputs: names of attributes of `Prediction`, which the program returns.
      kind: as for `Ensemble.predict`.
      temperature: as for `Ensemble.predict`.
      platforms: where the program may run: "cpu", "cuda", "rocm", "tpu".

    Raises:
      TypeError: `model` is neither of both; `example` holds something other than arrays.
      ValueError: an output is unknown, or this kind of prediction does not have it; a model needs a batch of a fixed
        size; and as for `predict`.
      OSError: the file cannot be written.
      ModuleNotFoundError: the extra is missing: `pip install 'plurax[export]'`.

    Source:
      `jax.export`.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, export, load_exported
      >>> ens = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 5, seed=0).with_kind("classification")
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     export(ens, f"{directory}/model.plurax", jnp.ones((1, 4)), platforms=("cpu",))
      ...     found = load_exported(f"{directory}/model.plurax")(jnp.ones((2, 4)))
      >>> bool((found["mean"] == ens.predict(jnp.ones((2, 4))).mean).all())
      True
    """
    if not isinstance(model, (Ensemble, Committee)):
        raise TypeError(f"export: model must be an Ensemble or a Committee, but got {describe(model)}.")
    kind = kind_for("export", model, kind)
    check_library("export")
    absent = () if kind != "regression" else ("entropy", "mutual_information")
    for name in outputs:
        if name not in Prediction._fields or name in absent:
            has = ", ".join(repr(x) for x in Prediction._fields if x not in absent)
            raise ValueError(f"export: outputs has {name!r}, but a prediction of kind {kind!r} has {has}.")
    (batch,) = jax_export.symbolic_shape("batch")

    def with_batch(x: Any) -> jax.ShapeDtypeStruct:
        x = x if hasattr(x, "dtype") else np.asarray(x)
        if not x.ndim or x.dtype == object:
            raise TypeError(f"export: example must hold arrays with the batch along axis 0, but has {describe(x)}.")
        return jax.ShapeDtypeStruct((batch, *x.shape[1:]), jax.typeof(x).dtype)

    committee = model if isinstance(model, Committee) else Committee([model])
    check_temperature(temperature, kind, len(committee))
    leaves, structure = jax.tree.flatten(committee.groups)
    keys = [jax.random.key_impl(x) if is_key(x) else None for x in leaves]
    arrays = [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in everywhere(leaves)]

    def predicted(held: list[Any], x: Any) -> dict[str, Any]:
        pairs = zip(held, keys, strict=True)
        restored = [x if impl is None else jax.random.wrap_key_data(x, impl=impl) for x, impl in pairs]
        groups = jax.tree.unflatten(structure, restored)
        # As `predict`, which is two programs: in one, XLA would fuse both, and round differently.
        returned = lax.optimization_barrier(together([group._evaluating()(x) for group in groups]))
        result = predicted_from(returned, kind, temperature, committee.weights)
        return {name: getattr(result, name) for name in outputs}

    spec = jax.tree.map(with_batch, example)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    try:
        program = jax_export.export(jax.jit(predicted), platforms=list(platforms))(shapes, spec)
    except TypeError as error:
        if "_DimExpr" not in str(error):
            raise
        cure = "write x.shape[0] instead of len(x), which must be an int, and jax.vmap instead of a loop over examples"
        raise ValueError(f"export: a model needs a batch of a fixed size; {cure}.") from error
    description = {
        "model": repr(model),
        "kind": kind,
        "inputs": [str(x) for x in program.in_avals[len(arrays) :]],
        "outputs": {name: str(x) for name, x in zip(sorted(outputs), program.out_avals, strict=True)},
        "platforms": list(platforms),
        "versions": {"plurax": __version__, "jax": jax.__version__},
    }
    write_exported(Path(path), program, arrays, description)
