"""The server: HTTP endpoints in the words of OpenAI, over a local model."""
