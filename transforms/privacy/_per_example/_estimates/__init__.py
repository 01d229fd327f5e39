"""Estimates of the time and the memory of the methods, from the shapes of a traced loss.

The input is an `ExampleProgram` (`../loss.py`) with its parameter uses; the output is numbers that `../methods.py` and
`../budget.py` compare. Nothing is compiled or timed.

`cpu_cost.py` estimates the time of each method and group size on a CPU, in bytes of memory traffic.
`temporaries.py` estimates the temporary memory of an ordinary gradient, and what a method keeps beyond it.
"""
