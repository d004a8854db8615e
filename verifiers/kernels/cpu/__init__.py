"""C kernels for the CPU: compiled on the machine where they run, called through one binding."""
