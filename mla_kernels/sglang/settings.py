"""What the environment asks for. SGLang spawns its workers, and variables reach them all."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping

PREFIX = "MLA_KERNELS_SGLANG"

ROW_ORDERS = ("probe", "latent_first", "rope_first")
LOG_LEVELS = ("debug", "info", "warning")

log = logging.getLogger("mla_kernels.sglang")


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    Args:
        on: ``MLA_KERNELS_SGLANG``, 0 or 1. Off unless set: to be installed beside an engine
            must not change it.
        row_order: ``MLA_KERNELS_SGLANG_ROW_ORDER``. ``"probe"`` asks the engine's pool at
            start-up (:func:`mla_kernels.evidence.evidence_for`), and leaves verify to SGLang
            where the witnesses disagree; ``"latent_first"`` and ``"rope_first"`` are believed.
        shadow_every: ``MLA_KERNELS_SGLANG_SHADOW``, verify steps from one on which both paths
            run and are compared to the next; 0 for never.
        log_level: ``MLA_KERNELS_SGLANG_LOG``.
    """

    on: bool = False
    row_order: str = "probe"
    shadow_every: int = 0
    log_level: str = "info"

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """
        Raises:
            ValueError: naming the variable, its value and what it must be.
        """
        shadow = environ.get(f"{PREFIX}_SHADOW") or "0"
        if not shadow.isdecimal():
            raise ValueError(f"{PREFIX}_SHADOW must be a number of verify steps, or 0; got "
                             f"{shadow!r}")
        return cls(
            on=_one_of(environ, PREFIX, ("0", "1")) == "1",
            row_order=_one_of(environ, f"{PREFIX}_ROW_ORDER", ROW_ORDERS),
            shadow_every=int(shadow),
            log_level=_one_of(environ, f"{PREFIX}_LOG", LOG_LEVELS, "info"))

    def as_environment(self) -> dict[str, str]:
        """The variables that :meth:`read` reads this from."""
        return {PREFIX: str(int(self.on)), f"{PREFIX}_ROW_ORDER": self.row_order,
                f"{PREFIX}_SHADOW": str(self.shadow_every), f"{PREFIX}_LOG": self.log_level}


def _one_of(environ: Mapping[str, str], name: str, allowed: tuple[str, ...],
            default: str | None = None) -> str:
    value = environ.get(name) or default or allowed[0]
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
    return value
