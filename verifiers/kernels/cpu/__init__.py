"""C for the CPU: compiled where it runs, called through one binding."""
