"""Execute one step for all members: choose a strategy, compile it, and run it.

Input: a state, a batch and its `in_axes`. Output: the new state, the metrics of all members, and the `Execution`
(strategy, chunk size, products, devices) that computed them. In the order of a step:

- `stepper.py`: `Stepper.advance` takes a step; `Trainer` and its loop use only this class. It decides by the strategy
  that the user set, by the execution of an earlier run, by the memory budget (the largest chunk that fits), or, for
  "auto", follows a `Search`. On a mesh or in a trace a "loop" is not possible: `Stepper._possible` replaces it with
  "unroll", or with "map" if there are many members.
- `last_step.py`: `LastStep` lets `Trainer.step` take another step like the last one with the program of that one,
  without choosing and checking again, which takes longer than the step of a small ensemble.
- `search.py`: `Search` starts with the execution that `by_rule` of `_members/strategy.py` returns, and decides when to
  compile and try another one on the steps of the run, and which to use from then on.
- `autotune.py`: `Tuning`, what a search has found, which `Trainer.explain` prints; cached in the process and in
  `tune_cache`.
- `data_parallel.py` only checks. If the mesh axis `data` splits the batch, it raises unless the loss is a mean over the
  examples and leaves the same state on every device. The batch itself is split in `_members/sharding.py`.
- `executor.py`: `Executor` compiles and runs the step, as one program for all members or as a Python loop over the
  program of one, and donates the memory of the state. `StepInputs` holds the inputs of a step, with the `kind` under
  which programs and searches are kept.
- `forms.py`: the forms in which `fit` holds a state between steps: one tree for each member, or padded on a mesh.

The strategies themselves, which turn a function of one member into a function of all, are in `_members/strategy.py`;
devices and padding in `_members/sharding.py`; the step of one member in `_step/member_step.py`.
"""
