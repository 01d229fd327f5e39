"""The call that a program is compiled for: a function and the types of its arguments, and the program's identity."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..._core.compat import Jitted, code_of, lowered_for
from ..._models.mutation import call_purely
from ..._models.split_model import split_tree, splits_of
from .call_structure import described, nodes, without_addresses, written
from .environment import current_mesh, default_device, identity_of_environment, settings_of_jax
from .program_file import Line

_FORMAT = "4"
# Custom calls that are built into XLA. JAX registers all others during lowering, so a program that is loaded into a
# process without lowering there would call functions that are not registered.
_READY = {"ApproxTopK", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement"}


@dataclass(frozen=True)
class CallSignature:
    """The description of a call, without the arrays of its arguments.

    Attributes:
      fun: the function, as passed by the user.
      function: the same with its owner as the first argument, see `bound_model`.
      key: the user's key, or None.
      verify: whether to compare a program that was found by its key with `fun`.
      leaves: the leaves of the arguments, made `abstract`.
      structure: the structure of these leaves: the owner, the arguments and the keyword arguments, with split models.
      settings: the settings of JAX at the call that the program depends on.
      mesh: the mesh at the call.
    """

    fun: Callable[..., Any]
    function: Callable[..., Any]
    key: str | None
    verify: bool
    leaves: Sequence[Any]
    structure: Any
    settings: dict[str, Any] = field(default_factory=settings_of_jax)
    mesh: Any = field(default_factory=current_mesh)

    def lower(self) -> Lowered:
        """Trace and lower `fun` as a function of the leaves that returns its result and each model's changed arrays."""
        donated = self._donated(self.fun) if isinstance(self.fun, Jitted) else ()

        def program(*leaves: Any) -> Any:
            arguments = jax.tree.unflatten(self.structure, leaves)
            out, changed = call_purely("aot", self.function, arguments, may_assign=True)
            return split_tree(out), changed

        # Use a new name each time, so that JAX's persistent cache never has the program: serialized by XLA's CPU
        # backend, a program from that cache does not run, "Function wrapped_sine not found" (jaxlib 0.10.2).
        tag = f"_{uuid.uuid4().hex[:8]}"
        program.__name__ = self.name + tag
        # Keep all arguments, since the code of a program does not show which of them were dropped.
        traced = jax.jit(program, donate_argnums=donated, keep_unused=True).trace(*self.leaves)
        lowered = traced.lower()
        code = code_of(lowered).replace(tag.encode(), b"")
        # The code has all constants, but it shows neither weakly typed results nor devices.
        types = [str(x) for x in jax.tree.leaves(traced.out_info)]
        identity = [hashlib.sha256(code).hexdigest(), types, [device.id for device in lowered_for(lowered)]]
        text = lowered.as_text() if b"custom_call" in code else ""
        return Lowered(lowered, identity, sorted(set(re.findall(r"custom_call @([\w.$]+)", text)) - _READY))

    def _donated(self, jitted: Any) -> tuple[int, ...]:
        """Return the indices of the leaves that a jitted function donates."""
        _, args, kwargs = jax.tree.unflatten(self.structure, self.leaves)
        if splits_of((args, kwargs)):
            raise ValueError("aot: fun is under jax.jit and receives a module; pass the function without jax.jit.")
        infos = jax.tree.leaves(jitted.trace(*args, **kwargs).args_info)
        if len(infos) != len(self.leaves):
            raise ValueError("aot: fun is under jax.jit with static arguments; bind them: functools.partial(fun, n=2).")
        return tuple(i for i, info in enumerate(infos) if info.donated)

    def identity(self, lower: Callable[[], Lowered]) -> str:
        """Return a hash that identifies the program; with a key, only the name of the code enters it."""
        if self.key is None:
            program: Any = lower().identity
        else:
            devices = len(jax.devices(self.device.platform))  # a function may use all of them, or their number
            program = [self.key, self.name, described(self.structure), _bound(self.fun), devices]
        # The text of a mesh names its axes, but not its devices.
        among = [x.id for x in self.mesh.devices.flat] if isinstance(self.mesh, Mesh) else ""
        around = [identity_of_environment(self.device, self.settings), f"{self.mesh} {among}", str(self.device)]
        return digest([_FORMAT, program, around, [_argument(x) for x in self.leaves]])

    @property
    def name(self) -> str:
        """Return the name of `fun`; for a partial, the name of its function."""
        fun: Any = self.fun
        while isinstance(fun, partial):
            fun = fun.func
        return getattr(fun, "__qualname__", type(fun).__qualname__)

    @property
    def device(self) -> Any:
        """Return the device of lowest id that the program runs on, the same in every process."""
        committed = list(filter(None, (getattr(x, "sharding", None) for x in self.leaves)))
        devices = committed[0].device_set if committed else {default_device()}
        return min(devices, key=lambda device: device.id)


@dataclass(frozen=True)
class Lowered:
    """A traced and lowered program.

    Attributes:
      program: the lowered program, `jax.stages.Lowered`.
      identity: the values that identify it, as JSON data.
      calls: the functions outside XLA that it calls.
    """

    program: Any
    identity: list[Any]
    calls: list[str]

    def is_of(self, call: CallSignature, line: Line) -> bool:
        """Return whether what a file says is about this program."""
        try:
            out = written(self.program.out_tree, nodes(call.structure))
        except TypeError:  # such a result cannot be stored, so the file has another program
            return False
        return [self.identity, out] == [line.identity, line.out]


def abstract(x: Any) -> Any:
    """Return an argument without its values: for an array its type, and, if committed, its sharding and layout."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        return x  # `jax.jit` may reject it
    kind = jax.typeof(x)
    # Key arrays have no layout.
    sharding = getattr(x, "format", x.sharding) if isinstance(x, jax.Array) and x.committed else None
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type, sharding=sharding)


def digest(value: Any) -> str:
    """Return a hash of JSON data."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _bound(fun: Any) -> list[str]:
    """Return texts of the arguments that a partial binds: the types of arrays, and the `repr` of other values."""
    if not isinstance(fun, partial):
        return []
    leaves, structure = jax.tree.flatten(split_tree((fun.args, fun.keywords)))
    texts = [f"{x.dtype}{x.shape}" if isinstance(x, (jax.Array, np.ndarray)) else repr(x) for x in leaves]
    return [described(structure), *map(without_addresses, texts)]


def _argument(x: Any) -> str:
    """Return the type of an argument, with its layout and devices if it is committed."""
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        return str(jax.typeof(x))
    # The `repr` of a sharding names its mesh, but neither the devices in it nor their order.
    devices: Iterable[Any] = sharding.devices_indices_map(x.shape)
    return f"{jax.typeof(x)} {x.format} {[device.id for device in devices]}"
