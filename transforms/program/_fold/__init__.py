"""Batch norms folded into the weights of the product before or after them: the mechanism of `fold_bn`.

A function and its parameters go in; a function of new parameters and a report come out.

`fold_bn.py` traces the function into a flat program (`_ir/flat_program.py`) whose values know whether they depend on
parameters alone, plans once with the parameters' values, and again for each shape of arguments with the same answers.
`weighted_ops.py` finds convolutions and dense products whose weights depend on parameters alone. Here a batch norm
enters a convolution: a factor of its input or output becomes a factor of its weights, and a shift becomes a bias.
`affine_chains.py` finds chains y = s·x + t of elementwise operations and rearrangements, and computes s and t.
`plan.py` decides which chains go into which weights (`FoldPlan`), or why not; it computes the new parameters, and runs
the program without the chains.
`report.py` lists what was folded, what was kept and why, by the names of parameters and lines of source. A norm by
statistics of the batch is computed as before.
"""
