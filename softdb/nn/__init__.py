"""Torch modules on a database."""

from softdb.nn.attention import Attention

__all__ = ["Attention"]
