"""Set paper.md as build/paper.pdf, to look at; the journal sets it with a layout of its own."""

from pathlib import Path

import pypandoc
import typst

PAPER = Path(__file__).parent
BUILD = PAPER.parent / "build"

BUILD.mkdir(exist_ok=True)
pypandoc.convert_file(
    PAPER / "paper.md",
    "typst",
    outputfile=BUILD / "paper.typ",
    extra_args=["--standalone", "--citeproc", f"--bibliography={PAPER / 'paper.bib'}", "--variable=papersize:a4"],
)
typst.compile(BUILD / "paper.typ", output=BUILD / "paper.pdf")
print(BUILD / "paper.pdf")
