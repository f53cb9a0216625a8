"""A research workbook on Multi-head Latent Attention: rows, draft trees, and a verify kernel.

The rooms, each importing only from those before it: ``layout``, ``tree``, ``batch``,
``marshal``, ``checked``, ``reference``, ``synthetic``, ``device``, ``records``, ``graphs``,
``build``, ``source``, ``schedule``, ``cuda``, ``emulated``, ``triton``, ``attention``, ``check``,
``model``, ``engine_runs``, ``evidence``, ``doctor``, ``ceilings``, ``workload``, ``traffic``,
``measurements``, ``peers``, ``bench``, ``autotune``, ``predict``, ``figures``, ``figures_speed``,
``figures_limits``, ``figures_peers``, ``figures_predict``, ``figures_traffic``,
``figures_evidence``, ``figures_graphs``, ``figures_sglang``, ``figures_model``, ``widgets``,
``sglang``, ``labs``.
"""

import importlib

__version__ = "0.1.0"

# Loaded when first asked for: `python -m mla_kernels.build` would otherwise import its own
# module twice, and a look at a layout need not load a compiler's driver.
_HOME = {"DraftTree": "tree", "KVLayout": "layout", "VerifyBatch": "batch",
         "verify_attention": "attention"}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
