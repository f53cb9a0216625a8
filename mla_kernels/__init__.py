"""A research workbook on Multi-head Latent Attention: rows, draft trees, and a verify kernel.

The rooms, each importing only from those before it: ``layout``, ``tree``, ``batch``,
``reference``, ``device``, ``build``, ``cuda``, ``triton``, ``attention``, ``evidence``,
``bench``, ``figures``, ``widgets``.
"""

from .attention import verify_attention
from .batch import VerifyBatch
from .layout import KVLayout
from .tree import DraftTree

__all__ = ["DraftTree", "KVLayout", "VerifyBatch", "verify_attention"]
__version__ = "0.1.0"
