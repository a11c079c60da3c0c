"""What queries return: records, hits and pooled values; as short text, and as tables in a notebook."""

from softdb.answers.records import *  # noqa: F403 - records, hits
from softdb.answers.soft import *  # noqa: F403 - pooled values, explanations, samples, estimates
