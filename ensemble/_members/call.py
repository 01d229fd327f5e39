"""The call of all members, as one compiled program."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from ...transforms import vmap
from ...transforms._core.axes import axes_per_argument, broadcast_axes, mapped_size
from ...transforms._models.hashable import HashablePytree
from .sharding import Layout
from .strategy import in_turn


# The ensemble is typed as Any: `Ensemble.__call__` is written with this function, so its class is not known here.
@partial(jax.jit, static_argnums=(2, 3, 4))
def call_members(
    ens: Any, arrays: list[Any], static: HashablePytree, in_axes: HashablePytree, layout: Layout | None
) -> Any:
    """Return the outputs of all members, stacked along axis 0.

    Args:
      ens: the ensemble.
      arrays: the arrays of the arguments, from `HashablePytree.separate((args, kwargs))`.
      static: the rest of the arguments, likewise.
      in_axes: as `Ensemble.__call__` takes it, made hashable.
      layout: where the members are; None on one device.
    """
    args, kwargs = static.join(arrays)
    if in_axes.value is not None:
        axes = axes_per_argument("Ensemble", in_axes.value, args)
        # Configuration has no axis to map; only arrays do.
        mapped = {
            name: x for name, x in kwargs.items() if any(HashablePytree.is_array(leaf) for leaf in jax.tree.leaves(x))
        }

        def call_member(member: Any, /, *args: Any, **mapped: Any) -> Any:
            return member(*args, **{**kwargs, **mapped})

        # `vmap` checks too, but in its own name, and on a mesh with the sizes on one device.
        mapped_size("Ensemble", call_member, (None, *args), mapped, (None, *axes), 0, len(ens), "the number of members")

    if layout is not None:
        # Each device calls its own: left to itself the compiler would gather the members of convolutions.
        leaf_axes = broadcast_axes(None if in_axes.value is None else (axes, 0), (args, kwargs))
        named = zip(jax.tree.leaves((args, kwargs)), leaf_axes, strict=True)
        array_axes = [None if axis is None else axis % jnp.ndim(x) for x, axis in named if HashablePytree.is_array(x)]
        on_one = partial(call_members, static=static, in_axes=in_axes, layout=None)
        return layout.over_arrays(on_one, array_axes)(ens, arrays)

    def call(ens: Any, arrays: list[Any], chunk_size: int | None) -> Any:
        args, kwargs = static.join(arrays)
        if in_axes.value is None:
            return vmap(ens, None, chunk_size=chunk_size)(*args, **kwargs)
        own = {name: kwargs[name] for name in mapped}
        return vmap(call_member, (0, *axes), chunk_size=chunk_size)(ens, *args, **own)

    # The batched program says whether it has a convolution. Where it has none, it is executed as it was traced, so that
    # a member is not traced twice.
    batched, out = jax.make_jaxpr(partial(call, chunk_size=None), return_shape=True)(ens, arrays)
    if in_turn(batched.jaxpr, jax.default_backend()):
        return call(ens, arrays, 1)
    return jax.tree.unflatten(jax.tree.structure(out), jaxpr_as_fun(batched)(*jax.tree.leaves((ens, arrays))))
