"""DP-SGD: sampling, clipped sums, noise, accounting, and the training loop.

The inputs are a loss, an optimizer and settings, then a model, a key and data; the outputs are a trained model and the
ε spent. `_per_example` computes the clipped sums.

- `dpsgd.py`: `DPSGD`, the public class: `init`, `batches`, `step`, `fit` (the training loop with its ε budget, progress
  bar, history and checkpoints), `save`, `load`, `epsilon`, `event`.
- `fit.py`: the last step that `fit` may take, and the message of a run that ends early.
- `settings.py` checks the settings.
- `accounting.py`: `Ledger` describes a step to a privacy accountant. It computes ε from a number of steps, the number
  of steps from a budget, and the noise multiplier from a target ε.
- `state.py`: `DPState`, everything that training changes; parameter checks; saving a state with its ledger through
  `_runs/checkpoint.py`, and resuming from it. A resumed run equals an uninterrupted one bit for bit, because the state
  holds the noise key, the dropout key and the sampling seed.
- `sampling.py`: `Batch`; the iterator over Poisson-sampled batches, padded to a few sizes; and the check that a batch
  was sampled as the accounting assumes.
- `step.py`: `PrivateStep`, one step as a function to compile. It uses the next two files, then the optimizer.
- `model_loss.py`: the loss of one example, with independent randomness; raises if a model keeps other mutable state.
- `noise.py` adds Gaussian noise to the clipped sums. jax-privacy draws it, from keys of `jax.random`; on a CPU this
  file computes the same random bits faster than JAX does.
"""
