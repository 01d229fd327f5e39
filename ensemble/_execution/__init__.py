"""Executes one step for all members: by which strategy, and who chooses it.

What flows in is a state, a batch and its `in_axes`; what comes out is the new state, the metrics of all members, and
the `Execution` (strategy, chunk size, products, devices) that computed them. In the order of a step:

- `stepper.py`: `Stepper.advance`, all that `Trainer` and its loop know of this folder. `choose` decides by what the
  user asked for, by what an earlier step or a checkpoint used, by the memory budget (the largest chunk that fits),
  or, for "auto", by measuring. The table that `autotune.py` makes shows why "auto" chose what it chose. If nothing can
  be measured, `in_turn` of `_members/strategy.py` chooses "loop" or "vmap". On a mesh or in a trace a "loop" is not
  possible: `Stepper._possible` replaces it by "unroll", or by "map" if there are many members.
- `data_parallel.py` only checks. If the mesh axis `data` splits the batch, it raises unless the loss is a mean over the
  examples and leaves the same state on every device. The batch itself is split in `_members/sharding.py`.
- `autotune.py`: `tune`, the search over candidates: which are tried, how they are timed, which is taken; the table
  (`Tuning`) that `Trainer.explain` prints; and what is remembered, in the process and in `tune_cache`.
- `executor.py`: `Executor`, which compiles and runs the step: as one program for all members, or as a Python loop over
  the program of one; donates the memory of the state; and measures a step for `autotune`. `StepInputs` is what a step
  takes, with the `kind` under which programs and choices are cached.
- `forms.py`: the forms in which `fit` holds a state between steps: one tree for each member, or padded on a mesh.

The strategies themselves, functions of all members from a function of one, are in `_members/strategy.py`; devices and
padding in `_members/sharding.py`; the step of one member in `_step/member_step.py`.
"""
