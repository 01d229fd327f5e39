"""Named scopes for the parts of NNX modules, which have none by default: their attribute paths."""

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
    """Return copies of the owner and the arguments of a call in which each part of an NNX module records its path.

    If there are several modules, the paths begin with the names of the arguments.
    """
    # An attribute is part of the graph definition, so the copies that NNX transforms make have it too.
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
    """Open a named scope around each call of an NNX module in this thread: its path relative to that of the caller.

    A module without a path from `with_paths`, such as one that a function closes over, is the root of its parts. Yields
    the paths of such modules, keyed by the `id` of the part, with the part itself, so that its `id` is not reused.
    """
    nnx, found = sys.modules.get("flax.nnx"), dict[int, tuple[str, Any]]()
    if nnx is None or sys.getprofile() is not None:
        yield found
        return
    active: list[tuple[FrameType, str, Any]] = []

    def path_of(module: Any, outer: str) -> str:
        """Return the path of a module; an unknown module becomes a root below `outer`."""
        if hasattr(module, _PATH):
            return str(getattr(module, _PATH))
        if id(module) not in found:
            for path, part in nnx.iter_modules(module):
                found.setdefault(id(part), ("/".join(filter(None, [outer, *map(str, path)])), part))
        return found[id(module)][0]

    def watch(frame: FrameType, event: str, _: Any) -> None:
        """Enter a scope when a module is called, and leave it when the call returns."""
        code = frame.f_code
        if event == "call" and code.co_name == "__call__" and code.co_argcount:
            module, outer = frame.f_locals[code.co_varnames[0]], active[-1][1] if active else ""
            # If the path is unchanged, a class calls the `__call__` of its parent class.
            if isinstance(module, nnx.Module) and (path := path_of(module, outer)) not in ("", outer):
                scope = jax.named_scope(path.removeprefix(f"{outer}/"))
                scope.__enter__()
                active.append((frame, path, scope))
        elif event == "return" and active and active[-1][0] is frame:  # also if the call raises
            active.pop()[-1].__exit__(None, None, None)

    # Python's profiling hook reports calls without changes to the user's modules or classes. It doubles the time of a
    # trace. If another profiler uses the hook, it is left in place, and there are no scopes.
    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(None)
