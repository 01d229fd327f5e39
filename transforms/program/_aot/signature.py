"""The call that a program is compiled for: a function and the kinds of its arguments; and the identity of a program."""

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

from ..._core.compat import Jitted, lowered_for
from ..._models.mutation import call_purely
from ..._models.split_model import split_tree, splits_of
from .call_structure import described, nodes, without_addresses, written
from .environment import current_mesh, default_device, identity_of_environment, settings_of_jax

_FORMAT = "3"
# Custom calls that XLA knows by itself. JAX registers the others with XLA when it first lowers one, so a program that
# is loaded into a process without having been lowered there would call what is not there.
_READY = {"ApproxTopK", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement"}


@dataclass(frozen=True)
class CallSignature:
    """A call that a program is wanted for. It holds no array of the arguments.

    Attributes:
      fun: the function, as the user gave it.
      function: the same as a function of its owner first, see `bound_model`.
      key: the user's key, or None.
      verify: whether a program that was found by a key is to be compared with `fun`.
      leaves: the arguments, as `abstract` ones.
      structure: that of owner, arguments and keyword arguments, with split models, whose leaves these are.
      settings: the settings of JAX in which it is made, as far as the program depends on them.
      mesh: the mesh in which it is made.
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
        """Trace and lower `fun`, as a function of the leaves to its result and the arrays it changes of each model."""
        donated = self._donated(self.fun) if isinstance(self.fun, Jitted) else ()

        def program(*leaves: Any) -> Any:
            arguments = jax.tree.unflatten(self.structure, leaves)
            out, changed = call_purely("aot", self.function, arguments, may_assign=True)
            return split_tree(out), changed

        # The name is a new one each time, so that JAX's persistent cache does not have the program: XLA's CPU backend
        # serializes what it loads from there into what does not run, "Function wrapped_sine not found" (jaxlib 0.10.2).
        tag = f"_{uuid.uuid4().hex[:8]}"
        program.__name__ = self.name + tag
        # All arguments are kept, since the text of a program does not say which of them were left out.
        traced = jax.jit(program, donate_argnums=donated, keep_unused=True).trace(*self.leaves)
        lowered = traced.lower()
        text = lowered.as_text().replace(tag, "")
        # The text has all constants, but neither shows which results are weakly typed nor names the devices.
        types = [str(x) for x in jax.tree.leaves(traced.out_info)]
        identity = [digest(text), types, [device.id for device in lowered_for(lowered)]]
        return Lowered(lowered, identity, sorted(set(re.findall(r"custom_call @([\w.$]+)", text)) - _READY))

    def _donated(self, jitted: Any) -> tuple[int, ...]:
        """Return the numbers of the leaves that a jitted function donates."""
        _, args, kwargs = jax.tree.unflatten(self.structure, self.leaves)
        if splits_of((args, kwargs)):
            raise ValueError("aot: fun is under jax.jit and is given a module; pass the function without jax.jit.")
        infos = jax.tree.leaves(jitted.trace(*args, **kwargs).args_info)
        if len(infos) != len(self.leaves):
            raise ValueError("aot: fun is under jax.jit with static arguments; bind them: functools.partial(fun, n=2).")
        return tuple(i for i, info in enumerate(infos) if info.donated)

    def identity(self, lower: Callable[[], Lowered]) -> str:
        """Return a hash of all that tells the program from others; with a key, of the code only the name counts."""
        if self.key is None:
            program: Any = lower().identity
        else:
            devices = len(jax.devices(self.device.platform))  # a function may use all of them, or ask for their number
            program = [self.key, self.name, described(self.structure), _bound(self.fun), devices]
        # The text of a mesh names its axes, but not its devices.
        among = [x.id for x in self.mesh.devices.flat] if isinstance(self.mesh, Mesh) else ""
        around = [identity_of_environment(self.device, self.settings), f"{self.mesh} {among}", str(self.device)]
        return digest([_FORMAT, program, around, [_argument(x) for x in self.leaves]])

    @property
    def name(self) -> str:
        """Return the name of `fun`, of a partial that of its function."""
        fun: Any = self.fun
        while isinstance(fun, partial):
            fun = fun.func
        return getattr(fun, "__qualname__", type(fun).__qualname__)

    @property
    def device(self) -> Any:
        """Return one of the devices that it runs on, the same in every process."""
        committed = list(filter(None, (getattr(x, "sharding", None) for x in self.leaves)))
        devices = committed[0].device_set if committed else {default_device()}
        return min(devices, key=lambda device: device.id)


@dataclass(frozen=True)
class Lowered:
    """A program that is traced and lowered.

    Attributes:
      program: the lowered program, `jax.stages.Lowered`.
      identity: all that tells it from others, for `json`.
      calls: the functions outside of XLA that it calls.
    """

    program: Any
    identity: list[Any]
    calls: list[str]

    def is_of(self, call: CallSignature, line: dict[str, Any]) -> bool:
        """Return whether it is the program that the `line` of a file was written for."""
        try:
            out = written(self.program.out_tree, nodes(call.structure))
        except TypeError:  # no file could hold such a result, so this one holds another program
            return False
        return [self.identity, out] == [line["identity"], line["out"]]


def abstract(x: Any) -> Any:
    """Return an argument without its numbers: of an array the type, and if it is committed, sharding and layout."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        return x  # `jax.jit` may refuse it as a static one
    kind = jax.typeof(x)
    # Keys have no layout of their own.
    sharding = getattr(x, "format", x.sharding) if isinstance(x, jax.Array) and x.committed else None
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type, sharding=sharding)


def digest(value: Any) -> str:
    """Return a hash of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _bound(fun: Any) -> list[str]:
    """Return the arguments that a partial binds: types of arrays, and the `repr` of others."""
    if not isinstance(fun, partial):
        return []
    leaves, structure = jax.tree.flatten(split_tree((fun.args, fun.keywords)))
    texts = [f"{x.dtype}{x.shape}" if isinstance(x, (jax.Array, np.ndarray)) else repr(x) for x in leaves]
    return [described(structure), *map(without_addresses, texts)]


def _argument(x: Any) -> str:
    """Return the kind of an argument, with layout and devices if it is committed."""
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        return str(jax.typeof(x))
    # The `repr` of a sharding names its mesh, but not the devices in it, nor their order.
    devices: Iterable[Any] = sharding.devices_indices_map(x.shape)
    return f"{jax.typeof(x)} {x.format} {[device.id for device in devices]}"
