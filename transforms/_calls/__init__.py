"""A user's call as a function of arrays: what is differentiated, mapped in chunks, or divided over a mesh."""
