"""`aot`: compile a function once for many processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from ..._core.arguments import argument_name, check_callable, describe, leaf_name, wrap_like
from ..._core.compat import Dispatched, inside_a_transform
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
    """Compile a function once, for this process and for later ones.

    As `jax.jit`, but a compiled program is written to the directory `path`, and later processes load it. There is one
    file for each combination of shapes, dtypes, static structure, devices and settings of JAX.

    Without `key`, every process traces and lowers the function, and looks up the program by its code, including all
    constants, and by its devices. The program is never stale, but the first result takes longer.

    With `key`, nothing is traced before the first result. The key is your promise that the code is unchanged: the file
    is looked up by the key, the name of `fun`, and the types of its arguments, without inspecting the code. The promise
    is verified later: the program of the first call is traced and compared with the file before a second call returns,
    or at the end of the process; programs for other types of arguments are compared at once. If a program differs, the
    call raises an error with the word "stale" (at the end of the process, a warning is issued), the file is removed,
    and the next call compiles the new program. So at most the first result in a process comes from old code, and this
    is reported. With `verify=False` nothing is verified: change the key whenever `fun` changes, or anything that it
    calls or closes over. Functions with the same name need different keys, and so do closures, partials and objects
    that differ.

    The comparison traces `fun` again: global variables and attributes that it uses must not change between its first
    call and the comparison, and it must trace to the same program each time (a loop over a set of strings does not).
    For the end of the process, the settings of JAX and `jax.set_mesh` around the call are restored, but not the
    deprecated `with mesh:`. A process that is killed or ends by `os._exit`, as `multiprocessing` processes may, skips
    the comparison.

    Values that `fun` closes over are constants of the program, as they were when it was compiled. If `fun` is a module
    or a method of one, the module is an argument. Static parts of arguments (the configuration of a module) and values
    bound by `functools.partial` distinguish files only as far as their `repr` does; your key must cover the rest.

    Each type of device and processor, each version of Python, JAX, Flax, optax, NumPy and this library, and other flags
    of XLA or settings of JAX have separate files; old files stay until you delete them. A damaged or renamed file is
    compiled again and replaced, with a warning. A program that cannot be written (no permission, a Python callback)
    runs, with a warning.

    Treat these files as code. Loading one executes its content (JAX reads it with pickle, and the program is machine
    code), and the checksum protects against accidents, not against attackers. A file is therefore rejected if it
    belongs to a user other than you and root, or if everybody may write to it. Members of its group may write to it,
    so check who they are. The file contains the arrays that `fun` closes over. It may be deleted at any time.

    Modules that `fun` changes (a parameter, BatchNorm statistics) are updated after the call. Inside `jax.jit`,
    `jax.grad` or `jax.vmap`, and with `jax.disable_jit` or `jax.debug_nans`, compiled programs cannot be used: `fun`
    itself is called. In a multi-process JAX run nothing is written.

    Args:
      fun: a function of arrays, numbers and modules in any pytrees, a bound method or a module. It may be under
        `jax.jit` with donated arguments, but not with static arguments (bind these with `functools.partial`) or
        compiler options.
      path: the directory; it is created at the first write. `~` is your home directory.
      key: any text, such as "loss 3". It need not include the shapes.
      verify: whether to compare a program that was found by its key with `fun` later.

    Returns:
      A function of the same arguments with the same results.

    Raises:
      TypeError: `fun` is not callable, `path` is not a path, or `key` is not a string; in a call, an argument is not an
        array, a number or a module.
      ValueError: `path` or `key` is empty, or `path` is a file; in a call, `fun` has static arguments or compiler
        options, is under `jax.jit` and receives a module, or changes the structure of a module.
      PermissionError: in a call, the file belongs to another user, or everybody may write to it.
      RuntimeError: in a call, the loaded program is stale.

    Warns:
      UserWarning: a file is damaged or cannot be written; at the end of the process, a program is stale.

    Cost:
      Time to the first result in a new process, without imports, relative to `jax.jit`: 1/14 for a loop of 200 steps
      and 1/7 for the gradient of a small CNN, a third of which is the run itself; without `key` 2/5 and 1/4. With
      `key`, the second call or the end of the process traces and lowers, which takes the remainder of those 2/5 and
      1/4. Later calls take 1.1 times as long as under `jax.jit`, and 0.15 µs more for each array that `fun` does not
      use; a call with other types of arguments than the last one takes 20 µs more. As under `jax.jit`, later calls do
      not see another `jax_default_prng_impl`. With a module they cost milliseconds more, as under `nnx.jit`: to avoid
      this, pass the results of `nnx.split`. A program that calls functions outside XLA (LAPACK on a CPU, for example)
      is traced at once even with `key`, because JAX registers such functions during lowering.

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
        raise ValueError(f"aot: path must be a directory, but {str(directory)!r} is a file; pass its directory.")
    if key is not None and not isinstance(key, str):
        raise TypeError(f"aot: key must be a string, but got {describe(key)}.")
    if key == "":
        raise ValueError("aot: key is empty; name the program and its version, such as 'loss 1', or omit key.")
    owner, function = bound_model(fun)
    config: Any = jax.config
    # One getter for all settings: every call reads them, and a Python loop would be slower.
    settings = attrgetter(*(name for name in settings_of_jax() if hasattr(config, name)))
    programs: dict[Any, AotProgram] = {}
    without_models = set()
    lock = threading.RLock()  # only one thread makes a first call
    dispatched: dict[Any, Dispatched | None] = {}
    last: Callable[..., Any] | None = None  # the program of the last call, one of these

    def run(*args: Any, **kwargs: Any) -> Any:
        if config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs:
            return fun(*args, **kwargs)
        if last is not None:
            try:
                return last(*args, **kwargs)
            except TypeError:  # arguments of other types
                pass
        return searched(*args, **kwargs)

    def searched(*args: Any, **kwargs: Any) -> Any:
        """Run the program for these arguments; load or compile it at the first call with such arguments."""
        nonlocal last
        if inside_a_transform():
            return fun(*args, **kwargs)
        models, split = [], None
        leaves, structure = jax.tree.flatten((owner, args, kwargs))
        if structure not in without_models:  # looking for models takes longer than the rest of a call
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
                # Compare the program of the first call before any second call. It is traced with the current settings,
                # so a call under other settings leaves the comparison to a later call.
                for other, waiting in programs.items():
                    if waiting.line is not None and not waiting.stale and other[0] == around:
                        waiting.compare(waiting.call.lower)
                program = programs.get(kind)
                if program is None or program.stale:
                    call = CallSignature(fun, function, key, verify, [abstract(x) for x in leaves], structure)
                    program = programs[kind] = prepare(call, directory, programs.values())
        if program.line is None and not models:
            # One for each type of arguments, such as of NumPy or JAX: JAX remembers for which types a call has failed.
            exact = kind, *map(type, leaves)
            if exact not in dispatched:
                dispatched[exact] = program.dispatched(args, kwargs)
            if (found := dispatched[exact]) is not None:
                out = found.first(*args, **kwargs)
                last = found.run
                return out
        out, changed = program.run(*leaves)
        if any(changed):
            update("aot", models, splits_of(split), with_changes(splits_of(split), changed))
        return merge_tree(out) if program.returns_models else out

    return wrap_like(fun, "aot", run, lambda fun: aot(fun, path, key=key, verify=verify))


def _kind(x: Any) -> Any:
    """Return the type of an argument, as far as a program depends on it; None if it cannot be an argument."""
    try:  # fastest for JAX arrays, the most common arguments
        return (x.aval, x.sharding) if x.committed else x.aval
    except (AttributeError, TypeError):
        return jax.typeof(x) if isinstance(x, _ARRAYS) else None


def _check_leaves(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise unless all leaves are arrays, numbers or modules."""
    for name, value in [*((argument_name(fun, args, i), x) for i, x in enumerate(args)), *kwargs.items()]:
        for path, leaf in jax.tree.leaves_with_path(value):
            if not isinstance(leaf, _ARRAYS):
                what = f"`{leaf_name(name, path)}` is a {type(leaf).__name__}, not an array, a number or a module"
                raise TypeError(f"aot: {what}; bind it with functools.partial.")
