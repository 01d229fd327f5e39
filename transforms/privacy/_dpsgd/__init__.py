"""DP-SGD: sampling, clipped sums, noise, accounting, and the run that joins them.

A loss, an optimizer and settings flow in, then a model, a key and data; a trained model and the ε that it spent come
out. The clipped sums themselves are those of `_per_example`.

- `dpsgd.py`: `DPSGD`, the public class: `init`, `batches`, `step`, `fit` (the loop: the budget, the bar with ε, the
  history, checkpoints to go on from), `save`, `load`, `epsilon`, `event`.
- `settings.py`: what the settings must be; the noise that a target ε asks for.
- `accounting.py`: `Ledger`, what each step is to an accountant; ε from a number of steps, steps from a budget, and the
  noise multiplier from a target ε.
- `state.py`: `DPState`, what training changes, what parameters must be, and how a state is stored with its ledger, by
  `_runs/checkpoint.py`.
- `sampling.py`: `Batch` and the iterator of Poisson-sampled batches, padded to a few sizes; whether a batch was sampled
  as is counted.
- `step.py`: `PrivateStep`, one step as a function to compile: through the next two files, then the optimizer.
- `model_loss.py`: the loss of one example, with random state of its own; refuses a model that keeps other state.
- `noise.py`: draws the Gaussian noise that is added to the clipped sums: jax-privacy's, from keys of `jax.random`. On a
  CPU the same random bits are computed faster than JAX does.
"""
