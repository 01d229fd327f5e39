"""Named scopes for the parts of NNX modules, which bring none of their own: their paths of attributes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax

from ..._core.arguments import argument_name, leaf_name
from ..._models.split_model import is_model, is_module, merge_tree, split_tree

_PATH = "_plurax_path"


def with_paths(fun: Callable[..., Any], owner: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the owner and the arguments of a call with copies of their NNX modules, in which each part has its path.

    If there are several modules, the names of the arguments come first.
    """
    # An attribute is part of the graph definition, so copies that transforms of NNX make have it as well.
    owner, args = copies = merge_tree(split_tree((owner, args)))
    modules = [
        (leaf_name(name, path), leaf)
        for name, tree in [("fun", owner), *((argument_name(fun, args, i), x) for i, x in enumerate(args))]
        for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_model)
        if is_module(leaf)
    ]
    for name, module in modules:
        for path, part in sys.modules["flax.nnx"].iter_modules(module):
            if not hasattr(part, _PATH):  # a shared part keeps its first path
                setattr(part, _PATH, "/".join([*([name] if len(modules) > 1 else []), *map(str, path)]))
    return copies


@contextmanager
def module_scopes() -> Iterator[dict[int, tuple[str, Any]]]:
    """Name a scope around each call, in this thread, of an NNX module: its path, relative to that of the caller.

    A module that `with_paths` has not seen, such as one that a function refers to, is the root of its own parts. Yields
    the paths that were found in this way, by the `id` of the part, with the part itself, lest another gets that `id`.
    """
    nnx, found = sys.modules.get("flax.nnx"), dict[int, tuple[str, Any]]()
    if nnx is None or sys.getprofile() is not None:
        yield found
        return
    active: list[tuple[FrameType, str, Any]] = []

    def path_of(module: Any, outer: str) -> str:
        """Return the path of a module; one that is not known becomes a root below `outer`."""
        if hasattr(module, _PATH):
            return str(getattr(module, _PATH))
        if id(module) not in found:
            for path, part in nnx.iter_modules(module):
                found.setdefault(id(part), ("/".join(filter(None, [outer, *map(str, path)])), part))
        return found[id(module)][0]

    def watch(frame: FrameType, event: str, _: Any) -> None:
        """Enter a scope where a module is called, and leave it where the call returns."""
        code = frame.f_code
        if event == "call" and code.co_name == "__call__" and code.co_argcount:
            module, outer = frame.f_locals[code.co_varnames[0]], active[-1][1] if active else ""
            # With the same path a class calls the `__call__` of its parent class.
            if isinstance(module, nnx.Module) and (path := path_of(module, outer)) not in ("", outer):
                scope = jax.named_scope(path.removeprefix(f"{outer}/"))
                scope.__enter__()
                active.append((frame, path, scope))
        elif event == "return" and active and active[-1][0] is frame:  # also where an error ends the call
            active.pop()[-1].__exit__(None, None, None)

    # Python's hook for profilers sees calls without a change to the user's modules or classes. It makes a trace take
    # twice as long. Another profiler that is running keeps it; there are no scopes then.
    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(None)
