"""Figures → notebook output: a progress bar, a report, a learning curve; all text in the HTML is escaped."""

from verifiers.notebooks.cells import Picture, is_notebook, show_in_cell
from verifiers.notebooks.html import bar_html, figures_html, image_html, page_html, samples_html, text_html

__all__ = [
    "Picture",
    "bar_html",
    "figures_html",
    "image_html",
    "is_notebook",
    "page_html",
    "samples_html",
    "show_in_cell",
    "text_html",
]
