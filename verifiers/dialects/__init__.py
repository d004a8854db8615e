"""Wire formats: requests and replies of OpenAI's two APIs and of Anthropic's ↔ our messages, whole or as streams."""
