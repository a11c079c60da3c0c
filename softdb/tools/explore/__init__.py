"""A database shown in a browser of this machine (`softdb[explore]`): read-only, with nothing from another origin.

It asks the database by its public calls. Begin at `server.application` and `replies.Answers`.
"""
