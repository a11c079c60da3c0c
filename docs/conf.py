"""Configuration of the site: `pip install -c constraints.txt -e '.[docs]'`, then `sphinx-build -W docs build/docs`.

No page loads anything from another host: the theme and the search are files of the site, formulas are MathML.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
from gallery import FOLDER, Gallery, write_pages
from results import Results

REPOSITORY = "https://github.com/softdb/softdb"

project = "softdb"
copyright = "The softdb developers; MIT licence"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3  # the anchors that GitHub gives headings
suppress_warnings = ["myst.xref_missing"]  # tests/house/test_readme.py checks every link
exclude_patterns = ["images"]
html_theme = "furo"
html_title = "softdb"
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#8a5200", "color-brand-content": "#8a5200"},  # the explorer's
    "dark_css_variables": {"color-brand-primary": "#ffc163", "color-brand-content": "#ffc163"},
}
html_math_renderer = "mathml"
html_logo = html_favicon = "../softdb/tools/explore/page/icon.svg"  # of the explorer
html_static_path = ["site/style.css", "site/slider.js"]
html_css_files = ["style.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 72  # a longer one has a line for each parameter
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = napoleon_use_param = False  # arguments that share a line keep it

default_role = "code"

EXAMPLES: dict[str, str] = yaml.safe_load((Path(__file__).parent / "api" / "examples.yaml").read_text())
SECTIONS = ("Args:", "Raises:", "Returns:", "Yields:", "Example:", "Attributes:")
WIDE = 84  # letters of an indented line that a page of the reference shows
FIELD = re.compile(r"^    (\w+): (.+?)(?:  # (.+))?$")


def fields(app: Sphinx, what: str, name: str, subject: Any, options: Any, lines: list[str]) -> None:
    """Append the fields of a dataclass or named tuple, with the comments beside them, to the lines of its docstring."""
    if what != "class" or not ("__dataclass_fields__" in vars(subject) or hasattr(subject, "_fields")):
        return
    matches = [FIELD.match(line) for line in inspect.getsource(subject).splitlines()]
    known = [match for match in matches if match and match[1] in subject.__annotations__]
    lines += ["", *(f"* ``{match[1]}``: {match[3] or match[2]}" for match in known), ""]


def examples(app: Sphinx, what: str, name: str, subject: Any, options: Any, lines: list[str]) -> None:
    """Append the example of a name whose docstring has none."""
    lines += ["", *EXAMPLES.get(name, "").splitlines(), ""]


def equations(app: Sphinx, what: str, name: str, subject: Any, options: Any, lines: list[str]) -> None:
    """Make the indented equations and examples of a docstring literal blocks, which would else be quotations."""
    result: list[str] = []
    for line in lines:
        before = [text for text in result if text.strip()][-1:]
        opens = line.startswith("    ") and result and not result[-1].strip() and before and before[0] not in SECTIONS
        if opens and not before[0].startswith("    "):
            result += [".. code-block:: none", ""]
        if line.startswith("    ") and len(line) > WIDE and ",  " in line:  # several equations, each on a line then
            line = line.replace(",  ", ",\n    ")
        # |x| is no substitution, recall@10 no address
        result.append(line if line.startswith(("    ", ">>>")) else line.replace("|", "\\|").replace("@", "\\@"))
    lines[:] = "\n".join(result).split("\n")


def is_bare_field(app: Sphinx, what: str, name: str, subject: Any, skip: bool, options: Any) -> bool | None:
    """Skip the members of a named tuple that say no more than their number; `fields` lists them with their comments."""
    return True if (getattr(subject, "__doc__", "") or "").startswith("Alias for field number") else None


def inline(self: Any, node: nodes.math) -> None:
    """Write a formula as MathML."""
    self.body.append(f'<span class="formula-inline">{convert(node.astext())}</span>')
    raise nodes.SkipNode


def block(self: Any, node: nodes.math_block) -> None:
    """Write a formula on a line of its own as MathML."""
    formula = convert(node.astext(), display="block").replace("<math ", '<math displaystyle="true" ', 1)
    self.body.append(f'<div class="formula">{formula}</div>')
    raise nodes.SkipNode


def landing(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the figure that moves and the cards of examples into the first page; GitHub shows a picture and a link."""
    if page != "index":
        return
    figure = (Path(app.srcdir) / "site" / "slider.html").read_text()
    text = re.sub(
        r"^!\[.*\]\(images/temperature\.svg\)$", lambda _: f"```{{raw}} html\n{figure}```", source[0], flags=re.M
    )
    source[0] = re.sub(r"^<!-- gallery: (.+) -->$", r"```{gallery}\n\1\n```", text, flags=re.MULTILINE)


def script(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    """Load the figure's script on the first page alone."""
    if page == "index":
        app.add_js_file("slider.js", loading_method="defer")


def elsewhere(app: Sphinx, page: str, source: list[str]) -> None:
    """Change links to files outside the site into links to the repository, except pictures, which the site shows."""
    docs, folder = Path(app.srcdir), (Path(app.srcdir) / page).parent

    def repository(link: re.Match[str]) -> str:
        text, file = link[1], (folder / link[2]).resolve()
        if file.parent == docs.parent / "examples" and file.suffix == ".py" and not link[3]:
            return f"{text}](/{FOLDER}/{file.stem}.md)"
        if text.startswith("!") or file.is_relative_to(docs):
            return link[0]
        return f"{text}]({REPOSITORY}/blob/main/{file.relative_to(docs.parent).as_posix()}{link[3] or ''})"

    source[0] = re.sub(r"(!?\[[^\]]*)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)", repository, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the functions above with Sphinx."""
    app.connect("autodoc-process-docstring", equations, priority=400)  # before napoleon's
    app.connect("autodoc-process-docstring", fields)
    app.connect("autodoc-process-docstring", examples)
    app.connect("autodoc-skip-member", is_bare_field)
    app.connect("config-inited", write_pages)
    app.connect("source-read", landing)
    app.connect("source-read", elsewhere)
    app.connect("html-page-context", script)
    app.add_directive("gallery", Gallery)
    app.add_directive("results", Results)
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True}
