"""SVG as text: escaped names, the width of a text, colours that follow dark mode, and values that appear on hover."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

FONT_SIZE = 12
# Widths of characters in DejaVu Sans and Verdana, the widest of the usual fonts, in units of the font's size.
_WIDTHS = {
    **dict.fromkeys("ijl|'.,:;! ·", 0.34),
    **dict.fromkeys('ftrI()[]{}/\\-"', 0.46),
    **dict.fromkeys("mwMW%@—", 1.0),
    **dict.fromkeys("+=<>−×~±ACDGHNOQRTUVXY&", 0.84),
}
_OTHER, _FOREIGN = 0.65, 1.05

# Okabe and Ito's colours, which are distinguishable with any kind of colour vision, and lighter ones for dark pages.
COLOURS = {
    "ink": ("#1b1b1b", "#e6e6e6"),
    "paper": ("#ffffff", "#16181b"),
    "soft": ("#5a5a5a", "#a8a8a8"),
    "rule": ("#dcdcdc", "#383b40"),
    "card": ("#f4f5f7", "#202328"),
    "blue": ("#0072b2", "#4aa9e4"),
    "orange": ("#d55e00", "#f08c4b"),
    "green": ("#008a64", "#35c79b"),
    "pink": ("#b8568d", "#e49bc6"),
    "sky": ("#3a9bd4", "#8fd0f5"),
    "yellow": ("#b87f00", "#f0b93a"),
    "grey": ("#6b6b6b", "#9a9a9a"),
    "pale": ("#c4c8ce", "#565b63"),
    "middle": ("#8b9098", "#7f858e"),
    # Of the first phase and the last; those between are mixed.
    "first": ("#a9c4dc", "#3a5c78"),
    "last": ("#0b4a7d", "#a6d8ff"),
}


def _variables(which: int) -> str:
    return " ".join(f"--{name}: {pair[which]};" for name, pair in COLOURS.items())


# Colours are variables: a page or a file that holds a figure needs only this.
STYLE = f"""
:root {{ color-scheme: light dark; {_variables(0)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}
svg.plot {{ font: {FONT_SIZE}px system-ui, sans-serif; font-variant-numeric: tabular-nums; overflow: visible; }}
.plot text {{ fill: var(--ink); }} .plot .soft {{ fill: var(--soft); }} .plot .bold {{ font-weight: 600; }}
.plot .grid {{ stroke: var(--rule); stroke-width: 1; fill: none; }}
.plot .guide {{ stroke: var(--grey); stroke-width: 1; stroke-dasharray: 4 3; fill: none; }}
.plot .line {{ fill: none; stroke-width: 1.8; stroke-linejoin: round; }}
.plot .band {{ opacity: .16; }} .plot .marker {{ stroke-width: 1.6; }}
.plot .hit {{ fill: transparent; stroke: none; pointer-events: all; }}
.plot .tip {{ visibility: hidden; pointer-events: none; }}
.plot .spot:hover .tip, .plot .spot:focus .tip {{ visibility: visible; }}
.plot .spot:focus {{ outline: none; }}
.plot .spot:hover .hit, .plot .spot:focus .hit {{ stroke: var(--ink); stroke-width: 1; }}
.plot .tip rect {{ fill: var(--paper); stroke: var(--grey); }}
"""


def colour(name: str) -> str:
    """Return a colour of `COLOURS` as CSS; anything else, such as a mixed colour, is CSS already."""
    return f"var(--{name})" if name in COLOURS else name


def shades(count: int) -> list[str]:
    """Return colours from pale to strong for a sequence, such as phases; on dark pages, from dim to bright."""
    shares = [100 if count == 1 else round(100 * place / (count - 1)) for place in range(count)]
    return [f"color-mix(in oklab, var(--last) {share}%, var(--first))" for share in shares]


def clean(text: str) -> str:
    """Return text without characters that XML cannot hold: controls and lone surrogates."""
    return "".join(
        character if character.isprintable() or character == " " else "?"
        for character in text.encode("utf-8", "replace").decode()
    )


def shortened(text: str, longest: int = 30) -> str:
    """Return text with at most so many characters; the middle of a longer one is left out."""
    text = clean(text)
    if len(text) <= longest:
        return text
    tail = (longest - 1) // 2
    return f"{text[: longest - 1 - tail]}…{text[-tail:]}"


def fitting(text: str, width: float, bold: bool = False) -> str:
    """Return text that is at most so many pixels wide; the middle of a longer one is left out."""
    text = clean(text)
    longest = len(text)
    while longest > 3 and text_width(shortened(text, longest), bold) > width:
        longest -= 1
    return shortened(text, longest)


def text_width(text: str, bold: bool = False) -> float:
    """Return an upper estimate of the width of a text, in pixels."""
    widths = (_WIDTHS.get(one, _OTHER if ord(one) < 0x2000 else _FOREIGN) for one in text)
    return FONT_SIZE * sum(widths) * (1.13 if bold else 1.0)


def text(x: float, y: float, content: str, *, anchor: str = "start", kind: str = "", size: float | None = None) -> str:
    """Return a text element; `anchor` is "start", "middle" or "end"."""
    extra = (f' class="{kind}"' if kind else "") + (f' font-size="{size:g}"' if size else "")
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{where}{extra}>{escape(clean(content))}</text>'


def marker(x: float, y: float, shape: str, stroke: str, fill: str, size: float = 4.0) -> str:
    """Return a marker: "circle", "square", "triangle", "diamond" or "down"."""
    style = f'class="marker" style="stroke:{stroke};fill:{fill}"'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:g}" {style}/>'
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "triangle": ((0, -1.2), (1.15, 0.9), (-1.15, 0.9)),
        "down": ((0, 1.2), (1.15, -0.9), (-1.15, -0.9)),
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    }[shape]
    points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" {style}/>'


def spot(area: str, x: float, y: float, lines: Sequence[str], width: float, height: float) -> str:
    """Return a place that shows some lines of text while it is hovered or has the focus.

    Args:
        area: the element that is hovered, with class "hit".
        x, y: where the text is shown: above and right of this place, or wherever it fits into the figure.
        lines: the text.
        width, height: the size of the figure.
    """
    shown = [fitting(line, width - 16, bold=not place) for place, line in enumerate(lines)]
    wide = max(text_width(line, bold=not place) for place, line in enumerate(shown)) + 14
    high = 16 * len(shown) + 8
    left = min(max(x + 8, 1), max(width - wide - 1, 1))
    top = y - high - 8 if y - high - 8 >= 1 else min(y + 12, max(height - high - 1, 1))
    words = "".join(
        text(7, 16 + 16 * place, line, kind="bold" if not place else "") for place, line in enumerate(shown)
    )
    return (
        f'<g class="spot" tabindex="0" role="img" aria-label="{escape(clean(", ".join(lines)))}">{area}'
        f'<g class="tip" transform="translate({left:.1f} {top:.1f})"><rect width="{wide:.1f}" height="{high}" rx="4"/>'
        f"{words}</g></g>"
    )
