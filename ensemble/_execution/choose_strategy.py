"""`StrategyChoice`: how a step is executed: as the trainer was told, as an earlier one was, or as is quickest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from ...transforms._convolutions.as_products import has_convolution
from ...transforms._core.axes import Axes
from ...transforms._core.compat import Tracer
from ...transforms._core.memory import largest_chunk
from ...transforms._models.hashable import HashablePytree
from .._members.sharding import Layout
from .._members.strategy import Execution, in_turn
from .._step.state import Apart, TrainState, kind_of
from .autotune import Tuning, fingerprint, recall, remember, tune
from .executor import Executor

# Where a loop is written out, at most so many copies of a member's step; else it is a loop of the compiler's.
_MOST_COPIES = 16


class StrategyChoice:
    """How the steps of a trainer are executed.

    Args:
      executor: what executes and measures them.
      strategy: as the trainer was told.
      chunk_size: likewise.
      budget: the most bytes that the temporaries of a step may take, or None.
      seconds: how long "auto" may measure.
      cache: the directory in which it keeps what it has found, or None.

    Attributes:
      tuning: what it has measured last; None where nothing was.
    """

    def __init__(
        self,
        executor: Executor,
        strategy: str,
        chunk_size: int | None,
        budget: int | None,
        seconds: float,
        cache: Path | None,
    ) -> None:
        self.tuning: Tuning | None = None
        self._executor, self._layout = executor, executor.layout
        self._strategy, self._chunk_size = strategy, chunk_size
        self._budget, self._seconds, self._cache = budget, seconds, cache
        self._chosen: dict[Any, Execution] = {}
        self._fitting: dict[Any, bool] = {}

    @property
    def asked(self) -> Execution:
        """What the trainer was told."""
        return Execution(self._strategy, self._chunk_size)

    def choose(
        self,
        state: TrainState,
        arguments: tuple[Any, ...],
        axes: tuple[Axes, ...],
        earlier: Execution | None,
        donate: bool,
        tell: Callable[[str], None],
    ) -> Execution:
        """How a step is executed: as the trainer says, else as an earlier one was, else as is quickest."""
        if self._strategy == "vmap" and self._budget is None:
            chunk_size = self._chunk_size
            if chunk_size is None and earlier and earlier.strategy == "vmap":
                chunk_size = earlier.chunk_size
            return Execution("vmap", chunk_size)
        traced = state._is_traced() or any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments))
        chosen = Execution(self._strategy)
        if self._chunk_size is not None:
            chosen = Execution("vmap", self._chunk_size)
        elif self._strategy == "auto":
            kept = earlier is not None and self._fits(state, arguments, axes, earlier)
            chosen = earlier if earlier and kept else self._quickest(state, arguments, axes, donate, traced, tell)
        elif self._strategy == "vmap":
            kept = earlier is not None and earlier.strategy == "vmap" and self._fits(state, arguments, axes, earlier)
            chosen = earlier if earlier and kept else self._largest_chunk(state, arguments, axes)
        found = chosen
        if traced:
            chosen = chosen._replace(products=False, devices=1)
        if chosen.strategy == "loop" and (traced or self._layout is not None):
            many = self._strategy == "auto" and self._here(state) > _MOST_COPIES
            chosen = chosen._replace(strategy="map" if many else "unroll")
        if chosen.devices > len(jax.local_devices()):  # of a checkpoint that another machine has written
            chosen = chosen._replace(devices=1)
        if chosen != found and not self._fits(state, arguments, axes, chosen):
            return self._largest_chunk(state, arguments, axes)
        return chosen

    def _quickest(
        self,
        state: TrainState,
        arguments: tuple[Any, ...],
        axes: tuple[Axes, ...],
        donate: bool,
        traced: bool,
        tell: Callable[[str], None],
    ) -> Execution:
        """What "auto" stands for, found once for each kind of model and batch."""
        structure, size = state._structure_and_size()
        kind = donate, state._kind, HashablePytree.of(axes), kind_of(arguments)
        if kind not in self._chosen:
            jaxpr = self._executor.member_program(state, arguments, axes)
            # In a trace there is no time. Several processes would measure different times, and part ways. Side effects
            # would happen.
            traced = traced or isinstance(jnp.zeros(()), Tracer)
            alone = self._layout is None or self._layout.in_one_process
            effects = [effect for effect in jaxpr.effects if type(effect).__name__ != "NamedAxisEffect"]
            if traced or not alone or not self._seconds or effects:
                chosen = self._by_rule(jaxpr, traced, state, arguments, axes)
                if not traced:  # so that a step that is not traced measures
                    self._chosen[kind] = chosen
                return chosen
            on_mesh = None if self._layout is None else tuple(self._layout.mesh.shape.items())
            devices = len(jax.local_devices()) if on_mesh is None and jax.default_backend() == "cpu" else 1
            spread = None if isinstance(state._held, Apart) else Layout.around(state._rows())
            where = on_mesh, None if spread is None else spread.devices
            key = fingerprint(jaxpr, size, axes, self._budget, where, devices, donate)
            tuning = recall(key, self._cache)
            if tuning is None or tuning.is_cut_short_of(self._seconds):
                tuning = tune(
                    partial(self._executor.trial, state, arguments, axes, donate),
                    size=self._here(state),
                    looped=self._layout is None,
                    devices=min(devices, size),
                    convolutions=has_convolution(jaxpr),
                    seconds=self._seconds,
                    budget=self._budget,
                    where=f"{size} × {structure!r} on {jax.devices()[0].device_kind}",
                    tell=tell,
                )
                if tuning is None:  # such as too little memory for a copy of the state
                    self._chosen[kind] = self._by_rule(jaxpr, traced, state, arguments, axes)
                    return self._chosen[kind]
                remember(key, tuning, self._cache)
            self.tuning, self._chosen[kind] = tuning, tuning.chosen
        return self._chosen[kind]

    def _by_rule(
        self, jaxpr: Jaxpr, traced: bool, state: TrainState, arguments: tuple[Any, ...], axes: tuple[Axes, ...]
    ) -> Execution:
        """A strategy without measuring, within the budget."""
        strategy = "vmap"
        if in_turn(jaxpr, jax.default_backend()):
            strategy = "loop"
            if traced or self._layout is not None:
                strategy = "unroll" if self._here(state) <= _MOST_COPIES else "map"
        chosen = Execution(strategy)
        return chosen if self._fits(state, arguments, axes, chosen) else self._largest_chunk(state, arguments, axes)

    def _fits(
        self, state: TrainState, arguments: tuple[Any, ...], axes: tuple[Axes, ...], execution: Execution
    ) -> bool:
        """Whether a step that is executed so stays within the budget."""
        if self._budget is None:
            return True
        kind = execution, state._kind, HashablePytree.of(axes), kind_of(arguments)
        if kind not in self._fitting:
            need = self._executor.trial(state, arguments, axes, False, execution).compile()
            self._fitting[kind] = need <= self._budget
        return self._fitting[kind]

    def _here(self, state: TrainState) -> int:
        """How many members one device has."""
        _, size = state._structure_and_size()
        return size if self._layout is None else self._layout.padded(size) // self._layout.devices

    def _largest_chunk(self, state: TrainState, arguments: tuple[Any, ...], axes: tuple[Axes, ...]) -> Execution:
        """The largest chunk for "vmap" whose temporaries fit into the budget."""
        kind = "chunk", state._kind, HashablePytree.of(axes), kind_of(arguments)
        if kind not in self._chosen:
            here = self._here(state)

            def need(chunk: int) -> int:
                execution = Execution("vmap", None if chunk == here else chunk)
                return self._executor.trial(state, arguments, axes, False, execution).compile()

            assert self._budget is not None
            chunk = largest_chunk("Trainer", need, here, self._budget)
            self._chosen[kind] = Execution("vmap", None if chunk == here else chunk)
        return self._chosen[kind]
