"""Sphinx reads the repository's Markdown files, and the docstrings of the installed package."""

import cccl

project = "CCCL"
version = release = cccl.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "core/codecs/*/FORMAT.md"]
myst_heading_anchors = 3
html_theme = "furo"
autodoc_typehints = "description"
