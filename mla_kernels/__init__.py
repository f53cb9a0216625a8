"""A research workbook on Multi-head Latent Attention: rows, draft trees, and a verify kernel.

The rooms, each importing only from those before it: ``layout``, ``tree``, ``batch``,
``reference``, ``device``, ``build``, ``cuda``, ``triton``, ``attention``, ``bench``,
``figures``, ``widgets``.
"""

__version__ = "0.1.0"
