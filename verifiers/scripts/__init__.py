"""Classic import path: the programs of 0.1.x."""
