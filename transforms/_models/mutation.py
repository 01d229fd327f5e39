"""Find, check and write back the state that a call changes in its models.

Changes are detected by identity: an array that a traced function does not change is the same object afterwards. Inner
transforms of NNX return every array as a new object; then the program of the call decides which arrays it passes
through unchanged (`passing_through`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import jax

from .._core.compat import Literal, needed, scan_counts
from .._core.jaxpr import CALLS, IDENTITIES, aval, called, interpret
from .hashable import HashablePytree
from .split_model import (
    SplitModel,
    array_name,
    is_module,
    merge_tree,
    models_of,
    named_arrays,
    split,
    splits_of,
    with_splits,
)

# Flax's `nnx.WeightNorm` assigns the normalized weights in each call.
NO_ASSIGNMENT = (
    "keep values that fun computes in another kind of variable, such as nnx.BatchStat, or, if they need not be kept, "
    "call a copy of the model, nnx.clone(model)"
)


def call_with_models(function: Callable[..., Any], arguments: Any) -> tuple[Any, list[Any]]:
    """Return `function(owner, *args, **kwargs)`, and the models merged for it, in the order in which they were split.

    `arguments` is the triple of `owner`, `args` and `kwargs`, with split models.
    """
    # `function` receives merged copies, which contain its assignments afterwards. The user's models do not change until
    # the caller knows that the whole call has succeeded.
    owner, args, kwargs = merged = merge_tree(arguments)
    out = function(owner, *args, **kwargs)
    return out, models_of(merged)


def call_purely(
    api: str, function: Callable[..., Any], arguments: Any, *, may_assign: bool = False
) -> tuple[Any, list[dict[str, Any]]]:
    """Return `function(owner, *args, **kwargs)`, and for each model the arrays that it has changed, by dotted path.

    Raises:
      ValueError: the call changes the structure of a model, or assigns a trainable array (allowed in modules with
        `may_assign`).
    """
    out, models = call_with_models(function, arguments)
    changed = []
    for model, before, paths in zip(models, splits_of(arguments), changes(function, arguments, models), strict=True):
        after = split(model)
        check_structure(f"{api}: fun", type(model).__name__, before, after)
        assigned = set(paths) & set(named_arrays(after.trainable))
        if assigned and not (may_assign and is_module(model)):
            fact = f"fun assigns the parameter `{min(assigned)}`, but all calls share it"
            raise ValueError(f"{api}: {fact}; {NO_ASSIGNMENT}.")
        changed.append({path: array for path, array in after.arrays().items() if path in paths})
    return out, changed


def check_structure(who: str, whose: str, before: SplitModel, after: SplitModel) -> None:
    """Raise if a call has added or removed variables of a model or changed its configuration."""
    if after.structure != before.structure:
        path = min(after.arrays().keys() ^ before.arrays().keys(), default="configuration")
        cure = "only values of variables may change; do not add variables (such as by sow) or change attributes"
        raise ValueError(f"{who} changes the structure of {whose} (`{path}`), but {cure}.")


def with_changes(parts: Sequence[SplitModel], changed: Sequence[dict[str, Any]]) -> list[SplitModel]:
    """Return split models with the changed arrays that `call_purely` returned put in place."""

    def put(before: SplitModel, new: dict[str, Any]) -> SplitModel:
        # No path is in both halves.
        put_half = partial(jax.tree.map_with_path, lambda path, x: new.get(array_name(path), x))
        halves = put_half(before.trainable), put_half(before.rest)
        return SplitModel(before.structure, *halves)

    return [put(before, new) for before, new in zip(parts, changed, strict=True)]


def update(
    api: str,
    models: Sequence[Any],
    before: Sequence[SplitModel],
    after: Sequence[SplitModel],
    passing: Callable[[], list[set[str]]] | None = None,
) -> None:
    """Write the differences between split models `before` and `after` a call into the models.

    Args:
      api: the transform's name in errors.
      models: the models.
      before: the models, split, in their current state.
      after: the models, split, in their new state.
      passing: returns the result of `passing_through` for the call; needed if unchanged arrays can be new objects.

    Raises:
      ValueError: a changed module was created outside a surrounding transform, where `nnx.update` would leave tracers
        in it. Nothing is written then.
    """
    changed = [then.changes(now) for then, now in zip(before, after, strict=True)]
    lost = next(filter(None, map(_out_of_reach, models, changed)), None)
    if lost and passing:
        # Perhaps nothing has really changed. To find out, the call is traced once more, which is slow.
        arrays = [parts.arrays() for parts in after]
        new = [{path: x for path, x in a.items() if path not in b} for a, b in zip(arrays, passing(), strict=True)]
        update(api, models, before, with_changes(before, new))
        return
    if lost:
        cure = "pass it as an argument of the outer transform, one of nnx or plurax"
        raise ValueError(f"{api}: the call changes {lost}, which is closed over by a function under JAX; {cure}.")
    for model, paths, now in zip(models, changed, after, strict=True):
        if not paths:
            continue
        if not is_module(model):
            model.__plurax_update__(now.rest)
            continue
        from flax import nnx

        nnx.update(model, now.trainable)
        nnx.update(model, now.rest)


def _out_of_reach(model: Any, paths: Sequence[str]) -> str | None:
    """Return the first variable with one of these arrays that Flax does not allow to be assigned in this trace."""
    if not paths or not is_module(model):
        return None
    from flax import errors, nnx

    for path, x in nnx.to_flat_state(nnx.state(model)):
        name = array_name(path)
        if not any(f"{changed}.".startswith(f"{name}.") for changed in paths):
            continue
        try:  # assigning the present value changes nothing, but makes Flax check the trace
            if isinstance(x, nnx.Variable):
                x.set_raw_value(x.get_raw_value())
            else:
                nnx.update(model, nnx.from_flat_state([(path, x)]))
        except errors.TraceContextError:
            return f"`{name}` of {type(model).__name__}"
    return None


def changes(
    function: Callable[..., Any],
    arguments: Any,
    models: list[Any],
    returned: Sequence[Any] = (),
    *,
    ignore_unused: bool = False,
) -> list[list[str]]:
    """Return for each of the `models` after a call the paths of changed arrays; none for models it has `returned`.

    With `ignore_unused`, counts of random streams are left out if no output depends on what was drawn.
    """
    found = [
        [] if any(x is model for x in returned) else before.changes(split(model))
        for before, model in zip(splits_of(arguments), models, strict=True)
    ]
    if any(found):
        kept = passing_through(function, arguments, ignore_unused=ignore_unused)
        found = [[path for path in paths if path not in same] for paths, same in zip(found, kept, strict=True)]
    return found


def refuse_changes(
    who: str,
    function: Callable[..., Any],
    arguments: Any,
    models: list[Any],
    why: str,
    remedies: Callable[[int, bool, bool], list[str]] = lambda *_: [],
    returned: Sequence[Any] = (),
    members: Collection[int] = (),
) -> None:
    """Raise if a call has changed the state of one of its models, except models that it has `returned`.

    The count of a random stream may change if no output depends on what was drawn from the stream in the call: an
    `nnx.RNN` draws keys for its initial carry, which is zero by default.

    Args:
      who: the call, as the subject of the error.
      function: as for `call_with_models`.
      arguments: as for `call_with_models`.
      models: the models after the call.
      why: what becomes of the changes.
      remedies: a function from the index of a model, whether its random streams have changed, and whether anything else
        has, to remedies besides the evaluation mode.
      returned: models that may change.
      members: the indices of models that are members of an ensemble.
    """
    found = changes(function, arguments, models, returned, ignore_unused=True)
    for i, (before, paths) in enumerate(zip(splits_of(arguments), found, strict=True)):
        if not paths:
            continue
        model = before.merge()
        drawn = random_state(model) & set(paths)
        view = "ensemble.view(" if i in members else "nnx.view(model, "
        cures = remedies(i, bool(drawn), len(drawn) < len(paths)) + _remedies(model, drawn, paths, view)
        cure = ", or ".join(cures or ["do not change it in this call"])
        raise ValueError(f"{who} changes the state of {type(model).__name__} (`{paths[0]}`), {why}; {cure}.")


def _remedies(model: Any, drawn: set[str], paths: Sequence[str], view: str) -> list[str]:
    """Return what keeps a call from changing these arrays of a model, of which it has `drawn` from random streams."""
    if not is_module(model):
        return []
    from flax import nnx

    nodes = list(nnx.iter_graph(model))
    asked = ["use_running_average"] * (len(drawn) < len(paths)) + ["deterministic"] * bool(drawn)
    modes = [f"{mode}=True" for mode in asked if any(_can_switch_on(mode, node) for _, node in nodes)]
    cures = [f"use its evaluation mode: {view}{', '.join(modes)})"] if modes else []
    recurrent = [path for path, node in nodes if isinstance(node, (nnx.RNN, nnx.Bidirectional))]
    if any(array_name((*path, "rngs", "count")) in drawn for path in recurrent):
        cures.append("call nnx.RNN with initial_carry=")
    return cures


def _can_switch_on(mode: str, node: Any) -> bool:
    """Return whether `nnx.view` can set this attribute of a node to True, and it is not True yet."""
    is_taken = hasattr(node, "set_view") and mode in signature(node.set_view).parameters
    return is_taken and getattr(node, mode, None) is not True


def random_state(model: Any) -> set[str]:
    """Return the paths of a model's random state: its keys and their use counts."""
    if not is_module(model):
        # An optional method, as those in `split_model`.
        return getattr(model, "__plurax_random__", set)()
    from flax import nnx

    return {array_name(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.RngState))}


