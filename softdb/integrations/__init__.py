"""Integrations of softdb into other libraries: a module or package for each, which `import softdb` does not import.

An integration may use all public parts of softdb, and its own library; no other part of softdb imports it. Begin with
the library's page in docs/integrations. `documents.py` has functions for LangChain, Haystack and LlamaIndex.
"""
