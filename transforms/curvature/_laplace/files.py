"""The file of a `Laplace`: its parameters, and the blocks or eigenvectors of its curvature."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.prng import is_key
from ...modules._safetensors import read_array, reading, write
from .._blocks import EigenBlock
from .._kronecker import KroneckerFactors
from .spectrum import Spectrum

_VERSION = 1


def written(
    api: str,
    path: Path,
    size: int,
    params: Sequence[Any],
    curvature: KroneckerFactors | Spectrum,
    scalars: Mapping[str, jax.Array],
) -> None:
    """Write a distribution to a file."""
    arrays: dict[str, Any] = {f"params.{i}": jax.random.key_data(x) if is_key(x) else x for i, x in enumerate(params)}
    about: dict[str, Any] = {"version": _VERSION, "size": size, "params": len(params), "blocks": None}
    if isinstance(curvature, Spectrum):
        arrays |= {"values": curvature.values, "vectors": curvature.vectors}
    else:
        blocks = [block.eigen() for block in curvature.blocks]
        about["blocks"] = [{"axes": block.axes, "shape": block.shape} for block in blocks]
        for i, block in enumerate(blocks):
            arrays |= {f"{name}.{i}": getattr(block, name) for name in ("left", "right", "values")}
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    write(api, path.expanduser().resolve(), {name: np.asarray(x) for name, x in {**arrays, **scalars}.items()})


def read(api: str, path: Path, like: Sequence[Any]) -> tuple[int, list[Any], Any, dict[str, jax.Array]]:
    """Read a distribution; return its size, its parameters, its curvature without a structure, and its scalars.

    Args:
      api: the name for errors.
      path: the path of the file.
      like: the parameters of a model of the same architecture.
    """
    path = path.expanduser().resolve()
    with reading(api, path) as file:

        def of(name: str) -> jax.Array:
            return jnp.asarray(read_array(api, file, path, name))

        if "about" not in set(file.keys()):
            raise ValueError(f"{api}: {path} has no Laplace approximation.")
        about = json.loads(bytes(np.asarray(of("about"))))
        if about["version"] != _VERSION:
            raise ValueError(f"{api}: {path} was written by a later version; read it with that version.")
        if about["params"] != len(like):
            raise ValueError(f"{api}: {path} has {about['params']} arrays of parameters, but params has {len(like)}.")
        params = []
        for i, old in enumerate(like):
            found = of(f"params.{i}")
            found = jax.random.wrap_key_data(found, impl=jax.random.key_impl(old)) if is_key(old) else found
            if jnp.shape(found) != jnp.shape(old):
                raise ValueError(f"{api}: array {i} of {path} has shape {found.shape}, but that of params {old.shape}.")
            params.append(found)
        curvature: Any
        if about["blocks"] is None:
            curvature = Spectrum(of("values"), of("vectors"), None)
        else:
            blocks = []
            for i, block in enumerate(about["blocks"]):
                axes: Any = tuple(map(tuple, block["axes"]))
                arrays = [of(f"{name}.{i}") for name in ("left", "right", "values")]
                blocks.append(EigenBlock(axes, tuple(block["shape"]), *arrays))
            curvature = KroneckerFactors(tuple(blocks), None)
        return about["size"], params, curvature, {name: of(name) for name in ("prior_precision", "mean_loss")}
