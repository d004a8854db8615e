"""A read-only viewer for run directories: web pages served on this machine, or exported as one file."""

from verifiers.viewer.export import export_html
from verifiers.viewer.inline import InlineView, show
from verifiers.viewer.library import Library
from verifiers.viewer.server import ViewerServer

__all__ = ["InlineView", "Library", "ViewerServer", "export_html", "show"]
