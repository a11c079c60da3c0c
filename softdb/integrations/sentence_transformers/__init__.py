"""Training and evaluation of sentence-transformers models against every record of a database."""

from softdb.errors import MissingDependency

try:
    import sentence_transformers as _  # noqa: F401 - one check for all modules below
except ImportError as error:
    raise MissingDependency(
        "softdb.integrations.sentence_transformers needs that library; pip install 'softdb[sentence-transformers]'"
    ) from error

from softdb.integrations.sentence_transformers.evaluation import DatabaseEvaluator, RefreshCallback
from softdb.integrations.sentence_transformers.loss import DatabaseLoss, ModelEncoder, labelled
from softdb.integrations.sentence_transformers.mining import mine_hard_negatives

__all__ = [
    "DatabaseEvaluator",
    "DatabaseLoss",
    "ModelEncoder",
    "RefreshCallback",
    "labelled",
    "mine_hard_negatives",
]
