"""Three labs: a pure computation, a picture of it, and controls around both.

* ``tree``: a draft tree of any family, its mask, and what a verify call is given.
* ``advisor``: expected tokens a second against the node budget, and whether a tree pays.
* ``kernel``: variants of the kernel, their budgets, and what the compiler makes of them.

The files, each importing only from those before it: ``figures``, ``tree``, ``advisor``,
``kernel``.
"""
