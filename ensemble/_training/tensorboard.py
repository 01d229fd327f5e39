"""`TensorBoard`: write the metrics of a run as curves, with one TensorBoard run per member."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class TensorBoard:
    """A callback of `Trainer.fit` that writes the metrics of each member for TensorBoard.

    Each member has its own directory (`member_03`, ...), so one chart shows a metric of all members, and members can be
    selected. If several processes train one ensemble, pass the callback to `fit` in only one of them.

    Args:
      directory: the directory to write to, created if missing.

    Raises:
      ModuleNotFoundError: the extra `tensorboard` is not installed.

    Cost:
      About 20 µs for each metric and member. The files are flushed every two minutes and when closed: use the callback
      in a `with` statement, or call `close`.

    Examples:
      >>> import tempfile, optax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, TensorBoard, Trainer
      >>> trainer = Trainer(lambda model, x: jnp.mean(model(x) ** 2), optax.sgd(0.1))
      >>> state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(3, 1, rngs=rngs), 2, seed=0))
      >>> with tempfile.TemporaryDirectory() as directory, TensorBoard(directory) as board:
      ...     state, history = trainer.fit(state, [jnp.ones((4, 3))] * 3, progress=False, callbacks=[board])
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError as error:
            remedy = "install it with: pip install 'plurax[tensorboard]'"
            raise ModuleNotFoundError(f"TensorBoard needs tensorboardX; {remedy}") from error
        self._make = SummaryWriter
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._writers: list[Any] = []

    def __call__(self, step: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Write the metrics of a step, except for members that have stopped."""
        # The number of members is known only from the first metrics.
        size = max((len(values) for values in metrics.values()), default=0)
        while len(self._writers) < size:
            self._writers.append(self._make(str(self._directory / f"member_{len(self._writers):02d}")))
        for name, values in metrics.items():
            for writer, value in zip(self._writers, values, strict=True):
                # `fit` reports NaN for a member that has stopped.
                if not np.isnan(value):
                    writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Flush and close the files."""
        for writer in self._writers:
            writer.close()
        self._writers = []

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
