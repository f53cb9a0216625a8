"""Records: JSON files in ``data/`` that a run on some machine wrote, one a run.

A machine without a GPU shows these instead of running the kernel, and says where and when they
were made. Of checks (``python -m mla_kernels.check --out``) the contents are known here; what
other folders hold is known to who wrote them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

#: The repository's folder of records; the project is installed in place.
DATA = Path(__file__).parent.parent / "data"
FOLDER = DATA / "checks"


def write(path: Path, record: Mapping[str, object]) -> None:
    """Writes a record whole or not at all, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(record, indent=1) + "\n")
    new.replace(path)


def latest(folder: str) -> dict | None:
    """The newest record of a folder of ``data``, by its ``date``; None where there is none."""
    found = [json.loads(path.read_text()) for path in sorted((DATA / folder).glob("*.json"))]
    return max(found, key=lambda record: record["date"], default=None)


@dataclasses.dataclass(frozen=True)
class CheckRecord:
    """One run of random cases against the float64 oracle.

    Args:
        every_plan: each case was launched by a plan drawn at random.
        worst, tolerance: by ``out``, ``row`` and ``lse``; see ``mla_kernels.check``.
        origin: device, driver, versions, commit and date, as far as the file has them.
    """

    cases: int
    failed: int
    first_seed: int
    backend: tuple[str, ...]
    worst: dict[str, float]
    tolerance: dict[str, float]
    max_nodes: int
    origin: dict[str, str]
    every_plan: bool = False

    @property
    def command(self) -> str:
        """What repeats the run, on such a machine."""
        return (f"python -m mla_kernels.check --cases {self.cases} --seed {self.first_seed} "
                f"--backend {','.join(self.backend)} --max-nodes {self.max_nodes}"
                + " --every-plan" * self.every_plan)

    def __str__(self) -> str:
        o = self.origin
        where = ", ".join(f"{label} {o[key]}" for key, label in (
            ("driver", "driver"), ("cuda", "CUDA"), ("torch", "torch"), ("commit", "commit"))
            if o.get(key))
        how = ", each by a random launch plan," if self.every_plan else ""
        return (f"{self.cases - self.failed} of {self.cases} random cases{how} passed on "
                f"{o.get('device', 'an unknown device')} with {', '.join(self.backend)} on "
                f"{o.get('date', 'an unknown date')}\n({where})")


def load(path: Path | str) -> CheckRecord:
    """One file.

    Raises:
        ValueError: it is not what ``mla_kernels.check`` writes; the message says what is wrong.
    """
    try:
        data = json.loads(Path(path).read_text())
        record = CheckRecord(
            cases=int(data["cases"]), failed=int(data["failed"]),
            first_seed=int(data["first_seed"]), backend=tuple(data["backend"]),
            worst={k: float(data["worst"][k]) for k in ("out", "row", "lse")},
            tolerance={k: float(data["tolerance"][k]) for k in ("out", "row", "lse")},
            max_nodes=int(data["max_nodes"]),
            origin={k: str(data[k]) for k in ("device", "driver", "cuda", "torch", "commit",
                                              "date") if data.get(k)},
            every_plan=bool(data.get("every_plan", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a record of mla_kernels.check "
                         f"({type(error).__name__}: {error})") from error
    return record


def checks(folder: Path | str = FOLDER) -> list[CheckRecord]:
    """Every recorded check, by file name; empty where nothing is recorded yet."""
    return [load(path) for path in sorted(Path(folder).glob("*.json"))]
