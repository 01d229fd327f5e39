"""Call all members in one compiled program."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ...transforms._calls.explicit_sharding import divided_alike
from ...transforms._convolutions.as_products import products_unless_differentiated, run_where_slow
from ...transforms._core.axes import Axes, axes_per_argument, broadcast_axes, check_in_axes, mapped_size
from ...transforms._core.compat import jaxpr_as_fun
from ...transforms._core.target import platform
from ...transforms._models.hashable import HashablePytree
from ...transforms._models.mutation import call_with_models, refuse_changes
from ...transforms._models.split_model import split
from .sharding import ENSEMBLE, Layout, within
from .strategy import Execution, in_turn, over_members


# The ensemble is typed as Any, since `ensemble.py` imports this file.
def call_members(ens: Any, programs: dict[Any, Callable[..., Any]], args: Any, kwargs: Any, in_axes: Axes) -> Any:
    """Return the outputs of all members, stacked along axis 0.

    Args:
      ens: the ensemble.
      programs: the compiled programs of its earlier calls on one device, by the kind of their arguments.
      args: the positional arguments.
      kwargs: the keyword arguments.
      in_axes: the axes of the arguments, as for `Ensemble.__call__`.
    """
    # The checks of a call take longer than a small program, so a later call of the same kind skips them.
    plain = in_axes is None or type(in_axes) is int
    flat = in_axes, *map(type, args)
    if plain and not kwargs and (known := programs.get(flat)):
        return known(ens.trainable, ens.rest, ens.shared, list(args))
    leaves, treedef = jax.tree.flatten((args, kwargs))
    kind = treedef, in_axes, *map(type, leaves)
    if plain and (known := programs.get(kind)):
        return known(ens.trainable, ens.rest, ens.shared, leaves)
    check_in_axes("Ensemble", in_axes)
    ens._check_intact()
    arrays, static = HashablePytree.separate((args, kwargs))
    layout = Layout.around(ens)
    home = layout or Layout.home(ens)
    program = _program(jax.tree.structure(ens), static, HashablePytree.of(in_axes), layout)
    if home is None:
        out = program(ens.trainable, ens.rest, ens.shared, arrays)
        if plain and len(arrays) == len(leaves):
            is_flat = not kwargs and len(leaves) == len(args) and all(x is y for x, y in zip(leaves, args, strict=True))
            programs[flat if is_flat else kind] = program
        return out
    with within(home):
        arrays = list(map(layout.copy if layout else home.reach, arrays))
        return program(ens.trainable, ens.rest, ens.shared, arrays)


# A cached function, since `jax.jit` compares static arguments at every call, which takes longer than a small program.
@lru_cache(maxsize=4096)
def _program(
    ensemble: Any, static: HashablePytree, in_axes: HashablePytree, layout: Layout | None
) -> Callable[[Any, Any, Any, list[Any]], Any]:
    """Return the compiled program that calls all members.

    Args:
      ensemble: the tree structure of the ensemble.
      static: what is not an array among the arguments, from `HashablePytree.separate((args, kwargs))`.
      in_axes: the `in_axes` of `Ensemble.__call__`, made hashable.
      layout: the devices of the members; None on one device.

    Returns:
      A function of the trainable, the other and the shared arrays of the ensemble, and the arrays among the arguments,
      that returns the outputs of the members, stacked along axis 0.
    """
    return jax.jit(partial(_outputs, ensemble, static, in_axes, layout))


def _outputs(
    ensemble: Any,
    static: HashablePytree,
    in_axes: HashablePytree,
    layout: Layout | None,
    trainable: Any,
    rest: Any,
    shared: Any,
    arrays: list[Any],
) -> Any:
    ens = jax.tree.unflatten(ensemble, jax.tree.leaves((trainable, rest, shared)))
    args, kwargs = static.join(arrays)
    axes = axes_per_argument("Ensemble", in_axes.value, args)
    keyword_axis = None if in_axes.value is None else 0
    # Keyword arguments that are not arrays have no axis to map.
    mapped = jax.tree.map(lambda x: x if HashablePytree.is_array(x) else None, kwargs)
    size, what = len(ens), "the number of members"
    mapped_size("Ensemble", _evaluate, (None, *args), mapped, (None, *axes), keyword_axis, size, what)
    leaf_axes = zip(jax.tree.leaves((args, kwargs)), broadcast_axes((axes, keyword_axis), (args, kwargs)), strict=True)
    array_axes = [axis and axis % jnp.ndim(x) for x, axis in leaf_axes if HashablePytree.is_array(x)]

    def call_member(own: Any, shared: Any, arrays: list[Any]) -> Any:
        """Return the output of one member; raise if the call changes its state."""
        member = jax.tree.unflatten(ensemble, jax.tree.leaves((own, shared)))
        arguments = (split(member.__plurax_member__()), *static.join(arrays))
        out, models = call_with_models(_evaluate, arguments)
        lost, members = "which would be lost", range(len(models))
        refuse_changes("Ensemble: a call", _evaluate, arguments, models, lost, _keeping, members=members)
        return out

    def call(*of_members: Any) -> Any:
        """Return the outputs of the members of one device, from own and shared arrays and arguments."""
        members = len(jax.tree.leaves(of_members[0])[0])

        def executed(fun: Callable[..., Any], strategy: str) -> Any:
            return over_members(fun, Execution(strategy), (0, None, array_axes), members)

        # The batched program shows whether there is a convolution. If not, the traced program is executed, so that a
        # member is not traced twice.
        batched, out = jax.make_jaxpr(executed(call_member, "vmap"), return_shape=True)(*of_members)
        if in_turn(batched.jaxpr, platform()):
            return executed(products_unless_differentiated(call_member, run_where_slow), "map")(*of_members)
        return jax.tree.unflatten(jax.tree.structure(out), jaxpr_as_fun(batched)(*jax.tree.leaves(of_members)))

    own = ens.trainable, ens.rest

    if layout is None:
        # Explicit sharding is part of an array's type, and JAX requires mapped axes to have the same sharding.
        leaves, treedef = jax.tree.flatten((own, ens.shared, arrays))
        count = len(jax.tree.leaves(ens.shared))
        leaves, _ = divided_alike(leaves, [0] * len(jax.tree.leaves(own)) + [None] * count + array_axes)
        return call(*jax.tree.unflatten(treedef, leaves))
    # Each device calls its own members: without `shard_map` the compiler would gather the members for convolutions.
    specs = [P() if axis is None else P(*[None] * axis, ENSEMBLE) for axis in array_axes]
    return layout.on_each(call, P(ENSEMBLE), P(), specs)(own, ens.shared, arrays)


def _keeping(*_: Any) -> list[str]:
    """Return the remedy that works for every state: a map that returns the members, as an ensemble."""
    return ["return the members: plurax.transforms.vmap(lambda member, x: (member, member(x)), (0, None))(ensemble, x)"]


def _evaluate(model: Any, /, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)