def passing_through(function: Callable[..., Any], arguments: Any, *, ignore_unused: bool = False) -> list[set[str]]:
    """Return for each model in `arguments` the paths of arrays that `function` does not change, from its program.

    An inner transform of `nnx` returns every array of a module as a new object, whether it has changed or not. So if
    objects differ, `function` is traced once more, and each output is followed back through its program.

    With `ignore_unused`, they include counts of random streams to which `function` only adds constants, if none of its
    outputs and effects depends on the count, and so none on a key that was drawn: a stream folds its count into each.
    """
    before = splits_of(arguments)
    names: list[tuple[int, str]] = []

    def arrays_after(before: list[SplitModel]) -> Any:
        out, models = call_with_models(function, with_splits(arguments, before))
        after = [split(model).arrays() for model in models]
        names.extend((i, path) for i, arrays in enumerate(after) for path in sorted(arrays))
        # Not every module is a pytree. The rest of an output that is not an array depends on no array.
        results = [split(x) if is_module(x) else x for x in jax.tree.leaves(out, is_leaf=is_module)]
        return after, list(filter(HashablePytree.is_array, jax.tree.leaves(results)))

    jaxpr = jax.make_jaxpr(arrays_after)(before).jaxpr
    inputs = [(i, path) for i, parts in enumerate(before) for path in parts.arrays()]
    counts = {(i, path) for i, parts in enumerate(before) for path in _counts(parts)} if ignore_unused else set()
    known = [_Source(number, _axes(variable)) for number, variable in enumerate(jaxpr.invars)]
    sources = _sources(jaxpr, known)[: len(names)]
    read = needed(jaxpr, [False] * len(names) + [True] * (len(jaxpr.outvars) - len(names))) if counts else []
    kept: list[set[str]] = [set() for _ in before]
    for name, source, out in zip(names, sources, jaxpr.outvars, strict=False):
        if source is None or inputs[source.number] != name or source.axes != _axes(out):
            continue
        if not source.advanced or (name in counts and not read[source.number]):
            kept[name[0]].add(name[1])
    return kept


