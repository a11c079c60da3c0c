"""The pages as HTML: `pip install sphinx myst-parser`, then `sphinx-build -W docs build/docs`."""

project = "softdb"
extensions = ["myst_parser"]
myst_heading_anchors = 3  # the anchors that GitHub gives headings
suppress_warnings = ["myst.xref_missing"]  # links to files outside docs/; tests/house/test_readme.py follows them
html_theme = "alabaster"
