"""The server: OpenAI-compatible HTTP endpoints over a local model."""
