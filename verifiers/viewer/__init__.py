"""Pages over run directories, read-only: served on this machine, or written into one file."""

from verifiers.viewer.export import export_html
from verifiers.viewer.inline import InlineView, show
from verifiers.viewer.library import Library
from verifiers.viewer.server import ViewerServer

__all__ = ["InlineView", "Library", "ViewerServer", "export_html", "show"]
