"""What all figures share: the style, and how a figure becomes SVG text for one HTML page.

Lines and text take the page's own colour (`currentColor`), so a figure reads in a light and in a dark page.
"""

from __future__ import annotations

import io
import re
from html import escape

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#010203"
"""Stands for the page's text colour until the SVG is written."""

STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "savefig.transparent": True,
}


def panel(width: float, height: float) -> tuple[Figure, Axes]:
    """One set of axes; sizes in inches, of which the page keeps the ratio only."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def svg(figure: Figure, title: str) -> str:
    """SVG element without a fixed size; ids are unique by title, and one figure gives one text always."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", text, count=1)
    text = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", text, count=1)
    slug = re.sub(r"\W+", "-", title)
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{slug}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
