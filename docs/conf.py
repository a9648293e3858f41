"""Settings of the site: `sphinx-build -W --keep-going -c docs . site`, from the root of the checkout."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "extensions")]

import simparallel  # noqa: E402

project = "simparallel"
author = "The simparallel authors"
release = simparallel.__version__

extensions = ["myst_parser", "site_builder"]
root_doc = "docs/index"
# The sources are the checkout itself, so that links between its files mean the same here and where they are read there.
include_patterns = ["docs/**", "CONTRIBUTING.md", "CHANGELOG.md", "tutorials/[0-9][0-9]_*.ipynb"]
exclude_patterns = ["docs/extensions", "docs/static"]

myst_enable_extensions = ["fieldlist"]
myst_heading_anchors = 4
add_module_names = False
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 88

highlight_language = "text"
smartquotes = False

html_theme = "furo"
html_title = "simparallel"
html_static_path = ["static"]
templates_path = ["templates"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
pygments_style = "default"
pygments_dark_style = "github-dark"
