"""What the pages show: blocks by their language, and code within sentences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "rlhf" / "README.md"]
INCLUDED = "--8<--"
"""A block that is a file of the repository; the build of the site puts it in place."""


class Block(NamedTuple):
    """A fenced block and where it is, `page.md:12`."""

    place: str
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page in these languages, without those that are whole files."""
    text = page.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [
        Block(f"{page.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}", match[2])
        for match in found
        if match[1] in languages and INCLUDED not in match[2]
    ]


def every(*languages: str) -> list[Block]:
    """The blocks of all pages in these languages."""
    return [block for page in PAGES for block in blocks(page, *languages)]


def inline(page: Path) -> list[str]:
    """Code within the sentences and tables of a page."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    return [" ".join(code.split()).replace(r"\|", "|") for code in re.findall(r"(?<!`)`([^`]+)`", prose)]
