"""`Identity`: what identifies a run, stored in its checkpoints, so that no other run goes on from them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.compat import ClosedJaxpr, Jaxpr, Literal
from .._core.machine import processor
from .._core.prng import is_key
from .._core.version import __version__
from .._files.errors import Damaged
from .checkpoint import Checkpoint, OtherStructure
from .held_rows import members_held, rows, rows_as_bytes
from .manifest import RunRecord, Start, StepProgram
from .processes import Group

# Of larger data, evenly spaced rows of this many bytes in total are compared.
_SAMPLE = 1 << 26
# By how many ulps first weights may differ that were computed on another device, or on several.
_ULPS = 32
# The libraries that a program depends on. Those of another version may trace the same loss to another program.
_LIBRARIES = ("jax", "flax", "optax", "numpy", "jax-privacy")


class Identity:
    """What identifies a run: the state that it started from, its batches, and the program of a step.

    The shapes of its arrays, the optimizer and the hyperparameters are compared too, where the checkpoint is read.

    Args:
      group: the processes of the run.
      step: the step of the state that was passed to `fit`.
      parts: the arrays of that state by name, with the members along axis 0, or one row for all of them.
      size: the number of members.
      batches: the settings of the batches as plain values; empty if they are unknown.
      resume: whether to go on although something differs.
      taken_over: the name of a part that may differ: the run goes on with that of the checkpoint.

    Attributes:
      differences: what differs from the checkpoint that the run goes on from.
      takes_over: whether the part that may differ does.
    """

    def __init__(
        self,
        group: Group,
        step: int,
        parts: Mapping[str, Any],
        size: int,
        batches: Mapping[str, Any],
        resume: bool,
        taken_over: str = "",
    ) -> None:
        self._taken_over, self.takes_over = taken_over, False
        self._group, self._size, self._batches, self._resume = group, size, dict(batches), resume
        self._starts = [self._start(step, parts)]
        self._program: StepProgram | None = None
        self._written: RunRecord | None = None
        self._where = ""
        self.differences: list[str] = []

    def record(self) -> RunRecord:
        """Return what a checkpoint's manifest says of the run."""
        return RunRecord(_libraries(), self._starts, self._batches, self._program)

    def check(self, checkpoint: Checkpoint, step: int, parts: Mapping[str, Any], others: Sequence[str] = ()) -> None:
        """Compare the run of a checkpoint with this one; raise if they differ, unless `resume` allows it.

        Args:
          checkpoint: the checkpoint.
          step: its step.
          parts: the arrays of its state by name, as for the state that was passed to `fit`.
          others: differences that were found while it was read.
        """
        self.differences, self._where = list(others), str(checkpoint)
        self._written = checkpoint.about.run
        if self._written is None:  # `save` wrote it, and somebody gave it the name of a checkpoint of a run
            self.differences.append("no run has written it")
            check_same_run(self._where, self.differences, self._resume)
            return
        mine, starts = self._starts[-1], self._written.starts
        if any(mine.step == start.step and not _differences(mine, start) for start in starts):
            self._starts = starts
        elif mine.step <= step:  # a later state was trained elsewhere, so that its start is not known
            ends = [x for x in [*starts, self._start(step, parts)] if x.step == mine.step]
            different = [_differences(mine, x) for x in ends]
            if not different:
                self.differences.append(f"it did not start from a state at step {mine.step}")
            elif all(different):
                names = min(([x for x in names if x != self._taken_over] for names in different), key=len)
                self.takes_over = not names
                if names:
                    self.differences.append(f"its state at step {mine.step} has other {' and other '.join(names)}")
                else:
                    self._starts = starts
            else:  # the given state is the last one of that run
                self._starts = [*starts, mine]
        then, now = self._written.batches, self._batches
        for name in dict.fromkeys([*then, *now]):
            if then.get(name) != now.get(name):
                hidden = any(str(x.get(name)).startswith("sha256:") for x in (then, now))
                values = "" if hidden else f", {then.get(name)} instead of {now.get(name)}"
                self.differences.append(f"its batches have another {name}{values}")
        check_same_run(self._where, self.differences, self._resume)

    @property
    def program_is_known(self) -> bool:
        """Return whether `check_program` has been called."""
        return self._program is not None

    def check_program(self, shapes: list[Any], digest_for: Callable[[list[Any]], str]) -> None:
        """Compare the program of a step with that of the checkpoint; raise if they differ, unless `resume` allows it.

        Args:
          shapes: the shapes of a batch, as plain values.
          digest_for: returns the `program_digest` for such shapes. The shapes of the checkpoint are used first, because
            batches may differ in size.
        """

        def compare() -> None:
            written = None if self._written is None else self._written.program
            # Another version of a library may print the same program in another way.
            if written is not None and self._written is not None and self._written.libraries == _libraries():
                try:
                    same = digest_for(written.shapes) == written.digest
                except Exception:  # the loss of the checkpoint's run accepts batches of these shapes
                    same = False
                if same:
                    self._program = written
                    return
                parts = "the loss, the optimizer, or an attribute of the model, such as a dropout rate"
                self.differences.append(f"its steps run another program, because of {parts}")
                check_same_run(self._where, self.differences, self._resume)
            self._program = StepProgram(shapes, digest_for(shapes))

        self._group.agree(compare)

    def _start(self, step: int, parts: Mapping[str, Any]) -> Start:
        """Return a step and digests of the arrays of its state, which do not depend on how they are distributed."""
        found = self._group.gather({name: _of_members(tree, rows(tree, self._size)) for name, tree in parts.items()})
        members = {name: {i: x for process in found for i, x in process[name].items()} for name in parts}
        each = {name: [x.get(f"{i}", ["", [], 0.0]) for i in range(self._size)] for name, x in members.items()}
        return Start(
            step,
            _device(parts["weights"]),
            digests={name: _short(hashlib.sha256(repr([x[0] for x in of]).encode())) for name, of in each.items()},
            weights=np.asarray([x[1] for x in each["weights"]], np.float64).reshape(self._size, -1),
            ulp=max(x[2] for x in each["weights"]),
        )


