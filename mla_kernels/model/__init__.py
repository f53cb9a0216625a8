"""A small language model with true MLA rows, which decodes with draft trees.

The files, in the order in which they build on each other: ``transformer``, ``cache``, ``decode``,
``text``, ``train``, ``measure``.
"""
