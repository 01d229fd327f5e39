"""`vmap`: map one function over many inputs, or over many models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import jax

from ._calls.chunk import map_in_chunks, map_parts_in_chunks
from ._calls.explicit_sharding import divided_alike
from ._calls.plain import plain_size
from ._core.arguments import argument_name, check_callable, check_count, leaf_name, transform_of, wrap_like
from ._core.axes import Axes, axes_per_argument, broadcast_axes, check_axes, check_in_axes, check_out_axes, mapped_size
from ._core.memory import check_budget, chunk_within
from ._models.mutation import call_with_models, refuse_changes, update, with_changes
from ._models.split_model import (
    ModuleStructure,
    SplitModel,
    bound_model,
    is_members,
    is_model,
    is_module,
    is_split,
    merge_tree,
    models_of,
    refuse_shared_state,
    split,
    splits_of,
    with_splits,
    without_shared,
)
from ._models.streams import check_filter, split_streams

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
    split_rngs: Any = False,
) -> Callable[P, R]:
    """Map `fun` over an axis of its arguments.

    As `jax.vmap`, but arguments are checked before tracing and errors name them, Flax modules and ensembles are
    accepted, and `chunk_size` bounds the memory.

    Args:
      fun: a function, a bound method, a Flax NNX module, or an ensemble. A module's parameters are free variables: they
        are not mapped. An ensemble's members are mapped: `in_axes=None` passes the same arguments to each member, an
        int passes one slice to each.
      in_axes: an int, None (shared), or a tuple or list with one entry for each positional argument: an int, None, or a
        nested container of them that is a prefix of the argument. Negative axes count from the end. For an ensemble
        argument, 0 passes each member to `fun` as an ordinary model, and None passes the whole ensemble.
        Keyword arguments are mapped over axis 0, as in `jax.vmap`; if `fun` is an ensemble and `in_axes` is None, they
        are shared.
      out_axes: the position of the mapped axis in each output: an int, None (for an output that does not depend on the
        mapped arguments), or a prefix of the output with these as leaves. Models that `fun` returns are stacked along
        axis 0. A member of an ensemble argument, or a model of the same structure, is returned as an ensemble, any
        other module as a module with stacked arrays.
      axis_name: a name for the mapped axis, for collectives such as `jax.lax.psum`; not with `chunk_size` or
        `memory_budget`.
      axis_size: the size of the mapped axis, needed only where nothing is mapped.
      spmd_axis_name: as for `jax.vmap`.
      chunk_size: the number of slices to map at a time; None maps all at once. The results are the same for every
        value, and are written in place. If the axis is sharded over explicit axes of a mesh, each device maps an equal
        share of each chunk.
      memory_budget: an alternative to `chunk_size`: bytes, or a string such as "512MiB" (1024 * 1024 bytes each), "2GB"
        (1000**3) or "1e9", in upper or lower case. `vmap` takes the largest chunk whose temporaries fit, as reported by
        the compiler; arguments and results are not counted. Inside another `vmap`, a loop or a derivative the budget
        bounds the temporaries of one slice, iteration or evaluation, and a warning is given.
      split_rngs: whether each slice draws random numbers of its own from Flax modules that are not mapped, `fun`
        included: False, True, or an NNX filter that selects random streams, such as "dropout". As with
        `nnx.split_rngs`, a selected stream advances once, in the module that was passed and in a returned one, and the
        key that it draws is split into one for each slice, the same for every `chunk_size` (threefry keys, JAX's
        default). Streams that are not selected give the same numbers to every slice.

    Returns:
      A function of the same arguments, whose outputs have the mapped axis at `out_axes`.

    Raises:
      TypeError: `fun` is not callable; an axis, `axis_size` or `chunk_size` is not an integer; `in_axes` is a dict;
        `split_rngs` is not a filter.
      ValueError: an axis is out of range; `in_axes` or `out_axes` does not fit the structure; mapped sizes differ;
        nothing is mapped and there is no `axis_size`; `chunk_size` is below 1; `chunk_size` or `memory_budget` is given
        with `axis_name`, or both are given; no chunk fits into `memory_budget`; the axis of an ensemble, or of a model
        in the output, is not 0; a model would change its own state (BatchNorm in training, dropout without
        `split_rngs`) and is not returned; models share a variable; `split_rngs` is a filter that selects no stream, or
        it selects a stack of streams; a module whose streams would advance is closed over by a function under JAX.

    Warns:
      UserWarning: `memory_budget` is used inside another `vmap`, a loop or a derivative, so the whole program may need
        more.

    Cost:
      One evaluation of `fun` on all slices. With `chunk_size=k`, memory for the result and the temporaries of k slices;
      reverse-mode differentiation still saves residuals for all slices unless `fun` is wrapped in `jax.checkpoint`.
      Outside `jit`, every call with chunks compiles again (about 0.1 s): wrap the mapped function in `jax.jit`.

    Source:
      `jax.vmap`; MindSpore's `vmap` over a `CellList`; `torch.func.vmap(chunk_size=)`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import vmap
      >>> vmap(jnp.dot, in_axes=(0, None))(jnp.eye(2, 3), jnp.arange(3.0))
      Array([0., 1.], dtype=float32)
      >>> vmap(jnp.sin, chunk_size=2)(jnp.zeros(5)).shape
      (5,)

      Dropout with a mask for each slice:

      >>> from flax import nnx
      >>> drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
      >>> vmap(drop, split_rngs=True)(jnp.ones((2, 4)))
      Array([[2., 2., 2., 0.],
             [0., 2., 2., 0.]], dtype=float32)
    """
    options = axis_name, axis_size, spmd_axis_name, chunk_size, memory_budget, split_rngs
    return vmap_of("vmap", fun, in_axes, out_axes, *options)


def vmap_of(
    api: str,
    fun: Any,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
    split_rngs: Any = False,
) -> Callable[..., Any]:
    """Map `fun` as `vmap` does, on behalf of the transform that `api` names in errors."""
    if isinstance(fun, Sequence) and fun and all(map(is_model, fun)):
        cure = "pass plurax.ensemble.Ensemble.stack([*models]), with in_axes=None if all get the same input"
        raise TypeError(f"{api}: fun is a {type(fun).__name__} of {len(fun)} models; to map over models, {cure}.")
    check_callable(api, fun)
    in_axes = check_in_axes(api, in_axes)
    out_axes = check_axes(api, "out_axes", out_axes)
    check_count(api, "axis_size", axis_size, 0, optional=True)
    check_count(api, "chunk_size", chunk_size, optional=True)
    budget = check_budget(api, memory_budget, chunk_size)
    check_filter(api, split_rngs)
    if axis_name is not None and (chunk_size is not None or budget is not None):
        limit = "chunk_size" if budget is None else "memory_budget"
        raise ValueError(f"{api}: with {limit}, a collective over axis_name would see only one chunk; leave one out.")
    # If `fun` is a model, the model is passed as one more argument, the owner: shared, or mapped if it is an ensemble.
    owner, function = bound_model(fun)
    owner_axis, expected, given_by = None, axis_size, "axis_size"
    if is_members(fun):
        owner_axis, expected, given_by = 0, len(owner), "the number of members"
        if axis_size not in (None, expected):
            raise ValueError(f"{api}: axis_size={axis_size}, but the ensemble has {expected} members; leave it out.")
    # As in `jax.vmap`, except that in_axes=None for an ensemble shares all arguments, keyword arguments included.
    keyword_axis = None if owner_axis == 0 and in_axes is None else 0

    names = {"axis_name": axis_name, "spmd_axis_name": spmd_axis_name}
    whole = owner is None and axis_size is None and chunk_size is None and budget is None and split_rngs is False

    def of_plain_slice(*args: Any) -> Any:
        out = fun(*args)
        if out_axes == 0 and isinstance(out, jax.Array):
            return out
        return _split_output(api, out, [], out_axes)

    def mapped(*args: Any, **kwargs: Any) -> Any:
        """Map `fun` over the slices of these arguments."""
        argument_axes = axes_per_argument(api, in_axes, args)
        if whole and not kwargs and plain_size(args, argument_axes) is not None:
            with _suggesting(api, fun, argument_axes):
                return merge_tree(jax.vmap(of_plain_slice, argument_axes, out_axes, **names)(*args))
        for ensemble in filter(is_members, models_of((args, kwargs))):
            len(ensemble)  # raises unless axis 0 indexes the members
        refuse_shared_state(api, fun, owner, args, kwargs)
        own, own_kwargs = without_shared((args, kwargs))
        _check_model_axes(api, fun, args, argument_axes)
        size = mapped_size(api, fun, own, own_kwargs, argument_axes, keyword_axis, expected, given_by)
        axes = (owner_axis, argument_axes, keyword_axis)
        before = _split_models((owner, args, kwargs))
        divided, advanced = _split_rngs(api, before, axes, size, split_rngs)
        leaves, treedef = jax.tree.flatten(divided)
        # The arrays of streams are new ones if the streams were split, and then they have an axis of slices.
        both = zip(jax.tree.leaves(before), leaves, _leaf_axes(axes, before), strict=True)
        leaf_axes = [axis if x is y else 0 for x, y, axis in both]
        # Explicit sharding is part of an array's type, and JAX maps only arrays whose mapped axes are sharded alike.
        leaves, parts = divided_alike(leaves, leaf_axes)
        arrays = jax.tree.unflatten(treedef, leaves)
        # Otherwise a prefix: JAX maps some pytrees, such as `BCOO`, as one leaf.
        shares = leaf_axes != broadcast_axes(axes, arrays)
        array_axes = jax.tree.unflatten(treedef, leaf_axes) if shares else axes

        def of_slice(owner: Any, args: Any, kwargs: Any) -> Any:
            return _evaluate_slice(api, function, (owner, args, kwargs), axes, out_axes, advanced)

        def over_slices(size: int) -> Callable[..., Any]:
            return jax.vmap(of_slice, array_axes, out_axes, axis_size=size, **names)

        def in_chunks(chunk: int | None) -> Any:
            if chunk is None or chunk >= size:
                return over_slices(size)(*arrays)
            if parts > 1:
                return map_parts_in_chunks(over_slices, arrays, array_axes, out_axes, size, parts, chunk)
            return map_in_chunks(over_slices, arrays, array_axes, out_axes, size, chunk)

        with _suggesting(api, fun, argument_axes):
            # For a budget, `in_chunks` is compiled with several chunk sizes until the largest that fits is found.
            out = merge_tree(in_chunks(chunk_size if budget is None else chunk_within(api, in_chunks, size, budget)))
        _advance(api, models_of((owner, args, kwargs)), advanced)
        return out

    options = in_axes, out_axes, axis_name, axis_size, spmd_axis_name, chunk_size, memory_budget, split_rngs
    return wrap_like(fun, api, mapped, lambda fun: vmap_of(api, fun, *options))


@contextmanager
def _suggesting(api: str, fun: Callable[..., Any], axes: Sequence[Axes]) -> Iterator[None]:
    """Add a remedy to an error of a mapped gradient."""
    try:
        yield
    except Exception as error:
        # Such an error comes from the model and is about shapes: it names neither `vmap` nor the remedy.
        if getattr(fun, "__name__", "").startswith(("grad(", "value_and_grad(")) and transform_of(fun):
            batched = tuple(i for i, axis in enumerate(axes) if axis is not None)
            instead = f"plurax.transforms.per_sample_grad(loss, batch_argnums={batched}) with the same argnums"
            cure = f"add one, as in x[None], or, if what is differentiated is not mapped, use {instead}"
            error.add_note(f"{api}: each slice is one sample; if the loss needs a batch axis, {cure}.")
        raise


def _is_stacked(x: Any) -> bool:
    return is_split(x) or is_members(x)


def _split_models(tree: Any) -> Any:
    """Return `tree` with every model in it split; ensembles stay as they are, since they are pytrees of arrays."""
    return jax.tree.map(lambda x: x if is_members(x) or not is_model(x) else split(x), tree, is_leaf=is_model)


def _leaf_axes(axes: Axes, tree: Any) -> list[int | None]:
    """Return the axis of each array; None for those that all members of an ensemble share."""
    found: list[int | None] = []
    for x, axis in zip(
        jax.tree.leaves(tree, is_leaf=is_members), broadcast_axes(axes, tree, is_leaf=is_members), strict=True
    ):
        own = len(jax.tree.leaves(without_shared(x)))
        found += [axis] * own + [None] * (len(jax.tree.leaves(x)) - own)
    return found


def _check_model_axes(api: str, fun: Callable[..., Any], args: tuple[Any, ...], axes: tuple[Axes, ...]) -> None:
    """Raise if `in_axes` gives several axes for one model, or maps an ensemble over an axis other than 0."""
    for i, (value, axes_of_value) in enumerate(zip(args, axes, strict=True)):
        if models_of(axes_of_value):
            name = argument_name(fun, args, i)
            raise ValueError(f"{api}: in_axes for `{name}` has axes within a model; give one axis for all of it.")
        try:
            leaf_axes = broadcast_axes(axes_of_value, value, is_leaf=is_model)
        except (ValueError, TypeError, KeyError):  # no prefix, which `mapped_size` says
            continue
        for (path, leaf), axis in zip(jax.tree.leaves_with_path(value, is_leaf=is_model), leaf_axes, strict=True):
            if is_members(leaf) and axis not in (0, None):
                name = leaf_name(argument_name(fun, args, i), path)
                cure = "whose members are along axis 0; pass 0 to map over them, or None to pass the whole ensemble"
                raise ValueError(f"{api}: in_axes is {axis} for the ensemble `{name}`, {cure}.")


def _split_rngs(api: str, models: Any, axes: Any, size: int, only: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Split the random streams of modules that are not mapped, one for each slice.

    Args:
      api: the transform's name in errors.
      models: the owner, the arguments and the keyword arguments, with split models.
      axes: their axes.
      size: the number of slices.
      only: the argument `split_rngs` of `vmap`.

    Returns:
      The same with split streams, and for each model, ensembles included, the arrays of its streams after the map.
    """
    leaves, treedef = jax.tree.flatten(models, is_leaf=_is_stacked)
    advanced: list[dict[str, Any]] = []
    for i, axis in enumerate(broadcast_axes(axes, models, is_leaf=_is_stacked)):
        if not _is_stacked(leaves[i]):
            continue
        advanced.append({})
        if only is not False and axis is None and isinstance(getattr(leaves[i], "structure", None), ModuleStructure):
            leaves[i], advanced[-1] = split_streams(api, leaves[i], size, only)
    if only not in (True, False) and not any(advanced):
        what = f"split_rngs={only!r} selects no random stream of a module that is not mapped"
        raise ValueError(f"{api}: {what}; pass True for all streams, or False.")
    return jax.tree.unflatten(treedef, leaves), advanced


