"""The documentation site: `make docs` renders the pages of this folder with Sphinx into build/docs.

The pages are Markdown as GitHub shows it. Links to files outside this folder lead to the repository. The API pages have
the docstrings of the names that docs/api.md lists.
"""

import importlib
import os
import posixpath
import re
import sys
import textwrap
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "python")]

import api_reference  # noqa: E402
import gptkernels  # noqa: E402

project = "gptkernels"
author = "the authors of gptkernels"
copyright = author
release = version = gptkernels.__version__
root_doc = "index"
source_suffix = {".md": "markdown"}
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx_design"]
extensions += ["sphinx_copybutton"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "none"
napoleon_use_rtype = False
html_theme = "sphinx_book_theme"
html_title = f"gptkernels {release}"
html_show_sourcelink = False
html_theme_options = {"navbar_persistent": [], "show_toc_level": 2}
html_static_path = ["site"]
html_css_files = ["site.css"]

# GitHub's workflows set these variables. Without them, links to the repository lead to this checkout.
if "GITHUB_REPOSITORY" in os.environ:
    SOURCE = "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}/blob/{GITHUB_SHA}".format(**os.environ)
else:
    SOURCE = ROOT.as_uri()


def link_to_repository(docname, text):
    """Make links to files outside docs, except pictures, HTML links: Markdown has no links to local files."""

    def replaced(match):
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(docname), match["path"]))
        if match["picture"] or path.startswith("docs/"):
            return match[0]
        return f'<a href="{SOURCE}/{path}{match["anchor"] or ""}">{match["text"]}</a>'

    link = r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<path>\.\.[^)#\s]*)(?P<anchor>#[^)]*)?\)"
    return re.sub(link, replaced, text)


def module_page(name, says):
    """Return the page of a module: Sphinx fills in the signatures and docstrings."""
    module = importlib.import_module(name)
    lines = [f"# {name}", "", says.replace("](", "](../"), "", "```{eval-rst}", f".. currentmodule:: {name}", ""]
    for public, value in api_reference.public_entries(module):
        if isinstance(value, type):
            members = [method for method, _, _ in api_reference.methods(value)]
            lines += [f".. autoclass:: {public}", *([f"   :members: {', '.join(members)}"] if members else [])]
        else:
            lines += [f".. autofunction:: {public}"]
        lines += [""]
    return "\n".join([*lines, "```", ""])


def operators_page():
    """Return the page of the operators: the schemas, with the pages that docs/README.md names for them."""
    rows = re.findall(r"^\| (\[[^|]*) \| (`.*`) \|$", (DOCS / "README.md").read_text(), re.M)
    pages = {name: page.replace("](", "](../") for page, names in rows for name in re.findall(r"`(\w+)`", names)}
    lines = ["# torch.ops.gptkernels", "", *api_reference.OPERATORS.split("\n")[3:]]
    for title, schemas in zip(("Operators", "Gradients and masks"), api_reference.operators(), strict=True):
        lines += [f"## {title}", ""]
        for schema in schemas:
            name = schema.split("(")[0]
            lines += [f"### {name}", "", *([f"See {pages[name]}.", ""] if name in pages else [])]
            lines += ["```text", textwrap.fill(schema, 72, subsequent_indent="    ", break_long_words=False), "```", ""]
    return "\n".join(lines).replace("](../README.md)", "](../../README.md)").replace("](../ops/", "](../../ops/")


def write_api_pages(app):
    """Write a page for each module into docs/api."""
    folder = DOCS / "api"
    folder.mkdir(exist_ok=True)
    pages = {name: module_page(name, says) for name, says in api_reference.MODULES.items()}
    for name, text in {**pages, "operators": operators_page()}.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def read_source(app, docname, text):
    """Replace the listing of docs/api.md by a table of contents of the API pages."""
    if docname == "api":
        pages = "\n".join([*(f"api/{name}" for name in api_reference.MODULES), "api/operators"])
        rows = "\n".join(f"- [{name}](api/{name}.md): {says}" for name, says in api_reference.MODULES.items())
        last = "- [torch.ops.gptkernels](api/operators.md): the operators' schemas."
        text[0] = f"# API\n\n{rows}\n{last}\n\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"
    text[0] = link_to_repository(docname, text[0])


def setup(app):
    """Connect the functions to Sphinx's events."""
    app.connect("builder-inited", write_api_pages)
    app.connect("source-read", read_source)
