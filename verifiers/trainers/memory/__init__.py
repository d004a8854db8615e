"""The memory of a training and what makes it fit: a plan, optimizers with smaller state, weights in 4 bits."""
