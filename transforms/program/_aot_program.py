"""A function for arguments of one kind as a program: taken from a file, or compiled and written to one."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .._changes import call_purely
from .._compat import Jitted, devices_of, loaded, lowered_for, serialized
from .._model import owner_of, parts_of, to_parts
from . import _aot_file as file
from ._environment import current_mesh, default_device, installation, settings_of_a_call, settings_of_a_process
from ._structure import described, nodes, read, written

_FORMAT = "1"
# What a program may call outside of XLA, though nothing has been lowered in its process.
_READY = {"ApproxTopK", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement"}


class Inside(Exception):
    """The call is given a value of a `jax.jit`, `jax.grad` or `jax.vmap` around it, or its function closes over one."""


@dataclass(frozen=True)
class Call:
    """A call that a program is wanted for.

    Attributes:
      fun: the function, as the user gave it.
      function: the same as a function of its owner first, see `owner_of`.
      key: what the program is found by, or None.
      leaves: the arguments.
      structure: how they go together to the owner, arguments and keyword arguments, models taken apart.
      names: the settings of JAX that it depends on.
    """

    fun: Callable[..., Any]
    function: Callable[..., Any]
    key: str | None
    leaves: Sequence[Any]
    structure: Any
    names: list[str]
    # A part of the program's name, so that JAX's persistent cache has no such program. From what was loaded from there
    # XLA's CPU backend writes nothing that runs: "Function wrapped_sine not found" (jaxlib 0.10.2).
    tag: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def lower(self) -> Any:
        """Trace and lower `fun`, as a function of the leaves to its result and what it changes of each model."""
        donated = self._donated(self.fun) if isinstance(self.fun, Jitted) else ()

        def program(*leaves: Any) -> Any:
            arguments = jax.tree.unflatten(self.structure, leaves)
            out, changed = call_purely("aot", self.function, arguments, may_assign=True)
            return to_parts(out), changed

        program.__name__ = f"{_name(self.fun)}_{self.tag}"
        traced = jax.jit(program, donate_argnums=donated).trace(*self.leaves)
        if len(traced.jaxpr.in_avals) != len(self.leaves):
            raise Inside
        return traced.lower()

    def _donated(self, jitted: Any) -> tuple[int, ...]:
        _, args, kwargs = jax.tree.unflatten(self.structure, self.leaves)
        if parts_of((args, kwargs)):
            raise ValueError("aot: fun is under jax.jit and is given a module; pass the function without jax.jit.")
        infos = jax.tree.leaves(jitted.trace(*args, **kwargs).args_info)
        if len(infos) != len(self.leaves):
            raise ValueError(
                "aot: fun is under jax.jit with static arguments, which a program has not; bind them: "
                "functools.partial(fun, name=value)."
            )
        return tuple(i for i, info in enumerate(infos) if info.donated)

    def identity(self, lower: Callable[[], Any]) -> list[Any]:
        """What tells the program from all others, the same in every process."""
        if self.key is None:
            text = lower().as_text().replace(self.tag, "")
            program = [_digest(text), [device.id for device in lowered_for(lower())]]
        else:
            try:
                of_fun = described(self.fun, whole=False, owner=owner_of(self.fun)[0])
                program = [self.key, of_fun, described((_bound(self.fun), self.structure))]
            except jax.errors.TracerArrayConversionError:
                raise Inside from None
            except TypeError as error:
                raise TypeError(
                    f"aot: with key, fun and what is static in its arguments have to be known again by another "
                    f"process, but {error}; leave key out, so that the program is traced."
                ) from error
        mesh = current_mesh()
        around = [settings_of_a_call(), f"{mesh} {[x.id for x in mesh.devices.flat]}" if mesh else "", str(self.device)]
        return [program, around, [_argument(x) for x in self.leaves]]

    @property
    def device(self) -> Any:
        """One of the devices that it runs on."""
        committed = [x for x in self.leaves if isinstance(x, jax.Array) and x.committed]
        devices = committed[0].devices() if committed else {default_device()}
        return min(devices, key=lambda device: device.id)


def prepare(call: Call, directory: Path) -> tuple[Any, list[str]] | None:
    """The compiled program for a call, and what there is to be said of its file; None for a call `Inside`."""
    try:
        return _prepare(call, functools.cache(call.lower), directory)
    except Inside:
        return None


def _prepare(call: Call, lower: Callable[[], Any], directory: Path) -> tuple[Any, list[str]]:
    identity, here = call.identity(lower), installation(call.device)
    # Machines of several kinds may share a directory; other versions are the next ones, and replace the file.
    name = _digest([identity, here["device"], here.get("processor")])[:32]
    label = re.sub(r"[^\w.-]+", "_", _name(call.fun))[:60]
    path = directory / f"{label}-{name}.aot"
    # In this order, so that of another version that has other settings the version is named.
    expected = {"format": _FORMAT, "program": _digest(identity), **here, **settings_of_a_process(call.names)}
    said: list[str] = []
    try:
        found = file.read(path, expected)
        if found:
            return _load(call, lower, *found), said
    except file.Unfit as unfit:
        said.append(f"{path} {unfit}; the program is compiled anew, and the file replaced.")
    compiled = lower().compile()
    try:
        file.write(path, expected | _line(call, lower(), compiled), serialized(compiled))
    except Exception as error:  # which, depends on what is in the program
        said.append(f"{path} cannot be written ({error}); other processes will compile the program again.")
    return compiled, said


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _line(call: Call, lowered: Any, compiled: Any) -> dict[str, Any]:
    """What the file has to say of a program."""
    if jax.process_count() > 1:
        raise RuntimeError("the run has several processes")
    return {
        "devices": [device.id for device in devices_of(compiled)],
        "calls": sorted(set(re.findall(r"custom_call @([\w.$]+)", lowered.as_text())) - _READY),
        "out": written(compiled.out_tree, nodes(call.structure)) if call.key else None,
    }


def _load(call: Call, lower: Callable[[], Any], line: dict[str, Any], payload: bytes) -> Any:
    calls = line["calls"]
    if any(not name.startswith("lapack_") for name in calls):
        lower()
    elif calls:
        _prepare_lapack(call.device)
    try:
        out_tree = read(line["out"], nodes(call.structure)) if call.key else lower().out_tree
        devices = {device.id: device for device in jax.devices(call.device.platform)}
        in_tree = jax.tree.structure((tuple(call.leaves), {}))
        return loaded(payload, in_tree, out_tree, [devices[i] for i in line["devices"]])
    except Exception as error:  # JAX, pickle and XLA raise many kinds for one fact
        raise file.Unfit(f"cannot be loaded ({type(error).__name__}: {error})") from error


def _prepare_lapack(device: Any) -> None:
    """Let JAX look up the functions of LAPACK, which it does when it lowers one; to call them before is a crash."""
    with jax.default_device(device):
        jax.jit(jnp.linalg.cholesky).lower(jax.ShapeDtypeStruct((1, 1), jnp.float32))


def _name(fun: Any) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__qualname__", type(fun).__qualname__)


def _bound(fun: Any) -> list[Any]:
    """What is bound by partials."""
    return [fun.args, fun.keywords, *_bound(fun.func)] if isinstance(fun, functools.partial) else []


def _argument(x: Any) -> str:
    """The kind of an argument, and where it is committed to."""
    if not isinstance(x, jax.Array) or not x.committed:
        return str(jax.typeof(x))
    devices: Iterable[Any] = x.sharding.devices_indices_map(x.shape)
    return f"{jax.typeof(x)} {x.sharding} {[device.id for device in devices]}"
