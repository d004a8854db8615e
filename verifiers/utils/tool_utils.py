"""Classic import path: a function's schema as OpenAI writes it."""

from verifiers.tools.calling import is_content_parts as is_valid_tool_content_parts
from verifiers.tools.tool import convert_func_to_oai_tool

__all__ = ["convert_func_to_oai_tool", "is_valid_tool_content_parts"]
