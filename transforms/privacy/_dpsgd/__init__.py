"""DP-SGD: sampling, clipped sums, noise, accounting, and the training loop.

The inputs are a loss, an optimizer and settings, then a model, a key and data; the outputs are a trained model and the
ε spent. `_per_example` computes the clipped sums.

- `dpsgd.py`: `DPSGD`, the public class: `init`, `step`, `fit`, `audit`; and `mechanism.py`: its base, what does not
  depend on the model: `from_plan`, `batches`, `epsilon`, `event`, `save`, `load`.
- `fit.py`: the run of `DPSGD.fit` to its last step, with progress bar, history and checkpoints. A resumed run equals an
  uninterrupted one bit for bit, because the state holds the noise key, the dropout key and the sampling seed.
- `settings.py` checks the settings.
- `accounting.py`: `Ledger` describes a step to a privacy accountant. It computes ε from a number of steps, the number
  of steps from a budget, and the noise multiplier from a target ε. `monte_carlo.py` computes the ε of samplings that
  dp-accounting does not know.
- `state.py`: `DPState`, everything that training changes; parameter checks; writing a state with its ledger by
  `CheckpointWriter` of `_runs`, and reading it.
- `sampling.py`: `Batch`; the iterator over sampled batches, padded to a few sizes; and the check that a batch was
  sampled as the accounting assumes.
- `step.py`: `PrivateStep`, one step as a function to compile. It uses the next two files, then the optimizer.
- `model_loss.py`: the loss of one example, with independent randomness; raises if a model keeps other mutable state.
  It also separates what a step changes from what is frozen and never copied.
- `adaptive.py`: `AdaptiveClipping`, by which clip norms follow a private quantile.
- `audit.py`: `Audit`, a lower bound on ε from runs of the step with canaries.
- `noise.py` adds Gaussian noise to the clipped sums. jax-privacy draws it, from keys of `jax.random`; on a CPU this
  file computes the same random bits faster than JAX does.
"""
