"""Training and evaluation of sentence-transformers models against every record of a database."""

from softdb.errors import MissingDependency

try:
    from softdb.integrations.sentence_transformers.evaluation import DatabaseEvaluator, RefreshCallback
    from softdb.integrations.sentence_transformers.loss import DatabaseLoss, ModelEncoder, labelled
    from softdb.integrations.sentence_transformers.mining import mine_hard_negatives
except ImportError as error:
    raise MissingDependency(
        f"softdb.integrations.sentence_transformers: {error}; pip install 'softdb[sentence-transformers]'"
    ) from error

__all__ = [
    "DatabaseEvaluator", "DatabaseLoss", "ModelEncoder", "RefreshCallback", "labelled", "mine_hard_negatives",
]  # fmt: skip
