"""Arrays in, arrays out: decoders of the common kind, recognised once and run by a backend that was proven.

`reference` is plain PyTorch, `cpu` is C, `cuda` is Triton. Nothing here knows of requests, rewards or optimizers.
"""
