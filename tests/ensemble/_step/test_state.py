"""The initial state is created by few programs."""

import logging

import jax
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Trainer


@pytest.mark.slow
def test_the_initial_state_takes_few_compilations(caplog):
    """Not one for each shape, and another one for each shape that is copied."""

    def make(rngs):
        return nnx.Sequential(*[nnx.Linear(i + 3, i + 4, rngs=rngs) for i in range(8)])

    ensemble = Ensemble.create(make, 2, seed=0)
    trainer = Trainer(lambda model, x: model(x).sum(), optax.adam(0.1), strategy="vmap")
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        first = trainer.init(ensemble)
        compiled = sum("Finished XLA compilation" in text for text in caplog.messages)
        assert 1 <= compiled <= 5
        caplog.clear()
        trainer.init(ensemble)
        assert not any("XLA compilation" in text for text in caplog.messages)
    assert first.ensemble.trainable["layers"][0]["kernel"] is not ensemble.trainable["layers"][0]["kernel"]
