"""Classic import path: the trainer of 0.1.9."""
