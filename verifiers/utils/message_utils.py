"""Classic import path: joining, cleaning and showing messages."""

from verifiers.messages import concat_messages, messages_to_printable, sanitize_tool_calls, strip_nones_from_content

__all__ = ["concat_messages", "messages_to_printable", "sanitize_tool_calls", "strip_nones_from_content"]