def _counts(parts: SplitModel) -> set[str]:
    """Return the paths of the counts of a module's random streams."""
    model = parts.merge()
    if not is_module(model):
        return set()
    from flax import nnx

    return {array_name(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.RngCount))}


class _Source(NamedTuple):
    """Where a value in a program comes from; None stands for a value that is computed.

    Args:
      number: the index of an input.
      axes: the order of the input's axes: an array transposed twice is the input again.
      advanced: whether constants were added to it.
    """

    number: int
    axes: tuple[int, ...]
    advanced: bool = False


def _sources(jaxpr: Any, known: Sequence[_Source | None]) -> list[_Source | None]:
    """Return the source of each output of `jaxpr`, given the sources of its arguments."""
    return interpret(jaxpr, [None] * len(jaxpr.constvars), known, _sources_of_results, lambda _: None)


def _sources_of_results(eqn: Any, known: list[_Source | None]) -> Sequence[_Source | None]:
    """Return the source of each result of an operation, given the sources of its operands."""
    name, params = eqn.primitive.name, eqn.params
    first = known[0] if known else None
    if name in IDENTITIES:
        return known[: len(eqn.outvars)]
    if name == "transpose":
        return [first and first._replace(axes=tuple(first.axes[axis] for axis in params["permutation"]))]
    if name == "add" and isinstance(eqn.invars[1], Literal):
        return [first and first._replace(advanced=True)]
    if name in CALLS:
        return _sources(called(eqn)[0], known)
    if name == "cond":
        # The first operand is the branch index. If branches return different inputs, the result depends on it.
        branches = zip(*(_sources(branch.jaxpr, known[1:]) for branch in params["branches"]), strict=True)
        return [found[0] if len(set(found)) == 1 else None for found in branches]
    # A loop does not change a result if its body does not: the output at each position of the carry (in a scan, also of
    # the slices) is then the input at the same position. It only advances a result if its body does.
    if name in ("scan", "while"):
        body = (params["jaxpr"] if name == "scan" else params["body_jaxpr"]).jaxpr
        shared = scan_counts(params)[0] if name == "scan" else params["body_nconsts"]
        skipped = 0 if name == "scan" else params["cond_nconsts"]
        after = _sources(body, [_Source(place, _axes(variable)) for place, variable in enumerate(body.invars)])
        return [
            _looped(known[skipped + place], source) if source and source[:2] == (place, _axes(out)) else None
            for place, (source, out) in enumerate(zip(after, body.outvars, strict=True), shared)
        ]
    return [None] * len(eqn.outvars)


def _looped(before: _Source | None, inside: _Source) -> _Source | None:
    """Return the source of a result of a loop, whose value before it has this source, and in its body that."""
    return before and before._replace(advanced=before.advanced or inside.advanced)


def _axes(variable: Any) -> tuple[int, ...]:
    """Return the axes of a variable, in order."""
    return tuple(range(len(aval(variable).shape)))
