"""Models on disk: safetensors, GGUF, SmolLM2."""
