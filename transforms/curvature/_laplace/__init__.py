"""`laplace`: a normal distribution around trained parameters.

`laplace.py` has the distribution, its predictions, samples and evidence. `spectrum.py` has curvatures over all
parameters together, and `files.py` the format of its file.
"""
