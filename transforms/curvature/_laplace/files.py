"""The file of a `Laplace`: its parameters, and the blocks or eigenvectors of its curvature."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.arguments import describe
from ..._core.prng import is_key
from ..._core.version import __version__
from ..._files.document import parse_json
from ..._files.errors import Damaged, OtherVersion
from ..._files.schema import decode
from ...modules._safetensors import read_array, reading, write
from .._blocks import EigenBlock, Sides
from .._kronecker import KroneckerFactors
from .spectrum import Spectrum

_VERSION = 1


@dataclass(frozen=True)
class _About:
    """What a file says besides its arrays.

    Attributes:
      version: that of the format.
      size: the number of examples.
      params: the number of arrays of parameters.
      blocks: the layout of each block of the curvature; None for eigenvectors.
    """

    version: int
    size: int
    params: int
    blocks: list[Sides] | None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"the number of examples is {self.size}")
        for sides in self.blocks or ():
            if sorted(axis for axes in sides.axes for axis in axes) != [*range(len(sides.shape))]:
                raise ValueError(f"a block of shape {sides.shape} has axes {sides.axes}")


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
    path = Path(os.path.realpath(path.expanduser()))
    write(api, path, {name: np.asarray(x) for name, x in {**arrays, **scalars}.items()})


def read(api: str, path: Path, like: Sequence[Any]) -> tuple[int, list[Any], Any, dict[str, jax.Array]]:
    """Read a distribution; return its size, its parameters, its curvature without a structure, and its scalars.

    Args:
      api: the name for errors.
      path: the path of the file.
      like: the parameters of a model of the same architecture.
    """
    path = Path(os.path.realpath(path.expanduser()))
    with reading(api, path) as file:
        names = set(file.keys())
        if "about" not in names:
            raise ValueError(f"{api}: {path} has no Laplace approximation.")

        def of(name: str) -> jax.Array:
            if name not in names:
                raise Damaged(f"{api}: {path} is damaged: it has no array {name!r}.")
            return _array(api, path, name, read_array(api, file, path, name))

        def shaped(name: str, *shapes: tuple[int, ...]) -> jax.Array:
            array = of(name)
            if array.shape not in shapes or not jnp.issubdtype(array.dtype, jnp.floating):
                raise Damaged(f"{api}: {path} is damaged: {name!r} is {describe(array)}.")
            return _finite(array, name)

        def _finite(array: jax.Array, name: str) -> jax.Array:
            if not jnp.isfinite(array).all():
                what = f"{api}: {name!r} of {path} has numbers that are not finite"
                raise ValueError(f"{what}; fit the distribution anew.")
            return array

        try:
            entries = parse_json(bytes(read_array(api, file, path, "about")))
            if (version := entries.get("version")) != _VERSION:
                this = f"version {version} of the format, but plurax {__version__} reads version {_VERSION}"
                raise OtherVersion(f"{api}: {path} has {this}; use a release that reads version {version}.")
            about = decode(_About, entries, "about")
        except OtherVersion:
            raise
        except ValueError as error:
            raise Damaged(f"{api}: {path} is damaged: {error}.") from error
        if about.params != len(like):
            raise ValueError(f"{api}: {path} has {about.params} arrays of parameters, but params has {len(like)}.")
        params = []
        for i, old in enumerate(like):
            array = of(f"params.{i}")
            data = jax.eval_shape(jax.random.key_data, old) if is_key(old) else jax.typeof(old)
            if (array.shape, array.dtype) != (data.shape, data.dtype):
                raise ValueError(
                    f"{api}: array {i} of {path} is {describe(array)}, but that of params {describe(old)}."
                )
            params.append(jax.random.wrap_key_data(array, impl=jax.random.key_impl(old)) if is_key(old) else array)
        curvature: Any
        if about.blocks is None:
            vectors = of("vectors")
            if vectors.ndim != 2:
                raise Damaged(f"{api}: {path} is damaged: 'vectors' is {describe(vectors)}.")
            curvature = Spectrum(shaped("values", vectors.shape[:1]), _finite(vectors, "vectors"), None)
        else:
            blocks = []
            for i, sides in enumerate(about.blocks):
                s, p, d = sides.sizes()
                left, right = shaped(f"left.{i}", (s, p, p), (s, p)), shaped(f"right.{i}", (s, d, d), (s, d))
                blocks.append(EigenBlock(sides.axes, sides.shape, left, right, shaped(f"values.{i}", (s, p, d))))
            curvature = KroneckerFactors(tuple(blocks), None)
        scalars = {name: shaped(name, ()) for name in ("prior_precision", "mean_loss")}
        if not scalars["prior_precision"] > 0:
            raise Damaged(f"{api}: {path} is damaged: 'prior_precision' is {scalars['prior_precision']}.")
        return about.size, params, curvature, scalars


def _array(api: str, path: Path, name: str, x: np.ndarray) -> jax.Array:
    """Return an array of JAX; raise if JAX would cut its numbers to 32 bits."""
    if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        raise ValueError(f"{api}: {name!r} of {path} has dtype {x.dtype}, which needs jax_enable_x64; enable it.")
    return jnp.asarray(x)
