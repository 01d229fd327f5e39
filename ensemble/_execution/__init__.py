"""Execute one step for all members: choose a strategy, compile it, and run it.

Input: a state, a batch and its `in_axes`. Output: the new state, the metrics of all members, and the `Execution`
(strategy, chunk size, products, devices) that computed them. In the order of a step:

- `stepper.py`: `Stepper.advance` takes a step; `Trainer` and its loop use only this class. `choose` decides by the
  strategy that the user set, by the execution of an earlier step or a checkpoint, by the memory budget (the largest
  chunk that fits), or, for "auto", by measuring. If nothing can be measured, `in_turn` of `_members/strategy.py`
  chooses "loop" or "vmap". On a mesh or in a trace a "loop" is not possible: `Stepper._possible` replaces it with
  "unroll", or with "map" if there are many members.
- `data_parallel.py` only checks. If the mesh axis `data` splits the batch, it raises unless the loss is a mean over the
  examples and leaves the same state on every device. The batch itself is split in `_members/sharding.py`.
- `autotune.py`: `tune` searches over candidates: which are tried, how they are timed, and which is chosen. It returns
  the table (`Tuning`) that `Trainer.explain` prints. Results are cached in the process and in `tune_cache`.
- `executor.py`: `Executor` compiles and runs the step, as one program for all members or as a Python loop over the
  program of one; donates the memory of the state; and times a step for `autotune`. `StepInputs` holds the inputs of a
  step, with the `kind` under which programs and choices are cached.
- `forms.py`: the forms in which `fit` holds a state between steps: one tree for each member, or padded on a mesh.

The strategies themselves, which turn a function of one member into a function of all, are in `_members/strategy.py`;
devices and padding in `_members/sharding.py`; the step of one member in `_step/member_step.py`.
"""
