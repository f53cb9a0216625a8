"""What a witness says, and what several of them say together."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable

from ..layout import Order


class OrderUnknown(ValueError):
    """The evidence fits neither order, or is no evidence at all."""


class WitnessesDisagree(OrderUnknown):
    """Two witnesses name different orders. The message shows both."""


@dataclasses.dataclass(frozen=True)
class Testimony:
    """One witness's answer.

    Args:
        witness: ``"source"``, ``"live buffer"`` or ``"numbers"``.
        order: the order, or None for "cannot tell".
        says: what it saw, a line each; for None, why it can't tell.
        sure: how much weight it has: ``"followed"`` (from the entry to the store, in the
            syntax tree), ``"matched"`` (a pattern in C++ without its comments), ``"measured"``.
    """

    witness: str
    order: Order | None
    says: tuple[str, ...]
    sure: str = "measured"

    def __str__(self) -> str:
        answer = self.order or "cannot tell"
        head = f"  {self.witness:12}{answer:14}{self.sure if self.order else ''}".rstrip()
        lines = [textwrap.fill(line, 96, initial_indent=" " * 14, subsequent_indent=" " * 16,
                               break_long_words=False, break_on_hyphens=False)
                 for line in self.says]
        return "\n".join([head, *lines])


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The witnesses of one engine. Make it with :func:`judge`."""

    engine: str
    version: str
    testimonies: tuple[Testimony, ...]

    @property
    def order(self) -> Order | None:
        return next((t.order for t in self.testimonies if t.order), None)

    def __str__(self) -> str:
        votes = sum(t.order is not None for t in self.testimonies)
        answer = f"{self.order}, from {votes} witness{'es' * (votes > 1)}" if votes else (
            "cannot tell")
        return "\n".join([f"{self.engine} {self.version}".rstrip() + f": {answer}",
                          *map(str, self.testimonies)])


def judge(engine: str, version: str, testimonies: Iterable[Testimony]) -> Verdict:
    """One verdict from independent witnesses. Those that cannot tell have no vote.

    Raises:
        WitnessesDisagree: both orders were named.
    """
    verdict = Verdict(engine, version, tuple(testimonies))
    orders = {t.order for t in verdict.testimonies if t.order}
    if len(orders) > 1:
        shown = "\n".join(str(t) for t in verdict.testimonies if t.order)
        name = f"{engine} {version}".rstrip()
        raise WitnessesDisagree(f"the witnesses of {name} disagree:\n{shown}")
    return verdict
