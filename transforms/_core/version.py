"""The version of the library; a test checks that `pyproject.toml` has the same."""

# Not read from the metadata of the installed package: that takes longer than importing this file.
__version__ = "0.1.0"
