"""Torch modules and losses that read a database, a view, a memory or a cluster.

This folder may use public calls and `Core`, but no private names of other folders. Begin reading in `losses.py` and
`attention.py`; `view.py` trains encoders, `memory.py` trains stored keys and values.
"""

from softdb.nn.attention import Attention
from softdb.nn.hard import HardSamples, MovingBaseline, hard_attention, leave_one_out, reinforce, straight_through
from softdb.nn.losses import info_nce, label_loss, pooled_loss, retrieval_loss
from softdb.nn.memory import Memory
from softdb.nn.mil import MILPooling
from softdb.nn.positions import LearnedPositions, RotaryPositions, SinusoidalPositions
from softdb.nn.product_keys import ProductKeys
from softdb.nn.recurrent import RecurrentAttention
from softdb.nn.regression import KernelClassifier, KernelRegressor
from softdb.nn.reindexed import EverySteps, InBackground, Never, OnRecall
from softdb.nn.telemetry import GradientReport, Telemetry, gradient_report
from softdb.nn.view import View

__all__ = [
    "Attention", "EverySteps", "GradientReport", "HardSamples", "InBackground", "KernelClassifier",
    "KernelRegressor", "LearnedPositions", "MILPooling", "Memory", "MovingBaseline", "Never", "OnRecall",
    "ProductKeys", "RecurrentAttention", "RotaryPositions", "SinusoidalPositions", "Telemetry", "View",
    "gradient_report", "hard_attention", "info_nce", "label_loss", "leave_one_out", "pooled_loss", "reinforce",
    "retrieval_loss", "straight_through",
]  # fmt: skip
