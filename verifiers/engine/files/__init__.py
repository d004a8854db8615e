"""Models on disk: safetensors, GGUF, the embedded model."""
