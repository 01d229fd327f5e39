"""The call that a program is compiled for: a function and the kinds of its arguments; and the identity of a program."""

from __future__ import annotations

import functools
import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..._core.compat import Jitted, lowered_for
from ..._models.mutation import call_purely
from ..._models.split_model import split_tree, splits_of
from .call_structure import described, nodes, without_addresses, written
from .environment import current_mesh, default_device, settings_of_a_call


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
      names: the settings of JAX that the program depends on.
    """

    fun: Callable[..., Any]
    function: Callable[..., Any]
    key: str | None
    verify: bool
    leaves: Sequence[Any]
    structure: Any
    names: list[str]
    # A part of the program's name, so that JAX's persistent cache does not have it. XLA's CPU backend serializes a
    # program that was loaded from there into one that does not run: "Function wrapped_sine not found" (jaxlib 0.10.2).
    tag: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def lower(self) -> Lowered:
        """Trace and lower `fun`, as a function of the leaves to its result and the arrays it changes of each model."""
        donated = self._donated(self.fun) if isinstance(self.fun, Jitted) else ()

        def program(*leaves: Any) -> Any:
            arguments = jax.tree.unflatten(self.structure, leaves)
            out, changed = call_purely("aot", self.function, arguments, may_assign=True)
            return split_tree(out), changed

        program.__name__ = f"{self.name}_{self.tag}"
        # All arguments are kept, since the text of a program does not say which of them were left out.
        traced = jax.jit(program, donate_argnums=donated, keep_unused=True).trace(*self.leaves)
        lowered = traced.lower()
        types = [str(x) for x in jax.tree.leaves(traced.out_info)]
        return Lowered(lowered, lowered.as_text().replace(f"_{self.tag}", ""), types)

    def _donated(self, jitted: Any) -> tuple[int, ...]:
        """Return the numbers of the leaves that a jitted function donates."""
        _, args, kwargs = jax.tree.unflatten(self.structure, self.leaves)
        if splits_of((args, kwargs)):
            raise ValueError("aot: fun is under jax.jit and is given a module; pass the function without jax.jit.")
        infos = jax.tree.leaves(jitted.trace(*args, **kwargs).args_info)
        if len(infos) != len(self.leaves):
            raise ValueError(
                "aot: fun is under jax.jit with static arguments, which a program has not; bind them: "
                "functools.partial(fun, name=value)."
            )
        return tuple(i for i, info in enumerate(infos) if info.donated)

    def identity(self, lower: Callable[[], Lowered]) -> list[Any]:
        """Return what tells the program from others, in every process; with a key, only the name of the code."""
        if self.key is None:
            program: Any = lower().identity
        else:
            devices = len(jax.devices(self.device.platform))  # a function may use all of them, or ask for their number
            program = [self.key, self.name, described(self.structure), _bound(self.fun), devices]
        mesh = current_mesh()
        among = [x.id for x in mesh.devices.flat] if isinstance(mesh, Mesh) else ""
        around = [settings_of_a_call(), f"{mesh} {among}" if mesh else "", str(self.device)]
        return [program, around, [_argument(x) for x in self.leaves]]

    @property
    def name(self) -> str:
        """Return the name of `fun`, of a partial that of its function."""
        fun: Any = self.fun
        while isinstance(fun, functools.partial):
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
    """A program that is traced and lowered, and all that tells it from others.

    Attributes:
      program: the lowered program, `jax.stages.Lowered`.
      text: its text, with all constants.
      types: the types of its results, since the text does not show which are weak.
    """

    program: Any
    text: str
    types: list[str]

    @property
    def identity(self) -> list[Any]:
        """Return all that tells it from others, for `json`; the devices too, which the text does not name."""
        return [digest(self.text), self.types, [device.id for device in lowered_for(self.program)]]

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
    """Return the arguments that partials bind: types of arrays, and the `repr` of others."""
    if not isinstance(fun, functools.partial):
        return []
    leaves, structure = jax.tree.flatten(split_tree((fun.args, fun.keywords)))
    texts = [f"{x.dtype}{x.shape}" if isinstance(x, (jax.Array, np.ndarray)) else repr(x) for x in leaves]
    return [described(structure), *map(without_addresses, texts), *_bound(fun.func)]


def _argument(x: Any) -> str:
    """Return the kind of an argument, with layout and devices if it is committed."""
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        return str(jax.typeof(x))
    # The `repr` of a sharding names its mesh, but not the devices in it, nor their order.
    devices: Iterable[Any] = sharding.devices_indices_map(x.shape)
    return f"{jax.typeof(x)} {x.format} {[device.id for device in devices]}"
