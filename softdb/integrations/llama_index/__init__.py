"""LlamaIndex's vector store, on top of a database (`softdb[llama-index]`)."""

from softdb.integrations.llama_index.store import SoftDBVectorStore

__all__ = ["SoftDBVectorStore"]