def check_same_run(where: str, differences: Sequence[str], resume: bool) -> None:
    """Raise if there are differences between a run and the one that wrote a checkpoint, unless `resume` allows them."""
    if differences and not resume:
        raise ValueError(
            f"{where} is of another run: {'; '.join(differences)}. Use another checkpoint_dir or the settings of that "
            "run, or pass resume=True to go on from it all the same, or resume=False to start from `state`."
        )


@contextmanager
def in_a_run(differences: Sequence[str] = ()) -> Iterator[None]:
    """Add to an error about a checkpoint of another structure how a run can go on, and what else differs."""
    try:
        yield
    except Damaged:
        raise
    except OtherStructure as error:
        # In a run, what is read into is the state, and `resume=True` could not go on either.
        found = "; ".join([*differences, f"its state has {error.has}, but `state` has {error.like}"])
        remedy = "Use another checkpoint_dir or the settings of that run, or pass resume=False to start from `state`."
        raise ValueError(f"{error.where} is of another run: {found}. {remedy}") from error
    except ValueError as error:
        raise ValueError(f"{error} Or use another checkpoint_dir, or resume=False to start from `state`.") from error


def _of_members(tree: Any, size: int) -> dict[str, tuple[str, list[float], float]]:
    """Return for each member that is complete in this process a digest, some of its numbers, and their precision."""
    held = [members_held(leaf, size) for leaf in jax.tree.leaves(tree)]
    mine = [i for i in range(size) if all(i in leaf for leaf in held)]
    found = {}
    for some, columns in rows_as_bytes(held, mine):
        dtypes = [leaf[some[0]][0].dtype for leaf in held]
        floats = [x.view(d) for x, d in zip(columns, dtypes, strict=True) if x.size and jnp.issubdtype(d, jnp.floating)]
        floats = floats[:: max(1, len(floats) // 16)]
        few = [x[:, np.linspace(0, x.shape[1] - 1, 3).astype(int)].astype(float) for x in floats]
        numbers = np.concatenate([np.zeros((len(some), 0)), *few], 1).tolist()
        ulp = max((float(jnp.finfo(x.dtype).eps) for x in floats), default=0.0)
        for k, i in enumerate(some):
            sha = hashlib.sha256()
            for column in columns:
                sha.update(column[k])
            found[f"{i}"] = sha.hexdigest(), numbers[k], ulp
    return found


def _device(tree: Any) -> str | None:
    """Return what the rounding of an initialization on one device depends on; None for several devices."""
    devices = {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}
    if len(devices) > 1:
        return None
    return _short(hashlib.sha256(repr((devices.pop().device_kind, processor(), _libraries())).encode()))


def _differences(mine: Start, other: Start) -> list[str]:
    """Return the names of the parts in which two first states differ."""
    names = [name for name, x in mine.digests.items() if x != other.digests.get(name)]
    if mine.device is not None and mine.device == other.device:
        return names
    # Another program on other devices may round the same initialization differently.
    x, y = mine.weights, other.weights
    close = x.shape == y.shape and np.allclose(x, y, rtol=_ULPS * mine.ulp, equal_nan=True)
    return [name for name in names if not close or name not in ("weights", "optimizer states")]


def digest(tree: Any) -> str:
    """Return a digest of arrays: their structure, shapes, dtypes and bytes; of large ones, only some of the bytes.

    Of an array of more than 64 MiB, evenly spaced rows are read, and of one that spreads over processes, none.
    """
    sha = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        sha.update(f"{jax.tree_util.keystr(path)} {np.shape(leaf)} {getattr(leaf, 'dtype', type(leaf))};".encode())
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
        size = getattr(leaf, "nbytes", 0)
        if size > _SAMPLE and np.shape(leaf)[0] > 1:
            count = np.shape(leaf)[0]
            rows = np.linspace(0, count - 1, max(2, count * _SAMPLE // size)).astype(np.int64)
            leaf = leaf[np.unique(rows)] if getattr(leaf, "is_fully_addressable", True) else leaf
        if getattr(leaf, "is_fully_addressable", True):
            sha.update(np.asarray(leaf).tobytes())
    return _short(sha)


def program_digest(closed: ClosedJaxpr) -> str:
    """Return a digest of a program: its operations, and the values of its constants."""
    # A program prints functions with their addresses, which differ between processes.
    text = re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr))
    return _short(hashlib.sha256(repr([text, *map(digest, _constants(closed))]).encode()))


def _constants(program: Any) -> Iterator[Any]:
    """Yield the arrays in a program and in the programs that it calls, whose values are not part of its text."""
    if isinstance(program, ClosedJaxpr):
        yield from program.consts
        program = program.jaxpr
    for eqn in program.eqns:
        yield from (x.val for x in eqn.invars if isinstance(x, Literal) and np.ndim(x.val))
        for parameter in jax.tree.leaves(dict(eqn.params)):
            if isinstance(parameter, (ClosedJaxpr, Jaxpr)):
                yield from _constants(parameter)
            elif isinstance(parameter, (np.ndarray, jax.Array)):
                yield parameter


def _libraries() -> dict[str, str]:
    """Return the versions of the libraries that a program depends on."""
    found = {"plurax": __version__}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _short(sha: Any) -> str:
    return f"sha256:{sha.hexdigest()[:32]}"
