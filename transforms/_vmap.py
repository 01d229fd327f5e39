"""`vmap`: one function for many inputs, or for many models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from ._calls.chunk import map_in_chunks, map_parts_in_chunks
from ._calls.explicit_sharding import divided_alike
from ._core.arguments import argument_name, check_callable, check_count, leaf_name, transform_of, wrap_like
from ._core.axes import Axes, axes_per_argument, broadcast_axes, check_axes, check_in_axes, check_out_axes, mapped_size
from ._core.memory import check_budget, chunk_within
from ._models.mutation import call_with_models, refuse_changes
from ._models.split_model import (
    SplitModel,
    bound_model,
    is_members,
    is_model,
    is_split,
    merge_tree,
    models_of,
    refuse_shared_state,
    split,
    splits_of,
)

P = ParamSpec("P")
R = TypeVar("R")


def vmap(
    fun: Callable[P, R],
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    *,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Callable[P, R]:
    """Map `fun` over an axis of its arguments.

    As `jax.vmap`, but the arguments are checked by name before anything is traced, modules and ensembles take part,
    and `chunk_size` bounds the memory.

    Args:
      fun: a function, a bound method, a Flax NNX module, or an ensemble. A module's parameters are free variables: they
        are not mapped. An ensemble's members are mapped: `in_axes=None` passes the same arguments to each, an int one
        slice each.
      in_axes: an int, None (shared), or a tuple or list with one entry for each positional argument: an int, None, or a
        nested container of them that is a prefix of the argument. Negative axes count from the end. An ensemble as an
        argument takes 0, and `fun` receives each member as an ordinary model; or None, and it receives the ensemble.
        Keyword arguments are mapped over axis 0, as `jax.vmap` does; they are shared where an ensemble is `fun` and
        `in_axes` is None.
      out_axes: where the mapped axis goes in each output: an int, None (for an output that does not depend on the
        mapped arguments), or a prefix of the output with them. A model that `fun` returns is stacked along axis 0: a
        member of an ensemble argument, or a model of its structure, comes back as an ensemble, any other module as a
        module with stacked arrays.
      axis_name: a name for the mapped axis, for collectives such as `jax.lax.psum`; not together with `chunk_size`.
      axis_size: the size of the mapped axis, needed only where nothing is mapped.
      spmd_axis_name: as for `jax.vmap`.
      chunk_size: how many slices to map at a time; None maps all at once. The results are the same for every value,
        and are written in place. Where the axis is divided over explicit axes of a mesh, each device maps its share of
        them.
      memory_budget: in place of `chunk_size`: bytes, or a string such as "512MiB" (1024 * 1024 bytes each), "2GB"
        (1000**3) or "1e9", in letters of either case. The largest chunk is taken whose temporaries, as the compiler
        counts them besides arguments and results, fit into it. Inside another `vmap`, a loop or a derivative it bounds
        the temporaries of one slice, iteration or evaluation, with a warning.

    Returns:
      A function of the same arguments, whose outputs have the mapped axis at `out_axes`.

    Raises:
      TypeError: `fun` is not callable; an axis, `axis_size` or `chunk_size` is not an integer; `in_axes` is a dict.
      ValueError: an axis is out of range; `in_axes` or `out_axes` does not fit the structure; mapped sizes differ;
        nothing is mapped and there is no `axis_size`; `chunk_size` is below 1, or given with `axis_name`; the axis of
        an ensemble, or of a model in the output, is not 0; a model would change its own state (BatchNorm in training,
        dropout) and is not returned; models share a variable.

    Warns:
      UserWarning: a memory budget inside another `vmap`, a loop or a derivative, where the whole program may need more.

    Cost:
      One evaluation of `fun` on all slices. With `chunk_size=k` the temporaries are those of k slices, besides the
      result; reverse-mode differentiation still saves its residuals for all of them unless `fun` is under
      `jax.checkpoint`. Outside `jit` every call with chunks compiles anew (about 0.1 s): wrap it in `jax.jit`.

    Source:
      `jax.vmap`; MindSpore's `vmap` over a `CellList`; `torch.func.vmap(chunk_size=)`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import vmap
      >>> vmap(jnp.dot, in_axes=(0, None))(jnp.eye(2, 3), jnp.arange(3.0))
      Array([0., 1.], dtype=float32)
      >>> vmap(jnp.sin, chunk_size=2)(jnp.zeros(5)).shape
      (5,)
    """
    return vmap_of("vmap", fun, in_axes, out_axes, axis_name, axis_size, spmd_axis_name, chunk_size, memory_budget)


def vmap_of(
    api: str,
    fun: Callable[..., Any],
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Callable[..., Any]:
    """Map `fun` as `vmap` does, for any transform, which `api` names in errors."""
    check_callable(api, fun)
    in_axes = check_in_axes(api, in_axes)
    out_axes = check_axes(api, "out_axes", out_axes)
    check_count(api, "axis_size", axis_size, 0, optional=True)
    check_count(api, "chunk_size", chunk_size, optional=True)
    budget = check_budget(api, memory_budget, chunk_size)
    if axis_name is not None and (chunk_size is not None or budget is not None):
        limit = "chunk_size" if budget is None else "memory_budget"
        raise ValueError(f"{api}: with {limit}, a collective over axis_name would see one chunk only; leave one out.")
    # A model that is `fun` is one more argument, the owner: its arrays are shared, those of an ensemble mapped.
    owner, function = bound_model(fun)
    owner_axis, expected, given_by = None, axis_size, "axis_size"
    if is_members(fun):
        owner_axis, expected, given_by = 0, len(owner), "the number of members"
        if axis_size not in (None, expected):
            raise ValueError(f"{api}: axis_size={axis_size}, but the ensemble has {expected} members; leave it out.")
    # As by `jax.vmap`; but in_axes=None for an ensemble passes each member the same arguments, those by keyword too.
    keyword_axis = None if owner_axis == 0 and in_axes is None else 0

    names = {"axis_name": axis_name, "spmd_axis_name": spmd_axis_name}

    def mapped(*args: Any, **kwargs: Any) -> Any:
        """Map `fun` over the slices of these arguments."""
        argument_axes = axes_per_argument(api, in_axes, args)
        for ensemble in filter(is_members, models_of((args, kwargs))):
            len(ensemble)  # raises if its axis 0 is not its members
        refuse_shared_state(api, fun, owner, args, kwargs)
        size = mapped_size(api, fun, args, kwargs, argument_axes, keyword_axis, expected, given_by)
        _check_model_axes(api, fun, args, argument_axes)
        axes = (owner_axis, argument_axes, keyword_axis)
        leaves, treedef = jax.tree.flatten(_split_models((owner, args, kwargs)))
        # Explicit sharding is part of an array's type, and JAX maps arrays of one type of axis only.
        leaves, parts = divided_alike(leaves, broadcast_axes(axes, jax.tree.unflatten(treedef, leaves)))
        arrays = jax.tree.unflatten(treedef, leaves)

        def of_slice(owner: Any, args: Any, kwargs: Any) -> Any:
            return _evaluate_slice(api, function, (owner, args, kwargs), axes, out_axes)

        def over_slices(size: int) -> Callable[..., Any]:
            return jax.vmap(of_slice, axes, out_axes, axis_size=size, **names)

        def in_chunks(chunk: int | None) -> Any:
            if chunk is None or chunk >= size:
                return over_slices(size)(*arrays)
            if parts > 1:
                return map_parts_in_chunks(over_slices, arrays, axes, out_axes, size, parts, chunk)
            return map_in_chunks(over_slices, arrays, axes, out_axes, size, chunk)

        try:
            # For a budget `in_chunks` is compiled with several chunks; the one that is taken was found to fit.
            return merge_tree(in_chunks(chunk_size if budget is None else chunk_within(api, in_chunks, size, budget)))
        except Exception as error:
            # The error is the model's own, about shapes, and names neither `vmap` nor what to write instead.
            if getattr(fun, "__name__", "").startswith(("grad(", "value_and_grad(")) and transform_of(fun):
                batched = tuple(i for i, axes in enumerate(argument_axes) if axes is not None)
                instead = f"plurax.transforms.per_sample_grad(loss, batch_argnums={batched})"
                error.add_note(f"{api}: each slice is one sample; if the loss needs an axis of samples, use {instead}.")
            raise

    options = in_axes, out_axes, axis_name, axis_size, spmd_axis_name, chunk_size, memory_budget
    return wrap_like(fun, api, mapped, lambda fun: vmap_of(api, fun, *options))


def _is_stacked(x: Any) -> bool:
    return is_split(x) or is_members(x)


def _split_models(tree: Any) -> Any:
    """Return `tree` with every model in it split; ensembles stay, as the pytrees of arrays that they are."""
    return jax.tree.map(lambda x: x if is_members(x) or not is_model(x) else split(x), tree, is_leaf=is_model)


def _check_model_axes(api: str, fun: Callable[..., Any], args: tuple[Any, ...], axes: tuple[Axes, ...]) -> None:
    """Raise if a model has more than one axis for all of it, or an ensemble another one than that of its members."""
    for i, (value, axes_of_value) in enumerate(zip(args, axes, strict=True)):
        if models_of(axes_of_value):
            name = argument_name(fun, args, i)
            raise ValueError(f"{api}: in_axes for `{name}` reaches into a model; give one axis for all of it.")
        leaf_axes = broadcast_axes(axes_of_value, value, is_leaf=is_model)
        for (path, leaf), axis in zip(jax.tree.leaves_with_path(value, is_leaf=is_model), leaf_axes, strict=True):
            if is_members(leaf) and axis not in (0, None):
                name = leaf_name(argument_name(fun, args, i), path)
                cure = "whose members are its axis 0; pass 0 to map over them, or None to hand on all of it"
                raise ValueError(f"{api}: in_axes is {axis} for the ensemble `{name}`, {cure}.")


def _evaluate_slice(api: str, function: Callable[..., Any], arrays: Any, axes: Any, out_axes: Axes) -> Any:
    """Evaluate `function` on one slice: models are merged for it, and those that it returns are split."""
    leaves, treedef = jax.tree.flatten(arrays, is_leaf=_is_stacked)
    ensembles: list[tuple[Any, SplitModel]] = []
    for i, axis in enumerate(broadcast_axes(axes, arrays, is_leaf=_is_stacked)):
        ensemble = leaves[i]
        if is_members(ensemble):
            leaves[i] = split(ensemble if axis is None else ensemble.__plurax_member__())
            if axis is not None:
                ensembles.append((ensemble, leaves[i]))
    arguments = jax.tree.unflatten(treedef, leaves)
    out, models = call_with_models(function, arguments)
    # There is one model after the map: what each slice has done to it would be lost, unless it is an output.
    why = "which would be lost; return the model as well, or map"
    refuse_changes(f"{api}: the mapped function", function, arguments, models, why, returned=models_of(out))
    # `call_with_models` returns models in the order of their splits: so each member's split finds its model.
    befores = splits_of(arguments)
    members = [(ensemble, before.structure, models[befores.index(before)]) for ensemble, before in ensembles]

    def split_output(x: Any) -> Any:
        """Return a model as an ensemble if it has the structure of a member, and otherwise split."""
        if not is_model(x):
            return x
        if is_members(x):
            cure = "return its arrays or outputs, or map over its members with in_axes=0"
            raise ValueError(f"{api}: the mapped function returns a whole ensemble, which cannot be stacked; {cure}.")
        parts = split(x)
        for ensemble, structure, member in members:
            if x is member or parts.structure == structure:
                return ensemble.__plurax_stack__(x)
        return parts

    out = jax.tree.map(split_output, out, is_leaf=is_model)
    check_out_axes(api, out_axes, out, _is_stacked)
    return out
