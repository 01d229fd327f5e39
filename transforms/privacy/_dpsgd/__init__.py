"""DP-SGD: sampling, clipped sums, noise, accounting, and the run that joins them.

A loss, an optimizer and settings flow in, then a model, a key and data; a trained model and the ε that it spent come
out. The clipped sums themselves are those of `_per_example`.

- `dpsgd.py`: `DPSGD`, the public class: `init`, `batches`, `step`, `fit` (the loop: the budget, the bar with ε, the
  history, checkpoints to go on from), `save`, `load`, `epsilon`, `event`.
- `settings.py` checks the settings.
- `accounting.py`: `Ledger` describes a step to a privacy accountant. It computes ε from a number of steps, the number
  of steps from a budget, and the noise multiplier from a target ε.
- `state.py`: `DPState`, all that training changes; the checks of parameters; and how a state is stored with its ledger,
  by `_runs/checkpoint.py`, and resumed. A resumed run equals an uninterrupted one to the bit, because the state holds
  the keys of the noise and of dropout, and the seed of the batches.
- `sampling.py`: `Batch`, the iterator of Poisson-sampled batches, padded to a few sizes, and the check that a batch was
  sampled in the way the accounting assumes.
- `step.py`: `PrivateStep`, one step as a function to compile: through the next two files, then the optimizer.
- `model_loss.py`: the loss of one example, with random state of its own; refuses a model that keeps other state.
- `noise.py` adds Gaussian noise to the clipped sums. jax-privacy draws it, from keys of `jax.random`; on a CPU this
  file computes the same random bits faster than JAX does.
"""
