"""softdb inside other libraries, one module or package each, imported by its name, never by `import softdb`.

They may touch everything public, and the library that they serve; nothing imports them.
Begin with the page of docs/integrations for the library; `documents.py` is shared by LangChain and Haystack.
"""
