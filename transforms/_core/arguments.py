"""Checks of arguments and options, and names for arguments in errors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from jax.tree_util import tree_leaves_with_path as leaves_with_path

Argnums = int | Sequence[int]


def check_callable(api: str, fun: Any, name: str = "fun") -> None:
    """Raise if `fun` cannot be called."""
    if not callable(fun):
        raise TypeError(f"{api}: {name} must be a function, a bound method or a module, but got {describe(fun)}.")


def describe(value: Any) -> str:
    """Return a short description of a value for an error: shape and dtype of an array, else the value and its type."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    if value is None:
        return "None"
    return f"{short(value)} of type {type(value).__name__}"


def short(value: Any) -> str:
    """Return `repr(value)`, truncated to one line: the repr of a module has dozens of lines."""
    line, _, more = repr(value).partition("\n")
    return f"{line[:100]}..." if more or len(line) > 100 else line


def argument_name(fun: Any, args: Sequence[Any], position: int) -> str:
    """Return the name of a positional argument in the signature of `fun`, or "argument 2" if there is none."""
    if type(fun) is FunctionType and position < fun.__code__.co_argcount and not vars(fun):
        return fun.__code__.co_varnames[position]  # much quicker than reading a signature
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # many builtins have no signature
        return f"argument {position}"
    for i, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return f"{parameter.name}[{position - i}]"
        if i == position:
            return parameter.name
    return f"argument {position} of {len(args)}"


def leaf_name(name: str, path: tuple[Any, ...]) -> str:
    """Return `name` followed by a pytree path, such as `batch['image']` or `model.conv.kernel`."""
    return name + keystr(path).removesuffix(".value")  # the key of an `nnx.Variable`'s array


def check_argnums(api: str, argnums: Any, name: str = "argnums") -> tuple[int, ...]:
    """Return `argnums` as a tuple of ints, negative ones not yet resolved; raise if it is empty or malformed."""
    sequence = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    if not sequence:
        raise ValueError(f"{api}: {name} is empty; name at least one positional argument.")
    if not all(map(is_int, sequence)):
        raise TypeError(f"{api}: {name} must be an int or a tuple of ints, but got {argnums!r}.")
    if len(set(sequence)) < len(sequence):
        raise ValueError(f"{api}: {name}={argnums!r} names an argument twice; name each once.")
    return tuple(map(int, sequence))


def is_int(x: Any) -> bool:
    """Return whether `x` is a Python or NumPy int; arrays and booleans, which also have `__index__`, are not."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def check_count(api: str, name: str, value: Any, least: int = 1, *, optional: bool = False) -> None:
    """Raise if a count is not an int or is below `least`; with `optional` it may be None."""
    if value is None and optional:
        return
    if not is_int(value):
        raise TypeError(f"{api}: {name} must be an int{' or None' if optional else ''}, but got {describe(value)}.")
    if value < least:
        raise ValueError(f"{api}: {name} must be at least {least}, but got {value}.")


def is_real(value: Any) -> bool:
    """Return whether a value is a real Python or NumPy number; booleans and arrays are not."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def check_number(api: str, name: str, value: Any, fits: Callable[[float], bool], what: str) -> float:
    """Return `value` as a Python float, exactly; raise if it is not a number or not allowed.

    The result is a Python float because JAX would compute with a NumPy scalar of half precision in half precision.

    Args:
      api: the caller's name in errors.
      name: the name of the argument.
      value: a number, or a 0-d array.
      fits: returns whether a number is allowed.
      what: a description of the allowed numbers, for the error.
    """
    scalar = isinstance(value, (jax.Array, np.ndarray)) and value.shape == () and jnp.issubdtype(value.dtype, np.number)
    if not (scalar or is_real(value)):
        raise TypeError(f"{api}: {name} must be a number, but got {describe(value)}.")
    number = float(value)
    if not fits(number):
        raise ValueError(f"{api}: {name} must be {what}, but got {value}.")
    return number


def check_choice(api: str, name: str, value: Any, choices: Collection[str]) -> None:
    """Raise if `value` is not one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{api}: {name} must be one of {', '.join(map(repr, choices))}, but got {value!r}.")


def resolve_argnums(
    api: str, fun: Any, positions: tuple[int, ...], args: Sequence[Any], name: str = "argnums"
) -> tuple[int, ...]:
    """Return `positions` with negative ones counted from the end, checked against a call with `args`."""
    count = len(args)
    for position in positions:
        if not -count <= position < count:
            fact = f"selects argument {position}, but the call has {count} positional argument(s)"
            cure = "name one of them; an argument can only be selected if it is passed by position, not by keyword"
            raise ValueError(f"{api}: {name} {fact}; {cure}.")
    resolved = tuple(position % count for position in positions)
    # `check_argnums` has refused equal positions, but 1 and -1 are the same argument in a call with two arguments.
    if len(set(resolved)) < len(resolved):
        twice = argument_name(fun, args, max(resolved, key=resolved.count))
        raise ValueError(f"{api}: {name}={positions!r} names argument `{twice}` twice in this call; name each once.")
    return resolved


def count_examples(api: str, fun: Any, positions: Sequence[int], args: Sequence[Any]) -> int:
    """Return the size of axis 0 of all arrays that `batch_argnums` selects; raise if sizes differ."""
    sizes: dict[str, int] = {}
    for i in positions:
        for path, leaf in leaves_with_path(args[i]):
            name = leaf_name(argument_name(fun, args, i), path)
            if not getattr(leaf, "shape", ()):
                fact = f"is {describe(leaf)}, which has no axis of examples"
                raise ValueError(f"{api}: `{name}` {fact}; pass it in another argument.")
            sizes[name] = leaf.shape[0]
    if not sizes:
        raise ValueError(f"{api}: the arguments of batch_argnums hold no array, so there are no examples; pass some.")
    # All others are compared with the first array.
    first, size = next(iter(sizes.items()))
    for name, other in sizes.items():
        if other != size:
            raise ValueError(f"{api}: `{first}` has {size} examples, but `{name}` has {other}; pass the same number.")
    return size


def wrap_like(
    fun: Callable[..., Any],
    api: str,
    wrapper: Callable[..., Any],
    rebuild: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Give `wrapper` the signature of `fun` and a name and docstring that mention it; return `wrapper`.

    If `wrapper` is a transform of `fun`, `rebuild` applies the same transform to another function; see `transform_of`.
    """
    # This sets `__wrapped__`, from which `inspect.signature` reads the signature; names and docstring are set below.
    functools.update_wrapper(wrapper, fun, assigned=(), updated=())
    name = getattr(fun, "__name__", type(fun).__name__)
    wrapper.__name__ = wrapper.__qualname__ = f"{api}({name})"
    wrapper.__doc__ = f"`{name}` under `{api}`.\n\n{inspect.getdoc(fun) or ''}".rstrip()
    vars(wrapper)["_plurax_rebuild"] = wrapper, rebuild
    return wrapper


def transform_of(wrapper: Any) -> tuple[Callable[..., Any], Callable[[Callable[..., Any]], Callable[..., Any]]] | None:
    """Return the function inside a transform or partial, and a function that applies it to another; None otherwise."""
    if isinstance(wrapper, functools.partial):
        return wrapper.func, lambda fun: functools.partial(fun, *wrapper.args, **wrapper.keywords)
    # A decorator such as `functools.wraps` may copy the attributes of a transform to another function, which does more
    # than the transform. Hence the check that the wrapper in the pair is this one.
    pair: Any = getattr(wrapper, "_plurax_rebuild", None)
    return (wrapper.__wrapped__, pair[1]) if pair and pair[0] is wrapper and pair[1] else None
