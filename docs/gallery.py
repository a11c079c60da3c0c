"""The examples on the site: a page for each, and cards that lead to it, made from examples/README.md at every build."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

__all__ = ["FOLDER", "Gallery", "write_pages"]

DOCS = Path(__file__).parent
FOLDER = "gallery"  # of the pages, in docs/; git ignores it
README = DOCS.parent / "examples" / "README.md"
ROW = re.compile(r"^\| \[(\w+)\.py\]\(\w+\.py\): (.+?) \| (.*?) ?\| (?:!\[(.*?)\]\(\.\./(\S+)\))? ?\|$", re.MULTILINE)


class Example(NamedTuple):
    """A row of the table."""

    name: str
    idea: str
    source: str  # "" where none is named
    alt: str  # text for those who do not see the picture
    picture: str  # path from the repository's root, or ""

    @property
    def title(self) -> str:
        """Return the name as words."""
        return self.name.replace("_", " ").capitalize()


def examples() -> list[Example]:
    """Return the rows of the table in examples/README.md."""
    return [Example(*match) for match in ROW.findall(README.read_text())]


def card(example: Example) -> str:
    """Return the Markdown of a card; its address and picture are seen from docs/."""
    picture = f"![](../{example.picture})" if example.picture else ""
    return f"* [{picture}**{example.title}**]({FOLDER}/{example.name}.md)\n\n  {example.idea}\n"


def page(example: Example) -> str:
    """Return the Markdown of an example's page: the docstring of its program, the picture, and the code."""
    tree = ast.parse((README.parent / f"{example.name}.py").read_text())
    lead, *further = (text for text in (ast.get_docstring(tree) or "").split("\n\n") if not text.startswith("    "))
    source = f" After {example.source}." if example.source else ""
    return "\n\n".join(
        [
            f"# {example.title}",
            f"{lead}{source}",
            *([f"![{example.alt or example.title}](../../{example.picture})"] * bool(example.picture)),
            *further,
            f"```console\npython examples/{example.name}.py --plot picture.png\n```",
            f"```{{literalinclude}} ../../examples/{example.name}.py\n:lines: {tree.body[1].lineno}-\n```",
            "[All examples](../examples.md)\n",
        ]
    )


def write_pages(app: Sphinx, config: object) -> None:
    """Write the pages of the examples, and remove those of examples that are gone."""
    folder = DOCS / FOLDER
    folder.mkdir(exist_ok=True)
    pages = {folder / f"{example.name}.md": page(example) for example in examples()}
    for path in set(folder.glob("*.md")) - set(pages):
        path.unlink()
    for path, text in pages.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


class Gallery(SphinxDirective):
    """The directive `{gallery}`: cards of all examples, or of those named in its content."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the cards; without names also the tree of their pages."""
        self.env.note_dependency(str(README))
        chosen = " ".join(self.content).split()
        known = {example.name: example for example in examples()}
        cards = "\n".join(card(known[name]) for name in chosen or known)
        tree = (
            ""
            if chosen
            else "\n```{toctree}\n:hidden:\n\n" + "\n".join(f"{FOLDER}/{name}" for name in known) + "\n```\n"
        )
        return [nodes.container("", *self.parse_text_to_nodes(cards + tree), classes=["gallery"])]
