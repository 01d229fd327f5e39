"""Batch norms folded into the weights of the product before or after them: the mechanism of `fold_bn`.

The input is a function and its parameters; the output is a function of new parameters, and a report.

`fold_bn.py` traces the function into a flat program (`_ir/flat_program.py`), which marks values that depend on
parameters alone. It plans once with the values of the parameters, and again for each shape of arguments, reusing the
recorded decisions that depend on values.
`weighted_ops.py` finds convolutions and dense products whose weights depend on parameters alone, and converts a factor
of the input or output to a factor of the weights, and a shift to a bias.
`affine_chains.py` finds chains y = s·x + t of elementwise operations and rearrangements, and computes s and t.
`plan.py` decides which chains are folded into which weights (`FoldPlan`), and why others are not. It computes the new
parameters, and runs the program without the chains.
`report.py` lists the chains that were folded, and those that were kept and why, by parameter names and source lines.
A norm that uses batch statistics is computed as before.
"""
