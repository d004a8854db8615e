"""Wire formats: requests and replies of OpenAI's two APIs and Anthropic's ↔ our messages, whole or as streams."""
