"""The ``vf`` program: each command reads its arguments and makes one call into the library."""
