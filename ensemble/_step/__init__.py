"""One training step of one member, and the state that it changes.

`MemberStep` is a pure function of one member: its arrays and a batch flow in, its new arrays and its metrics come out.
Nothing here knows how many members there are, except where their state is made; `_execution` runs the step for all.

- `loss.py`: `MemberLoss`, the user's loss with the hyperparameters that it takes as keyword-only arguments.
- `optimizer.py`: `MemberOptimizer`, the optax optimiser, whose hyperparameters and schedules may differ between
  members, and the checks of `hyperparams`.
- `member_step.py`: `MemberStep`: merges the model, takes the loss and its gradients, checks what the loss and `grad_fn`
  return, averages over the mesh axis `data`, and updates the parameters; a member whose step failed is left unchanged.
- `member_status.py`: `MemberStatus`, which members train, which have stopped and why; what counts as finite.
- `state.py`: `TrainState`, the ensemble, the optimiser's state, the step and the status, as one pytree.
"""
