"""The memory of a training, and how to reduce it: a plan, optimizers with smaller state, weights in 4 bits."""
