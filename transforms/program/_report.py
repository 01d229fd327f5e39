"""What `fold_bn` tells about what it did, and where in the user's code that was."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """A batch norm, or another factor for each channel.

    Attributes:
      what: "batch norm" (it divides by a root) or "per-channel scale".
      parameters: where its parameters are, such as "layers.0.bn"; empty if they are constants of the program.
      where: the named scopes around it, and the line it was written in.
      kernel: the entries of the new parameters it was folded into; empty if it was kept.
      reason: why it was kept; empty if it was folded.
    """

    what: str
    parameters: str
    where: str
    kernel: str
    reason: str

    def __str__(self) -> str:
        name = " ".join(filter(None, [self.what, self.parameters]))
        return f"{name} at {self.where}: " + (f"into {self.kernel}" if self.kernel else self.reason)


@dataclass(frozen=True)
class FoldReport:
    """What was folded, and what was kept and why; printed, it is a table.

    Attributes:
      folded: the candidates that are part of the weights now.
      kept: the candidates that are computed as before.

    Example:
      >>> norm = Candidate("batch norm", "bn", "block (net.py:12)", "conv.kernel", "")
      >>> print(FoldReport((norm,), ()))
      folded 1, kept 0
      + batch norm         bn  block (net.py:12)  into conv.kernel
    """

    folded: tuple[Candidate, ...]
    kept: tuple[Candidate, ...]

    def __str__(self) -> str:
        rows = [("+", x.what, x.parameters, x.where, f"into {x.kernel}") for x in self.folded]
        rows += [("-", x.what, x.parameters, x.where, x.reason) for x in self.kept]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        widths[1:2] = [len("per-channel scale")] if rows else []
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip().replace("  ", " ", 1) for row in rows]
        return "\n".join([f"folded {len(self.folded)}, kept {len(self.kept)}", *lines])


def where(eqn: Any) -> str:
    """The named scopes around an operation, and the innermost line that is not one of a library of modules."""
    source = eqn.source_info
    frames = [] if source.traceback is None else source.traceback.frames
    libraries = _libraries()
    users = (frame for frame in frames if not frame.file_name.startswith(libraries))
    frame = next(users, frames[0] if frames else None)
    line = f"{os.path.basename(frame.file_name)}:{frame.line_num}" if frame else "unknown line"
    scope = str(source.name_stack)
    return f"{scope} ({line})" if scope else line


@functools.cache
def _folder(file: str) -> str:
    return os.path.dirname(file) + os.sep


def _libraries() -> tuple[str, ...]:
    files = [getattr(sys.modules.get(name), "__file__", None) for name in ("jax", "flax", "equinox")]
    # The folder above this one is all of plurax.transforms; "<" are lines that Python made up, as dataclasses do.
    above = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    return (*(_folder(file) for file in files if file), above, os.path.dirname(functools.__file__) + os.sep, "<string>")
