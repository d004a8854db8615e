"""The other side: the zygote and the confined processes. Imports the standard library and itself, nothing else."""
