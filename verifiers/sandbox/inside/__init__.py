"""The code of the zygote and of the confined processes; it imports only the standard library and itself."""
