"""Into SGLang: verify of draft trees through :func:`mla_kernels.verify_attention`, the rest
SGLang's own.

Off unless ``MLA_KERNELS_SGLANG=1``; see ``settings`` for the other variables. In a terminal::

    python -m mla_kernels.sglang doctor      # what would be patched, and whether it fits
    python -m mla_kernels.sglang install     # a .pth file, for SGLang without plugins
    python -m mla_kernels.sglang uninstall

The files, each importing only from those before it: ``settings``, ``verify``,
``rehearsal``, ``fit``, ``backend``, ``hook``, ``pth``.

Nothing is imported here, as the hook runs at the start of every Python process.
"""
