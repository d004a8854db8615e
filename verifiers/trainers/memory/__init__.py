"""What a training takes of memory, what makes it fit: a plan, optimizers with smaller states, weights in 4 bits."""
