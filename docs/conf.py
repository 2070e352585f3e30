"""Sphinx configuration of the documentation site. Build it with `sphinx-build -W -c docs . docs/_build`.

The source folder is the repository, so that links to pages outside of docs/ work on GitHub and on the site.
"""

import inspect
import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "reference")]

import generated  # noqa: E402  # docs/reference/generated.py

import cifar_lit  # noqa: E402

project = "cifar-lit"
release = cifar_lit.__version__
copyright = "the cifar-lit contributors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "results/**.md"]
exclude_patterns = [".*", "build", "cifar_lit", "data", "dist", "docs/_build", "lightning_logs", "scripts", "tests"]

myst_heading_anchors = 4  # the anchors of headings that GitHub makes
smartquotes = False  # they would turn --flag into –flag
highlight_language = "text"

default_role = "code"  # docstrings put names in single backticks
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # Lightning's hooks are documented by Lightning
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "cifar-lit"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


def prepare_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Fill in the generated parts of a page, and add the table of contents to the index."""
    source[0] = generated.filled_in(source[0], site=True)
    if docname == app.config.root_doc:
        source[0] += "\n".join(toctree(title, pages) for title, pages in generated.sections(source[0]).items())


def toctree(title: str, pages: list[str]) -> str:
    """Return a hidden table of contents, shown in the sidebar."""
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```"])


def add_types(app: Sphinx, what: str, name: str, obj: type, options: object, lines: list[str]) -> None:
    """Give an argument the type of its signature. Sphinx takes that of a class attribute of the same name."""
    attributes = getattr(obj, "__annotations__", {}) if what == "class" else {}
    for parameter in inspect.signature(obj).parameters.values() if attributes else ():
        line = next((line for line in lines if line.startswith(f":param {parameter.name}:")), None)
        if line and parameter.name in attributes:
            lines.insert(lines.index(line), f":type {parameter.name}: {generated.type_name(parameter.annotation)}")


def allow_outside(app: Sphinx, doctree: object) -> None:
    """Do not require pages outside of docs/, such as README.md, to be in the table of contents."""
    if not app.env.docname.startswith("docs/"):
        app.env.metadata[app.env.docname]["orphan"] = True


def forward_root(app: Sphinx, error: Exception | None) -> None:
    """Write an index.html at the top of the site that leads to docs/index.html."""
    if error is None and app.builder.format == "html":
        page = '<!doctype html><meta charset="utf-8"><title>cifar-lit</title>'
        page += '<meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">cifar-lit</a>\n'
        (Path(app.outdir) / "index.html").write_text(page)


def setup(app: Sphinx) -> None:
    """Connect the functions above to Sphinx."""
    app.connect("source-read", prepare_source)
    app.connect("autodoc-process-docstring", add_types, priority=600)  # after napoleon
    app.connect("doctree-read", allow_outside, priority=900)
    app.connect("build-finished", forward_root)
