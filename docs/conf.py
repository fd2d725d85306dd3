"""The documentation site, which `make docs` builds from the Markdown files, the docstrings and the commands.

The source folder is the checkout, so that relative links work on GitHub and on the site. The tables of `docs/index.md`
are its navigation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter

import typer
from sphinx.application import Sphinx
from typer.cli import get_docs_for_click

import trainwright as tw
from trainwright.cli.main import app as commands
from trainwright.core.events import Event

project = "trainwright"
version = release = tw.__version__
copyright = "the trainwright authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "benchmarks/RESULTS.md", "tests/reference/planner/README.md"]
exclude_patterns = [".*", "build", "data", "dist", "runs"]
suppress_warnings = ["misc.highlighting_failure"]  # quoted lines of a shell

highlight_language = "text"  # of blocks without a language: output
html_theme = "furo"
html_title = f"trainwright {version}"
html_additional_pages = {"index": "start.html"}  # leads to docs/index.html
templates_path = ["site"]
html_static_path = ["site"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

myst_heading_anchors = 4
copybutton_prompt_text = "$ "
copybutton_here_doc_delimiter = "EOF"
copybutton_line_continuation_character = "\\"

default_role = "code"  # docstrings have code in single backquotes
autodoc_typehints = "none"  # the signatures' types are named in the descriptions
autodoc_default_options = {"members": True}
napoleon_use_ivar = True
napoleon_use_rtype = False

ROW = re.compile(r"^\| \[[^]]+\]\(([^)#:]+)\.md\)", re.MULTILINE)
NAME = re.compile(r"^- `tw\.([\w.]+)`$", re.MULTILINE)


def navigation(text: str) -> str:
    """Give each section a tree of the pages that the rows of its tables begin with; its heading is the caption."""
    first, *sections = text.split("\n## ")
    return "\n## ".join([first, *(section + tree(section, section.partition("\n")[0]) for section in sections)])


def tree(text: str, caption: str) -> str:
    """Return the tree of the pages that the rows of tables begin with."""
    pages = dict.fromkeys(ROW.findall(text))
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def api(text: str) -> str:
    """Put the docstring in the place of each listed name."""
    return NAME.sub(lambda found: f"```{{eval-rst}}\n{directive(found[1])}\n```", text)


def directive(name: str) -> str:
    """Return the directive of autodoc that documents a name of `tw`."""
    documented = attrgetter(name)(tw)
    kind = "class" if isinstance(documented, type) else "function"
    return f".. auto{kind}:: trainwright.{name}"


def cli(text: str) -> str:
    """Append the help of all commands."""
    group = typer.main.get_command(commands)
    described = get_docs_for_click(obj=group, ctx=typer.Context(group, info_name="trainwright"), name="trainwright")
    return f"{text}\n{described.partition(chr(10))[2]}"


def events(text: str) -> str:
    """Append a table of the kinds of events."""
    rows = [
        f"| `{kind.kind}` | {(kind.__doc__ or '').partition(chr(10))[0]} | {fields(kind)} |"
        for kind in sorted(Event.__subclasses__(), key=lambda each: each.kind)
    ]
    return "\n".join([text, "| event | meaning | fields |", "|---|---|---|", *rows])


def fields(kind: type[Event]) -> str:
    """Return the names of an event's own fields."""
    return ", ".join(f"`{name}`" for name in kind.__dataclass_fields__ if name != "time_s")


PAGES: dict[str, Callable[[str], str]] = {
    "docs/index": navigation,
    "docs/adr/README": lambda text: text + tree(text, "Decisions"),
    "docs/api": api,
    "docs/cli-reference": cli,
    "docs/events": events,
}


def setup(app: Sphinx) -> None:
    """Complete the pages of which the checkout holds the first part only."""

    def complete(app: Sphinx, name: str, source: list[str]) -> None:
        if name in PAGES:
            source[0] = PAGES[name](source[0])

    app.connect("source-read", complete)
