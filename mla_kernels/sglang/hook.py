"""How the backend gets into a process of SGLang's, before that builds its own.

SGLang spawns a process for each rank, so a patch made in the parent is lost. Two ways lead
here in every process: SGLang's plugin system, which calls :func:`activate` as an entry point of
the group ``sglang.srt.plugins``, and a ``.pth`` file (see ``pth``), for versions without it
and for checkouts that are not installed. Either may come first; both together do no harm.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

from .settings import Settings, log

#: Where SGLang keeps the factories of its attention backends (the same name stands in ``fit``,
#: which this module does not import: it runs at the start of every Python process).
REGISTRY = "sglang.srt.layers.attention.attention_registry"


def activate() -> None:
    """Wraps the factory of SGLang's Triton backend, now or when its module is imported. Does
    nothing unless the environment says so, and never raises."""
    try:
        settings = Settings.read()
        if not settings.on:
            return
        log.setLevel(settings.log_level.upper())
        if REGISTRY in sys.modules:
            wrap(sys.modules[REGISTRY])
        elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport())
    except Exception as error:
        log.error("SGLang is left untouched: %s: %s", type(error).__name__, error)


def wrap(registry: ModuleType) -> None:
    """Puts our factory around the one of the Triton backend."""
    backends = getattr(registry, "ATTENTION_BACKENDS", {})
    original = backends.get("triton")
    if original is None:
        log.error("SGLang is left untouched: %s has no ATTENTION_BACKENDS['triton']", REGISTRY)
    elif not is_ours(original):
        backends["triton"] = _factory(original)


def is_ours(factory: Any) -> bool:
    return getattr(factory, "__module__", "") == __name__


def _factory(original: Any) -> Any:
    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        backend = original(*args, **kwargs)
        try:
            from .backend import take_over

            return take_over(backend, Settings.read())
        except Exception as error:
            log.error("SGLang is left untouched: %s: %s", type(error).__name__, error)
            return backend

    create.__module__ = __name__
    return create


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the registry's module as Python would, and wraps the factory once it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        if found is None or found.loader is None:
            return None
        self._real, found.loader = found.loader, self
        return found

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._real
        self._real.exec_module(module)
        wrap(module)
