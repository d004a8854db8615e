"""Several processes train one model, servers elsewhere sample from it; and what a run on many cards would do."""
