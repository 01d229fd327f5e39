"""A program that is compiled once for many processes: `aot`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import jax
import numpy as np

from .._arguments import argument_name, check_callable, describe, leaf_name, wrap_like
from .._changes import update, with_changes
from .._compat import Tracer
from .._model import Parts, from_parts, models_of, owner_of, parts_of, refuse_shared_state, to_parts
from ._aot_program import Call, Inside, prepare
from ._compile_cache import checked_directory
from ._environment import current_mesh, names_of_settings
from ._structure import nodes

_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def aot(fun: Callable[..., Any], path: str | os.PathLike[str], *, key: str | None = None) -> Callable[..., Any]:
    """Compile a function once, for this process and all later ones.

    As `jax.jit`, but a compiled program is written to the directory `path`, from where the next process takes it. There
    is one file for each combination of shapes, dtypes, static structure, devices and settings of JAX.

    With `key` nothing is traced where there is a file: it is found by the key, by `fun` and by its arguments. You
    promise that under one key `fun` is one program, as far as it is not compared:

    - compared are the code and the defaults of `fun`, what it closes over, its class where it is an object or a method,
      what it holds where it is an object, what decorators, transforms and partials made it of, and the settings of
      `jax.jit`; and of all values in there numbers, arrays with their dtypes, functions and classes likewise, and other
      objects by what `copy` copies of them (so `__getstate__` may leave out what changes from run to run);
    - not compared is what `fun` uses by a global name, such as the functions that it calls: change the key with these.
      Functions and classes of JAX, Flax, optax, NumPy and Python count by their names, and so do imported modules;
      what cannot be copied, such as a lock, by its type.

    Without `key` the program is traced and lowered, and found by its text with all constants and by its devices: never
    out of date, but slower to begin. Either way what `fun` closes over is a part of the program, as it was when it was
    compiled. A module that `fun` is, or is a method of, is an argument.

    There is a file of its own for each kind of device and processor, and for each value of those settings of JAX that
    `jax.enable_x64`, `jax.default_matmul_precision`, `jax.default_prng_impl`, `jax.threefry_partitionable`,
    `jax.numpy_dtype_promotion` and `jax.numpy_rank_promotion` set. A file that does not fit is never used: made by
    another version of Python, JAX, Flax, optax, NumPy or this library, with other flags of XLA or other settings of
    JAX, or damaged. There is a warning, and it is compiled anew and replaced. What cannot be written (no permission, a
    program with a callback of Python) is a warning too, and runs.

    Such a file is code. Loading it runs what is in it (JAX reads it with pickle, and the program is machine code), and
    the checksum guards against accidents, not against people: use no directory that somebody whom you do not trust may
    write to. It holds the arrays that `fun` closes over. It may be deleted at any time.

    Models are taken apart as everywhere here, so what `fun` changes of a module (a parameter, BatchNorm statistics) is
    changed afterwards. Under `jax.jit`, `jax.grad` or `jax.vmap`, in `jax.disable_jit` and in `jax.debug_nans`, a
    compiled program is of no use: `fun` itself is called. In a run of several processes nothing is written.

    Args:
      fun: a function of arrays, numbers and modules in any pytrees, a bound method or a module. It may be under
        `jax.jit` with donated arguments, but not with static ones: bind these with `functools.partial`.
      path: the directory, made when something is written. `~` is your home.
      key: any text, such as "loss 3". It need not name the shapes, nor what is bound by `functools.partial`.

    Returns:
      A function of the same arguments with the same results.

    Raises:
      TypeError: `fun` is not callable, `path` no path, or `key` no string; in a call, an argument is neither array,
        number nor module; with `key`, what is static in an argument or bound by a partial cannot be copied, what `fun`
        holds is nested thousands deep, or the settings of `jax.jit` cannot be read.
      ValueError: `path` or `key` is empty, or `path` is a file; in a call, `fun` has static arguments, is under
        `jax.jit` and is given a module, or changes the structure of a module.

    Cost:
      Of the time that `jax.jit` takes to the first result in a new process, imports aside, 1/16 for a loop of 200
      steps and 1/7 for the gradient of a small CNN, of which the run itself is a third; without `key` 2/5 and 1/5. A
      later call costs some 24 to 39 µs more than under `jax.jit`, for 1 and 20 arrays, and with a module milliseconds,
      as under `nnx.jit`: where that matters, pass what
      `nnx.split` gives. A program that calls out of XLA, other than LAPACK, is traced even with `key`, since JAX
      prepares such functions while it lowers.

    Source:
      `jax.experimental.serialize_executable`; MindSpore's compile cache.

    Examples:
      >>> import tempfile, jax.numpy as jnp
      >>> from plurax.transforms.program import aot
      >>> def mean(x):
      ...     print("traced")
      ...     return x.mean()
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     first = aot(mean, directory, key="mean 1")(jnp.arange(3.0))
      ...     second = aot(mean, directory, key="mean 1")(jnp.arange(3.0))
      traced
      >>> float(first), float(second)
      (1.0, 1.0)
    """
    check_callable("aot", fun)
    directory = checked_directory("aot", "path", path)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"aot: path must be a directory, but {str(directory)!r} is a file; give the directory of it.")
    if key is not None and not isinstance(key, str):
        raise TypeError(f"aot: key must be a string, but got {describe(key)}.")
    if key == "":
        raise ValueError("aot: key is empty; name the program and its version, such as 'loss 1', or leave key out.")
    owner, function = owner_of(fun)
    config: Any = jax.config
    names = names_of_settings()
    settings = attrgetter(*(name for name in names if hasattr(config, name)))
    programs: dict[Any, Any] = {}
    without_models = set()

    def call(*args: Any, **kwargs: Any) -> Any:
        models, apart = [], None
        leaves, structure = jax.tree.flatten((owner, args, kwargs))
        if structure not in without_models:  # looking for them takes longer than all else
            models = models_of((owner, args, kwargs))
            if models:
                refuse_shared_state("aot", fun, owner, args, kwargs)
                apart = to_parts((owner, args, kwargs))
                leaves, structure = jax.tree.flatten(apart)
            else:
                without_models.add(structure)
        step_by_step = config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs
        kinds = None if step_by_step else _kinds(leaves)
        if kinds is None:
            return fun(*args, **kwargs)
        kind = structure, kinds, settings(config)
        found = programs.get(kind)
        if found is None:
            _check_leaves(fun, args, kwargs)
            prepared = prepare(Call(fun, function, key, leaves, structure, names), directory)
            if prepared is None:
                return fun(*args, **kwargs)
            program, said = prepared
            for message in said:
                warnings.warn(f"aot: {message}", stacklevel=2)
            returns_models = any(x.node_data() and x.node_data()[0] is Parts for x in nodes(program.out_tree))
            programs[kind] = found = program, returns_models
        program, returns_models = found
        out, changed = program(*leaves)
        if any(changed):
            update("aot", models, parts_of(apart), with_changes(parts_of(apart), changed))
        return from_parts(out) if returns_models else out

    return wrap_like(fun, "aot", call, lambda fun: aot(fun, path, key=key))


def _kinds(leaves: list[Any]) -> tuple[Any, ...] | None:
    """What a program depends on of its arguments, and the mesh around; None under a transform."""
    try:
        return current_mesh(), *map(_kind, leaves)
    except (Inside, ValueError):  # the latter for a mesh, under `jax.jit`
        return None


def _kind(x: Any) -> Any:
    try:
        return (x.aval, x.sharding) if x.committed else x.aval
    except (AttributeError, TypeError):
        if isinstance(x, Tracer):
            raise Inside from None
        return jax.typeof(x) if isinstance(x, _ARRAYS) else None


def _check_leaves(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what is no argument of a program."""
    if all(isinstance(x, _ARRAYS) for x in jax.tree.leaves((args, kwargs))):
        return
    for name, value in [*((argument_name(fun, args, i), x) for i, x in enumerate(args)), *kwargs.items()]:
        for path, leaf in jax.tree.leaves_with_path(value):
            if not isinstance(leaf, _ARRAYS):
                raise TypeError(
                    f"aot: argument `{leaf_name(name, path)}` is {describe(leaf)}, but only arrays, numbers and "
                    "modules can be; bind it with functools.partial."
                )
