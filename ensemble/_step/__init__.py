"""One training step of one member, and the state that it changes.

`MemberStep` is a pure function of one member: it takes the member's arrays and a batch, and returns its new arrays and
metrics. Only the initialization of the state depends on the number of members; `_execution` runs the step for all.

- `loss.py`: `MemberLoss`, the user's loss with the hyperparameters that it takes as keyword-only arguments.
- `optimizer.py`: `MemberOptimizer`, the optax optimizer, whose hyperparameters and schedules may differ between
  members, and the checks of `hyperparams`.
- `member_step.py`: `MemberStep`: merges the model, computes the loss and its gradients, checks the results of the loss
  and of `grad_fn`, averages over the mesh axis `data`, and updates the parameters. A member whose step fails stays
  unchanged.
- `update_where.py`: `update_where`, the update under the condition that the member takes the step, which XLA can
  compute in place.
- `member_status.py`: `MemberStatus`: the members that train, those that have stopped, and the reasons; the checks for
  finite values.
- `state.py`: `TrainState`: the ensemble, the optimizer state, the step and the status, as one pytree.
- `packed.py`: `Packed`: the arrays of a state as a flat list, as programs on one device take and return them. The state
  that a step returns is made from it when one of its attributes is read.
"""
