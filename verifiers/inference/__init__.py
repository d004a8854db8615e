"""Classic import path: the vLLM server of 0.1.5."""