def _advance(api: str, models: Sequence[Any], advanced: Sequence[dict[str, Any]]) -> None:
    """Write these arrays of their random streams into models, in place."""
    if not any(advanced):
        return
    pairs = [(model, arrays) for model, arrays in zip(models, advanced, strict=True) if arrays]
    before = [split(model) for model, _ in pairs]
    update(api, [model for model, _ in pairs], before, with_changes(before, [arrays for _, arrays in pairs]))


def _evaluate_slice(
    api: str,
    function: Callable[..., Any],
    arrays: Any,
    axes: Any,
    out_axes: Axes,
    advanced: Sequence[dict[str, Any]],
) -> Any:
    """Evaluate `function` on one slice: merge the models for it, and split the models that it returns."""
    leaves, treedef = jax.tree.flatten(arrays, is_leaf=_is_stacked)
    ensembles: list[tuple[Any, SplitModel]] = []
    mapped: list[bool] = []
    for i, axis in enumerate(broadcast_axes(axes, arrays, is_leaf=_is_stacked)):
        if not _is_stacked(leaves[i]):
            continue
        mapped.append(axis is not None)
        ensemble = leaves[i]
        if is_members(ensemble):
            leaves[i] = split(ensemble if axis is None else ensemble.__plurax_member__())
            if axis is not None:
                ensembles.append((ensemble, leaves[i]))
    arguments = jax.tree.unflatten(treedef, leaves)
    out, models = call_with_models(function, arguments)
    befores = splits_of(arguments)

    def remedies(i: int, drawn: bool, other: bool) -> list[str]:
        """Return what to do about changes that random draws from a model have made, and other changes of it."""
        if api != "vmap":
            return []
        returned = ["return the model as well"] if mapped[i] or other or not is_module(models[i]) else []
        own = ["pass split_rngs=True, so that each slice draws its own numbers"]
        return [" and ".join(returned + (own if drawn and not mapped[i] and is_module(models[i]) else []))]

    # Split streams are as after the map, in models that are returned too. Other changes that each slice makes are lost
    # unless the model is an output, since after the map there is only one model.
    _advance(api, models, advanced)
    settled = with_splits(arguments, with_changes(befores, advanced))
    who, why = f"{api}: the mapped function", "which would be lost"
    # `call_with_models` returns models in the order of their splits, so the index of a member's split is its model's.
    places = [befores.index(before) for _, before in ensembles]
    refuse_changes(who, function, settled, models, why, remedies, models_of(out), places)
    members = [(ensemble, before.structure, models[i]) for (ensemble, before), i in zip(ensembles, places, strict=True)]
    return _split_output(api, out, members, out_axes)


def _split_output(api: str, out: Any, members: Sequence[tuple[Any, Any, Any]], out_axes: Axes) -> Any:
    """Return the output for one slice with split models; raise if `out_axes` does not fit it.

    Args:
      api: the transform's name in errors.
      out: the output.
      members: for each ensemble whose members are mapped, the ensemble, and the structure and the model of a member.
      out_axes: as for `vmap`.
    """

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
