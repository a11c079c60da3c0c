"""The explorer: a database in a browser on this machine (`softdb[explore]`), read-only, without files from elsewhere.

It queries the database by its public calls. Begin at `server.application` and `replies.Answers`.
"""
