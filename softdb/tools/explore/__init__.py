"""A database shown in a browser of this machine (`softdb[explore]`): read-only, with nothing from another origin."""
