"""Arrays in, arrays out: decoders of the common architecture, recognised once and run by a tested backend.

`reference` is plain PyTorch, `cpu` is C, `cuda` is Triton. This package is independent of requests, rewards and
optimizers.
"""
