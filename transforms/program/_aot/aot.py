"""A program that is compiled once for many processes: `aot`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from ..._core.arguments import argument_name, check_callable, describe, leaf_name, wrap_like
from ..._core.compat import inside_a_transform
from ..._models.mutation import update, with_changes
from ..._models.split_model import bound_model, merge_tree, models_of, refuse_shared_state, split_tree, splits_of
from .._compile_cache import checked_directory
from .environment import current_mesh, settings_of_jax
from .program import AotProgram, prepare
from .signature import CallSignature, abstract

_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
P = ParamSpec("P")
R = TypeVar("R")


def aot(
    fun: Callable[P, R], path: str | os.PathLike[str], *, key: str | None = None, verify: bool = True
) -> Callable[P, R]:
    """Compile a function once, for this process and all later ones.

    As `jax.jit`, but a compiled program is written to the directory `path`, from where the next process loads it. There
    is one file for each combination of shapes, dtypes, static structure, devices and settings of JAX.

    Without `key` the function is traced and lowered in every process, and the program is found by its text with all
    constants and by its devices: it is never out of date, but slower to begin.

    With `key` nothing is traced before the first result. The key is your word that the code is the same: the file is
    found by the key, the name of `fun`, and the kinds of its arguments, and the code is not looked at. Your word is
    checked later: the program of the first call is traced and compared with the file before a second call returns, or
    at the end of the process if there was none, and the programs of other kinds of arguments at once. If one differs,
    the call raises an error with the word "stale" (at the end there is a warning), the file is removed, and the next
    call compiles the new program. So at most the first result in a process is that of old code, and you hear of it.
    With `verify=False` nothing is checked: change the key whenever `fun` changes, or anything that it calls or closes
    over. Two functions of one name need keys of their own, as do two closures, partials or objects.

    The file is compared with `fun` as it is at that time: global variables and attributes that it uses must not change
    between its first call and the second, or the end of the process, and it must trace to the same program each time (a
    loop over a set of strings does not). For the end of the process, only JAX's settings and `jax.set_mesh` around the
    call are remembered; so not `with mesh:`, which JAX has deprecated. A process that is killed or ends by `os._exit`,
    as those of `multiprocessing` may, checks nothing.

    Either way values that `fun` closes over are a part of the program, as they were when it was compiled. A module that
    `fun` is, or is a method of, is an argument. Static parts of arguments (the configuration of a module) and values
    bound by `functools.partial` distinguish files as far as their `repr` does; the rest is covered by your key.

    There is a file of its own for each kind of device and processor, for each version of Python, JAX, Flax, optax,
    NumPy and this library, and for other flags of XLA or settings of JAX: those of earlier versions stay until you
    delete them. If a file is damaged, or renamed, there is a warning, and it is compiled anew and replaced. A program
    that cannot be written (no permission, a callback of Python) runs with a warning.

    Such a file is code. Loading it runs its content (JAX reads it with pickle, and the program is machine code), and
    the checksum guards against accidents, not against people. So a file is refused that belongs to another user than
    you and root, or that everybody may write; members of its group may write it, so mind who they are. It holds the
    arrays that `fun` closes over. It may be deleted at any time.

    Models are split as by all transforms here, so a module that `fun` changes (a parameter, BatchNorm statistics) is
    changed afterwards. Under `jax.jit`, `jax.grad` or `jax.vmap`, in `jax.disable_jit` and in `jax.debug_nans`, a
    compiled program cannot be used: `fun` itself is called. In a run of several processes nothing is written.

    Args:
      fun: a function of arrays, numbers and modules in any pytrees, a bound method or a module. It may be under
        `jax.jit` with donated arguments, but not with static ones (bind these with `functools.partial`), nor with
        options of the compiler.
      path: the directory, made when something is written. `~` is your home.
      key: any text, such as "loss 3". It need not name the shapes.
      verify: whether a program that was found by its key is compared with `fun` later.

    Returns:
      A function of the same arguments with the same results.

    Raises:
      TypeError: `fun` is not callable, `path` not a path, or `key` not a string; in a call, an argument is neither
        array, number nor module.
      ValueError: `path` or `key` is empty, or `path` is a file; in a call, `fun` has static arguments or options, or is
        under `jax.jit` and is given a module, or changes the structure of a module.
      PermissionError: in a call, the file is not yours, or everybody may write it.
      RuntimeError: in a call, the loaded program is stale.

    Cost:
      Of the time that `jax.jit` takes to the first result in a new process, imports aside, 1/16 for a loop of 200
      steps and 1/7 for the gradient of a small CNN, of which the run itself is a third; without `key` 2/5 and 1/5. With
      `key` the second call, or the end of the process, traces and lowers, which is the rest of those 2/5 and 1/5. A
      later call costs some 24 to 39 µs more than under `jax.jit`, for 1 and 20 arrays, and with a module milliseconds,
      as under `nnx.jit`: where that matters, pass what `nnx.split` gives. A program that calls out of XLA (LAPACK
      on a CPU too) is traced at once even with `key`, since JAX prepares such functions while it lowers.

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
    if directory.is_file():
        raise ValueError(f"aot: path must be a directory, but {str(directory)!r} is a file; give the directory of it.")
    if key is not None and not isinstance(key, str):
        raise TypeError(f"aot: key must be a string, but got {describe(key)}.")
    if key == "":
        raise ValueError("aot: key is empty; name the program and its version, such as 'loss 1', or leave key out.")
    owner, function = bound_model(fun)
    config: Any = jax.config
    # One getter for all settings: every call reads them, which a loop in Python would slow down.
    settings = attrgetter(*(name for name in settings_of_jax() if hasattr(config, name)))
    programs: dict[Any, AotProgram] = {}
    without_models = set()
    lock = threading.RLock()  # so that no two threads have a first call

    def run(*args: Any, **kwargs: Any) -> Any:
        """Find the program for these arguments, compiling it at the first call of a kind, and run it."""
        step_by_step = config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs
        if step_by_step or inside_a_transform():
            return fun(*args, **kwargs)
        models, split = [], None
        leaves, structure = jax.tree.flatten((owner, args, kwargs))
        if structure not in without_models:  # looking for them takes longer than the rest of a call
            models = models_of((owner, args, kwargs))
            if models:
                refuse_shared_state("aot", fun, owner, args, kwargs)
                split = split_tree((owner, args, kwargs))
                leaves, structure = jax.tree.flatten(split)
            else:
                without_models.add(structure)
        around = current_mesh(), settings(config)
        kind = around, structure, *map(_kind, leaves)
        program = programs.get(kind)
        if program is None or program.line is not None:
            _check_leaves(fun, args, kwargs)
            with lock:
                # The program of the first call is compared before any second one; it is traced with the settings that
                # are in force, so a call under others leaves it to a later one.
                for other, known in programs.items():
                    if known.line is not None and not known.stale and other[0] == around:
                        known.compare(known.call.lower)
                program = programs.get(kind)
                if program is None or program.stale:
                    call = CallSignature(fun, function, key, verify, [abstract(x) for x in leaves], structure)
                    program = programs[kind] = prepare(call, directory, programs.values())
        out, changed = program.run(*leaves)
        if any(changed):
            update("aot", models, splits_of(split), with_changes(splits_of(split), changed))
        return merge_tree(out) if program.returns_models else out

    return wrap_like(fun, "aot", run, lambda fun: aot(fun, path, key=key, verify=verify))


def _kind(x: Any) -> Any:
    """Return the part of an argument that a program depends on; None if it can be no argument."""
    try:  # most arguments are arrays of JAX, for which this is the quickest way
        return (x.aval, x.sharding) if x.committed else x.aval
    except (AttributeError, TypeError):
        return jax.typeof(x) if isinstance(x, _ARRAYS) else None


def _check_leaves(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise unless all leaves can be arguments of a program."""
    for name, value in [*((argument_name(fun, args, i), x) for i, x in enumerate(args)), *kwargs.items()]:
        for path, leaf in jax.tree.leaves_with_path(value):
            if not isinstance(leaf, _ARRAYS):
                what = f"`{leaf_name(name, path)}` is a {type(leaf).__name__}, not an array, a number or a module"
                raise TypeError(f"aot: {what}; bind it with functools.partial.")
