"""What the site needs beyond MyST: pages of the API, highlighted sources, notebooks, the README as its first page."""

from __future__ import annotations

import configparser
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import api_pages
from docutils import nodes
from docutils.utils import unescape
from myst_parser.parsers.sphinx_ import MystParser
from notebooks import to_markdown
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

ROOT = api_pages.ROOT
SOURCE_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{path}</title>
<link rel="stylesheet" href="{top}_static/pygments.css"><link rel="stylesheet" href="{top}_static/site.css">
</head>
<body class="source-page"><p><a href="{top}{home}.html">simparallel</a> / <code>{path}</code></p>
{code}
</body>
</html>
"""


class NotebookParser(MystParser):
    """Read an .ipynb file as the Markdown of its cells and outputs."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse(to_markdown(json.loads(inputstring)), document)


def first_page(app: Sphinx, docname: str, content: list[str]) -> None:
    """Put the README above the table of contents, with its links to files of the project as seen from `docs/`."""
    if docname == app.config.root_doc:
        app.env.note_dependency(str(ROOT / "README.md"))
        settings = configparser.ConfigParser()
        settings.read(ROOT / "setup.cfg")
        base = re.search(r"Source = (\S+)", settings["metadata"]["project_urls"])[1]
        link = re.compile(rf"{re.escape(base)}/(?:blob|raw)/main/(\S+)")
        readme = link.sub(lambda found: os.path.relpath(found[1], "docs"), (ROOT / "README.md").read_text())
        content[0] = f"{readme}\n{content[0]}"


def without_lessons(app: Sphinx, docname: str, content: list[str]) -> None:
    """Leave out the list of lessons if none has been executed."""
    if docname == app.config.root_doc and not any("tutorials/" in name for name in app.project.docnames):
        content[0] = re.sub(r"```{toctree}[^`]*\.\./tutorials/[^`]*```", "", content[0])


def adapt_links(app: Sphinx, docname: str, content: list[str]) -> None:
    """Let links to the README lead to the first page, and keep only the text of links to folders."""
    folder = Path(app.env.doc2path(docname)).parent

    def adapted(link: re.Match[str]) -> str:
        target = folder / link[2]
        return link[1] if target.is_dir() else link[0].replace("../README.md", "index.md")

    content[0] = re.sub(r"\[([^\]]+)\]\(([^):#]+)\)", adapted, content[0])


class SourceLink(nodes.General, nodes.Inline, nodes.TextElement):
    """A link to a line of a file of the package; its address depends on the page."""


def source_role(name: str, rawtext: str, text: str, *_: Any) -> tuple[list[nodes.Node], list[nodes.Node]]:
    """Make {source}`simparallel/nn/linear.py:12` a link to that line of the highlighted file."""
    path, _, line = unescape(text).partition(":")
    link = SourceLink("", "", nodes.literal("", unescape(text)), path=path, line=line)
    return [nodes.inline("", "", nodes.Text("Source: "), link, classes=["source"])], []


def source_page(path: str) -> str:
    return f"source/{path.removesuffix('.py')}.html"


def resolve_sources(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Give the links to sources their addresses."""
    for node in list(doctree.findall(SourceLink)):
        uri = f"{'../' * docname.count('/')}{source_page(node['path'])}#line-{node['line']}"
        node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))


def write_sources(app: Sphinx, error: Exception | None) -> None:
    """Write a page with the highlighted text of each file that the API names."""
    if error is not None or app.builder.format != "html":
        return
    pages = (Path(app.confdir) / "api").rglob("*.md")
    for path in sorted({path for page in pages for path in re.findall(r"{source}`(.*?):", page.read_text())}):
        target = Path(app.outdir) / source_page(path)
        if not target.exists() or target.stat().st_mtime < (ROOT / path).stat().st_mtime:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_source_text(app, path))


def _source_text(app: Sphinx, path: str) -> str:
    code = app.builder.highlighter.highlight_block((ROOT / path).read_text(), "python")  # type: ignore[attr-defined]
    head, lines, tail = re.split("(?<=<pre>)|(?=</pre>)", code, maxsplit=2)
    numbered = "\n".join(f'<span id="line-{number}">{line}</span>' for number, line in enumerate(lines.split("\n"), 1))
    top = "../" * source_page(path).count("/")
    return SOURCE_PAGE.format(path=path, top=top, home=app.config.root_doc, code=head + numbered + tail)


def address(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the page at the root of the site, which leads to the first page."""
    yield "index", {}, "redirect.html"


def resolve_types(app: Sphinx, doctree: nodes.document) -> None:
    """Aim the types in signatures at their entries, and make plain text of those without one."""
    paths = api_pages.class_paths()
    for node in list(doctree.findall(addnodes.pending_xref)):
        if node.get("refdomain") == "py" and node["reftype"] == "class":
            if node["reftarget"] in paths:
                node["reftarget"], node["refspecific"] = paths[node["reftarget"]], False
            else:
                node.replace_self(node.children)


def link_names(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Make code that is a public name, such as `sp.launch`, a link to its entry; in the API its last part will do."""
    objects = app.env.domains["py"].data["objects"]
    short: dict[str, str] = {}
    if docname.startswith("docs/api/"):
        here = {path for path, entry in objects.items() if entry.docname == docname}
        short = api_pages.short_paths() | {name.last: name.path for name in api_pages.main_names() if name.path in here}

    def linked(text: str) -> nodes.Node:
        name = text.partition("(")[0]
        entry = objects.get(short.get(name, name))
        code = nodes.literal("", text)
        return code if entry is None else make_refnode(app.builder, docname, entry.docname, entry.node_id, code)

    for node in list(doctree.findall(nodes.literal)):
        # The entries of Args and Raises may have several names.
        names = [linked(part) for part in node.astext().split(", ")]
        is_link = isinstance(node.parent, (nodes.reference, nodes.strong, addnodes.pending_xref))
        if not is_link and any(isinstance(name, nodes.reference) for name in names):
            node.replace_self([part for name in names for part in (nodes.Text(", "), name)][1:])


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    app.add_role("source", source_role)
    app.add_node(SourceLink)
    app.connect("builder-inited", lambda app: api_pages.write(Path(app.confdir) / "api"))
    app.connect("source-read", first_page)
    app.connect("source-read", without_lessons)
    app.connect("source-read", adapt_links)
    app.connect("doctree-read", resolve_types)
    app.connect("doctree-resolved", link_names)
    app.connect("doctree-resolved", resolve_sources)
    app.connect("html-collect-pages", address)
    app.connect("build-finished", write_sources)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": False}
