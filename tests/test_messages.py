"""Messages that the page on troubleshooting explains are in the source, word for word."""

from __future__ import annotations

import ast
import re

import pytest

from tests.pages import ROOT

VARIES = "\0"
ROWS = [
    re.match(r"\| `(.+?)` \| (.+) \| (.+) \|$", line)
    for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines()
    if line.startswith("| `")
]


def templates() -> list[str]:
    """Every text of the package that is no docstring, with a mark where something is put in."""
    found = []
    for file in sorted((ROOT / "lightning_dataflex").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else VARIES for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found.append(node.value)
    return found


TEMPLATES = templates()


def says(template: str, message: str) -> bool:
    """Whether the parts of a message between its `…` are in a text, in order, each in one piece."""
    at = 0
    for piece in filter(None, (piece.strip() for piece in message.split("…"))):
        at = template.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1][:60])
def test_each_message_is_one_that_the_package_raises_or_warns(row: re.Match[str]) -> None:
    message, why, cure = row.groups()
    assert any(says(template, message) for template in TEMPLATES)
    assert why.strip()
    assert cure.strip()


def test_a_message_of_no_source_is_noticed() -> None:
    assert not any(says(template, "… is nothing that is ever raised …") for template in TEMPLATES)
    assert len(ROWS) > 50
