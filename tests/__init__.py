"""The tests; a package, since other libraries install a folder `tests` too."""
