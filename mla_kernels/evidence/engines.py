"""What was read in which engine: the table behind the notebook, one record an engine version."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path

from ..layout import Order
from .symbols import Site
from .verdict import OrderUnknown

#: Written by ``python -m mla_kernels.evidence ... --record``.
ENGINES_RECORD = Path(__file__).parents[2] / "data" / "evidence" / "engines.json"


@dataclasses.dataclass(frozen=True)
class EngineRecord:
    """One engine version's order.

    Args:
        read_from: what was read: a wheel's or a folder's name.
        how: ``"followed"`` or ``"matched"``, see :class:`~.verdict.Testimony`.
        place: the file and line that say it best: followed before matched, a write before a read.
        sites: every place that fixes the order, as text.
    """

    engine: str
    version: str
    order: Order
    date: str
    read_from: str
    how: str
    place: str
    sites: tuple[str, ...]


def from_sites(engine: str, version: str, read_from: str, sites: Sequence[Site]) -> EngineRecord:
    """The record of what :func:`~.source.find_sites` found.

    Raises:
        OrderUnknown: the sites name no order, or both.
    """
    telling = sorted((s for s in sites if s.order), key=lambda s: (s.sure, s.role != "write"))
    orders = {s.order for s in telling}
    if len(orders) != 1:
        raise OrderUnknown(f"{engine} {version}: the source names "
                           f"{' and '.join(sorted(orders)) or 'no order'}: nothing to record")
    best = telling[0]
    return EngineRecord(engine, version, best.order, datetime.date.today().isoformat(), read_from,
                        best.sure, f"{best.file}:{best.line}", tuple(map(str, telling)))


def load(path: Path = ENGINES_RECORD) -> list[EngineRecord]:
    """All records, in the file's order."""
    return [EngineRecord(**{**r, "sites": tuple(r["sites"])}) for r in json.loads(path.read_text())]


def record(new: EngineRecord, path: Path = ENGINES_RECORD) -> None:
    """Adds a record, in place of an earlier one of the same engine version."""
    kept = [r for r in (load(path) if path.exists() else [])
            if (r.engine, r.version) != (new.engine, new.version)]
    rows = sorted([*kept, new], key=lambda r: (r.engine.lower(), _release(r.version)))
    path.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=2) + "\n")


def _release(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)]
