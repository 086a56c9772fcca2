"""Questions about a cluster before anything is bought, rented or unplugged: the step with one device or
machine less, with faster links, another device, more memory, or twice the batch."""

from .answers import Answer, answers
from .changes import Change, changes

__all__ = ["Answer", "Change", "answers", "changes"]
