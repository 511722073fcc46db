"""Draw the figures of the concepts page: python docs/drawings.py writes docs/drawings/*.svg (make drawings)."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

INK, MUTED, BLUE, GREEN, SAND, RED, PAPER = "#222", "#666", "#d6e6f5", "#d9efdc", "#f6ecd6", "#f8d7da", "#fff"
HERE = Path(__file__).parent / "drawings"


class Drawing:
    """An SVG image. Positions are pixels from the top left."""

    def __init__(self, width: int, height: int, title: str):
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
            ' font-family="Helvetica, Arial, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" markerWidth="9" markerHeight="9" refX="7" refY="4" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{MUTED}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, *lines: str, fill: str = PAPER, size: int = 13
    ) -> None:
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{MUTED}"/>'
        )
        for number, line in enumerate(lines):
            below = y + height / 2 + 4.5 + (number - (len(lines) - 1) / 2) * (size + 4)
            self.text(x + width / 2, below, line, size=size, is_bold=number == 0 and len(lines) > 1, anchor="middle")

    def area(self, x: float, y: float, width: float, height: float, label: str, fill: str) -> None:
        """Draw a filled area with a label in its top left corner."""
        self._parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}"/>')
        self.text(x + 10, y + 19, label, is_bold=True)

    def text(
        self, x: float, y: float, text: str, *, size: int = 13, is_bold: bool = False, anchor: str = "start",
        colour: str = INK,
    ) -> None:  # fmt: skip
        weight = ' font-weight="bold"' if is_bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight} text-anchor="{anchor}" fill="{colour}">'
            f"{escape(text)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self._parts.append(
            f'<path d="M{x1} {y1} L{x2} {y2}" stroke="{MUTED}" stroke-width="1.5" marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def trace() -> Drawing:
    """Return what is in the directory of a trace."""
    drawing = Drawing(760, 330, "A trace is a directory with the files of its writers")
    drawing.area(10, 10, 740, 310, "trace: a directory", BLUE)
    for number, (writer, batches) in enumerate((("writer A", 2), ("writer B", 1))):
        top = 40 + 100 * number
        drawing.area(24, top, 712, 90, f"{writer}: one recorder in one process", GREEN)
        drawing.box(38, top + 32, 130, 46, "manifest", "journal", fill=PAPER, size=12)
        for batch in range(batches):
            drawing.box(184 + 150 * batch, top + 32, 138, 46, f"batch {batch}", "sealed file", fill=SAND, size=12)
        left = 184 + 150 * batches
        drawing.box(left, top + 32, 138, 46, f"batch {batches}", "still growing", fill=PAPER, size=12)
        drawing.box(left + 150, top + 32, 88, 46, "ring", "newest", fill=RED, size=12)
    drawing.area(24, 240, 712, 70, "inside a batch", SAND)
    for number in range(4):
        drawing.box(184 + 138 * number, 254, 128, 44, f"chunk {number}", "columns, checksum", fill=PAPER, size=12)
    return drawing


def ring() -> Drawing:
    """Return the path of a step, and what survives at each place."""
    drawing = Drawing(760, 250, "A step goes from the ring to a chunk to a sealed batch")
    stages = (
        ("env.step()", "the step happens", BLUE, ("a kill here:", "the action is known")),
        ("ring", "memory-mapped file", RED, ("survives a kill,", "not a reboot")),
        ("chunk", "compressed, checked", GREEN, ("survives a reboot", "after an fsync")),
        ("sealed batch", "index and parity", SAND, ("survives a damaged", "stretch of its bytes")),
    )
    whens = ("at once", "chunk full, or 10 s", "64 MiB, or 10 min")
    for number, (name, about, fill, survives) in enumerate(stages):
        x = 16 + 188 * number
        drawing.box(x, 50, 148, 64, name, about, fill=fill)
        if number:
            drawing.arrow(x - 40, 82, x - 3, 82)
            drawing.text(x - 20, 34, whens[number - 1], size=12, anchor="middle", colour=MUTED)
        for line, text in enumerate(survives):
            drawing.text(x + 74, 150 + 17 * line, text, size=12, anchor="middle")
    drawing.text(16, 222, "Readers see a step as soon as it is in the ring, also from another process.", colour=MUTED)
    return drawing


def lanes() -> Drawing:
    """Return episodes in the lanes of a vector environment."""
    drawing = Drawing(760, 220, "Each lane of a vector environment has its own episodes")
    lengths = ((9, 6, 10), (5, 14, 6), (12, 4, 9))
    for lane, episodes in enumerate(lengths):
        y, x = 36 + 50 * lane, 90.0
        drawing.text(20, y + 22, f"lane {lane}", is_bold=True)
        for number, steps in enumerate(episodes):
            is_last = number == len(episodes) - 1
            fill = PAPER if is_last else (BLUE, GREEN)[number % 2]
            label = "running" if is_last else f"episode, {steps} steps"
            width = 25 * steps if not is_last else 725 - x
            drawing.box(x, y, width - 5, 34, label if width > 110 else f"{steps}", fill=fill, size=12)
            x += 25 * steps
    drawing.arrow(90, 196, 725, 196)
    drawing.text(90, 212, "steps of the vector environment", size=12, colour=MUTED)
    return drawing


def outcomes() -> Drawing:
    """Return how an episode can end."""
    drawing = Drawing(760, 250, "How an episode ends")
    rows = (
        ("terminated", "the environment reached a terminal state", GREEN),
        ("truncated", "a limit of the environment ended it, such as 500 steps", GREEN),
        ("cut", "reset() was called before the end", SAND),
        ("closed", "close() was called before the end", SAND),
        ("lost", "the process died; every answered step is there", RED),
        ("running", "it is being recorded right now", BLUE),
    )
    for number, (name, about, fill) in enumerate(rows):
        y = 14 + 38 * number
        drawing.box(16, y, 110, 30, name, fill=fill)
        drawing.text(142, y + 20, about)
    drawing.text(600, 34, "complete: counted in", size=12, colour=MUTED)
    drawing.text(600, 50, "mean returns", size=12, colour=MUTED)
    return drawing


DRAWINGS = {"trace": trace, "ring": ring, "lanes": lanes, "outcomes": outcomes}

if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (HERE / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
