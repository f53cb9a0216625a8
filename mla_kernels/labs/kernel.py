"""The kernel lab: variants of the kernel, what they would need, and what becomes of them.

A variant sets constants of ``csrc/tree_verify.cuh`` and ``csrc/kv_layout.cuh``. Its shared
memory is worked out from the source's own definitions before any compiler runs.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import re
from collections.abc import Callable
from typing import TypeVar

import ipywidgets
import numpy as np
import pandas as pd
import torch
from IPython.display import HTML, Image, clear_output
from matplotlib.figure import Figure
from tqdm.auto import tqdm

from .. import attention, build, check, cuda, source
from ..bench import cuda_variant, error_of, time_graph
from ..build import KernelReport
from ..device import MAX_REGISTERS, SM120_SMEM_PER_BLOCK, local_gpu
from ..figures import smem_budget
from ..layout import KVLayout
from ..widgets import explore, one_at_a_time, show
from ..workload import Shape, make_workload
from . import figures

T = TypeVar("T")

#: Bytes of the struct at the end of a block's shared memory, the one size that the definitions
#: do not give; a test asks the compiler.
SIZEOF = {"Walk": 60}

#: What Time measures.
SHAPE = Shape(8, 8, 8, 16384)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One choice. The defaults are the shipped kernel.

    Args:
        rows: query rows of a block: 16, 32 or 64.
        tile: cache rows of a tile.
        stages: tiles in shared memory.
        warps: of a block.
        padding: bytes between rows in shared memory.
        rescale: powers of two that a maximum may be exceeded by.
        blocks: blocks that the compiler is to make room for in an SM's registers.
        splits: work groups of a launch; 0 leaves it to the plan.
        order: of a row; dtype: ``bf16`` or ``fp16``.
    """

    rows: int = 64
    tile: int = 32
    stages: int = 2
    warps: int = 8
    padding: int = 16
    rescale: int = 8
    blocks: int = 1
    splits: int = 0
    order: str = "latent_first"
    dtype: str = "bf16"

    def __str__(self) -> str:
        changed = [f"{f.name} {getattr(self, f.name)}" for f in dataclasses.fields(self)
                   if getattr(self, f.name) != f.default and f.name not in ("rows", "dtype")]
        return f"{self.rows} rows, {self.dtype}: " + (", ".join(changed) or "as shipped")

    @property
    def constants(self) -> dict[str, str]:
        """What differs from the sources, for :func:`build.variant`."""
        shipped = Variant()
        pairs = {"stages": ("kStages", str(self.stages)),
                 "padding": ("kRowStride", f"kRowBytes + {self.padding}"),
                 "rescale": ("kLazyRescale", f"{self.rescale}.f"),
                 "blocks": ("__launch_bounds__(Config::kThreads, 1)",
                            f"__launch_bounds__(Config::kThreads, {self.blocks})"),
                 "tile": ("kTokens", str(self.tile))}
        return {name: value for field, (name, value) in pairs.items()
                if getattr(self, field) != getattr(shipped, field)}


# -- before the compiler ------------------------------------------------------------------


def _python(expression: str) -> str:
    """A constant expression of C++ as one of Python."""
    text = re.sub(r"sizeof\((\w+)\)", r"sizeof_\1", expression)
    while found := re.search(r"\(([^()]*)\)", text):  # innermost brackets first
        text = text[:found.start()] + "\0" + _flat(found[1]) + "\1" + text[found.end():]
    text = _flat(text).replace("\0", "(").replace("\1", ")").replace("/", "//")
    return text.replace("&&", " and ").replace("||", " or ")


def _flat(text: str) -> str:
    condition, question, rest = text.partition("?")
    if question:
        yes, _, no = rest.partition(":")
        text = f"\0{yes.strip()} if {condition.strip()} else {no.strip()}\1"
    return text.strip()


def constants(variant: Variant) -> dict[str, int]:
    """Constants of the source for a variant, worked out without a compiler."""
    texts = build.sources()
    shared = dict(re.findall(r"^constexpr int (k\w+) = ([^;]+);", texts["kv_layout.cuh"],
                             re.MULTILINE))
    values: dict[str, int] = {f"sizeof_{k}": v for k, v in SIZEOF.items()}
    values |= {"kRows_": variant.rows, "true": True, "false": False}
    own = {**shared, **source._config_definitions()} | {
        k: v for k, v in variant.constants.items() if k.isidentifier() and k != "kLazyRescale"}
    for name, expression in own.items():
        values[name] = int(eval(_python(expression), {"__builtins__": {}}, values))
    return values


def smem(variant: Variant) -> dict[str, int]:
    """Bytes of each region of a block's shared memory."""
    return source.smem_parts(constants(variant))


def fragments(variant: Variant) -> int:
    """Registers of a thread that hold the output and the queries throughout."""
    c = constants(variant)
    return 4 * c["kTeamGroups"] * (c["kValueTiles"] + c["kSteps"])


def refusal(variant: Variant) -> str:
    """Why a variant cannot be, with the sum where it is one; empty for a legal one."""
    if variant.rows not in build.TILE_ROWS:
        return f"rows must be one of {build.TILE_ROWS}; got {variant.rows}"
    if variant.warps != 8:
        return (f"warps must be 8: two teams of four, a warp a quarter of the 576 dimensions; got "
                f"{variant.warps}")
    # One build holds all shapes, so the largest must fit too.
    for rows in dict.fromkeys((variant.rows, *build.TILE_ROWS)):
        parts = smem(dataclasses.replace(variant, rows=rows))
        total = sum(parts.values())
        if total <= SM120_SMEM_PER_BLOCK:
            continue
        listed = " + ".join(f"{size:,} {name}" for name, size in parts.items())
        return (f"with {rows} query rows, {listed} = {total:,} B, "
                f"{total - SM120_SMEM_PER_BLOCK:,} over the "
                f"{SM120_SMEM_PER_BLOCK:,} B of a block of sm_120")
    if variant.tile != 32:
        return (f"tile must be 32: eight warps copy four rows each, and a row's mask is a word of "
                f"32 bits; got {variant.tile}")
    if variant.stages != 2:
        return (f"stages must be at least 2: a tile is copied while another is read; got "
                f"{variant.stages}")
    if constants(variant)["kRowStride"] // 4 % 32 != 4:
        return (f"padding must put rows 4 of 32 banks apart, as 16 and 144 do (ldmatrix would "
                f"meet itself); got {variant.padding}")
    if not 0 <= variant.splits <= cuda.MAX_GROUPS:
        return f"splits must be in 0 .. {cuda.MAX_GROUPS}; got {variant.splits}"
    return ""


def _legal(variant: Variant) -> None:
    if why := refusal(variant):
        raise ValueError(why)


# -- with the compiler --------------------------------------------------------------------


def build_one(variant: Variant, arch: str = "sm_120") -> KernelReport:
    """Compiles a variant and reads its resources; needs no GPU.

    Raises:
        ValueError: an illegal variant, before anything is compiled; build.BuildError.
    """
    _legal(variant)
    with build.variant(variant.constants):
        reports = build.report(arch)
    return next(r for r in reports if (r.kernel, r.dtype, r.rows) ==
                ("tree_verify", variant.dtype, variant.rows))


def backend() -> str | None:
    """What Check can run on: ``cuda``, ``emulated`` (the kernel on the CPU), or None."""
    if local_gpu():
        return "cuda"
    has = "emulated" in attention.BACKENDS and importlib.util.find_spec("mla_kernels.emulated")
    return "emulated" if has else None


def check_one(variant: Variant, cases: int = 6, seed: int = 0) -> float:
    """The worst relative error of random cases of the variant's order and dtype against the
    float64 oracle; infinite when one fails.

    Raises:
        ValueError: an illegal variant, or nothing to run it on.
    """
    _legal(variant)
    on = backend()
    if on is None:
        raise ValueError("Check needs a GPU, or the emulated backend; this machine has neither")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[variant.dtype]
    small = {} if on == "cuda" else {"max_heads": 8, "max_nodes": 16, "max_requests": 2,
                                     "max_prefix": 150}
    if on == "cuda" and variant.rows < 64:
        small = {"max_heads": variant.rows, "max_nodes": 1}
    worst, done = 0.0, 0
    with build.variant(variant.constants):
        while done < cases:
            case = check.random_case(seed, dtypes=(dtype,), **small,
                                     device="cuda" if on == "cuda" else "cpu")
            seed += 1
            if case.arguments["layout"].order != variant.order:
                continue
            errors = check.run(case, on)
            worst, done = max(worst, errors.out if errors.passed else np.inf), done + 1
    return worst


def time_one(variant: Variant, shape: Shape = SHAPE) -> float:
    """Median microseconds of a call on the local GPU, after its result was checked."""
    _legal(variant)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[variant.dtype]
    work = dataclasses.replace(make_workload(shape, dtype=dtype), layout=KVLayout(variant.order))
    plan = {"rows": variant.rows} | ({"groups": variant.splits} if variant.splits else {})
    with build.variant(variant.constants):
        call = cuda_variant(**plan)(work)
        error = error_of(work, call)
        if not error <= check.OUT_TOLERANCE:
            raise ValueError(f"the result is wrong (relative error {error:.1e}); not timed")
        return float(np.median(time_graph(work, call)))


# -- pictures and controls ----------------------------------------------------------------


def picture(variant: Variant) -> Figure:
    """Shared memory of the shipped kernel and of a variant, against the limit."""
    shipped = Variant(rows=variant.rows, dtype=variant.dtype)
    return smem_budget({"shipped": smem(shipped), "variant": smem(variant)},
                               SM120_SMEM_PER_BLOCK, title=str(variant))


def still() -> Image:
    """The picture that the lab starts with."""
    return figures.png(picture(Variant()))


def row(report: KernelReport) -> dict[str, object]:
    """A report's line of the table."""
    return {"registers": report.registers, "spills, B": report.spill_bytes,
            "shared memory, B": report.smem_bytes,
            **{k: report.sass.get(k, "–") for k in ("HMMA", "LDSM", "BAR", "LDL", "STL")},
            "says": "; ".join(report.problems) or "within the limits"}


def waiting(text: str, work: Callable[[], T]) -> T:
    """Runs something long with a line that counts its seconds."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool, tqdm(
            desc=text, bar_format="{desc}: {elapsed}", leave=False) as bar:
        future = pool.submit(work)
        while not future.done():
            concurrent.futures.wait([future], 0.5)
            bar.refresh()
        return future.result()


class KernelLab(ipywidgets.VBox):
    """Controls, the budget, three buttons, and a table of what was found. ``controls`` by name;
    ``results`` by variant."""

    def __init__(self) -> None:
        def pick(name: str, label: str, options: list) -> ipywidgets.Dropdown:
            return ipywidgets.Dropdown(options=options, value=getattr(Variant(), name),
                                       description=label, style={"description_width": "initial"},
                                       layout={"width": "230px"})

        self.controls = {
            "rows": pick("rows", "query rows", [16, 32, 64]),
            "tile": pick("tile", "tile", [16, 32, 64]),
            "stages": pick("stages", "stages", [1, 2, 3]),
            "warps": pick("warps", "warps", [4, 8, 16]),
            "padding": pick("padding", "row padding, B", [0, 16, 144]),
            "rescale": pick("rescale", "lazy rescale, 2^", [0, 4, 8]),
            "blocks": pick("blocks", "registers for blocks", [1, 2]),
            "splits": ipywidgets.IntSlider(0, 0, 132, description="splits (0: planned)",
                                           continuous_update=False,
                                           style={"description_width": "initial"}),
            "order": pick("order", "row order", ["latent_first", "rope_first"]),
            "dtype": pick("dtype", "dtype", ["bf16", "fp16"]),
        }
        self.results: dict[str, dict[str, object]] = {}
        self.said = ipywidgets.Output(layout={"min_height": "5em"})
        self.table = ipywidgets.Output(layout={"height": "560px", "overflow": "auto"})
        budget = explore(self._budget, height=3.2, **self.controls)
        self.buttons = {name: ipywidgets.Button(description=name) for name in
                        ("Build", "Check", "Time")}
        for name, act in (("Build", self._build), ("Check", self._check), ("Time", self._time)):
            self.buttons[name].on_click(lambda _, act=act: self._press(act))
        why = []
        if backend() is None:
            self.buttons["Check"].disabled = True
            why.append("Check: no GPU here and no emulated backend.")
        if not local_gpu():
            self.buttons["Time"].disabled = True
            why.append("Time: no GPU here.")
        self.note = ipywidgets.HTML(" ".join(why))
        super().__init__([budget, ipywidgets.HBox([*self.buttons.values(), self.note]),
                          self.said, self.table])

    @property
    def variant(self) -> Variant:
        return Variant(**{name: control.value for name, control in self.controls.items()})

    def _budget(self, **values: object) -> tuple[HTML, Image]:
        variant = Variant(**values)
        why = refusal(variant)
        said = f"Refused: {why}." if why else (
            f"Legal. Output and queries alone take {fragments(variant)} of {MAX_REGISTERS} "
            "registers; Build says what the compiler makes of the rest.")
        return HTML(f"<p><b>{said}</b></p>"), figures.png(picture(variant))

    def _press(self, act: Callable[[Variant], None]) -> None:
        with one_at_a_time, self.said:
            clear_output()
            try:
                _legal(self.variant)
                act(self.variant)
            except Exception as error:
                print(f"{type(error).__name__}: {error}")

    def _note(self, variant: Variant, **found: object) -> None:
        self.results.setdefault(str(variant), {}).update(found)
        # As objects, so that a missing number does not make floats of the others.
        frame = pd.DataFrame.from_dict(
            {name: {k: f"{v:,}" if isinstance(v, int) else v for k, v in row.items()}
             for name, row in self.results.items()}, orient="index").fillna("–")
        built = {n: r for n, r in self.results.items() if "registers" in r}
        show(self.table, frame, *([figures.png(figures.variants(built))] if built else []))

    def _build(self, variant: Variant) -> None:
        shipped = Variant(rows=variant.rows, dtype=variant.dtype)
        for one in dict.fromkeys([shipped, variant]):
            if "registers" not in self.results.get(str(one), {}):
                report = waiting(f"nvcc for sm_120, {one}", lambda one=one: build_one(one))
                self._note(one, **row(report))
        print(f"{variant}: {self.results[str(variant)]['says']}")
        if (gpu := local_gpu()) and gpu.arch != "sm_120":
            report = waiting(f"nvcc for {gpu.arch}", lambda: build_one(variant, gpu.arch))
            print(f"{gpu.arch}: {report.registers} registers, {report.spill_bytes} B of spills")

    def _check(self, variant: Variant) -> None:
        error = waiting(f"cases on {backend()}", lambda: check_one(variant))
        self._note(variant, **{"worst error": f"{error:.1e}", "checked on": backend()})
        print(f"{variant}: " + ("passed" if np.isfinite(error) else "WRONG")
              + f", worst relative error {error:.1e} on {backend()}")

    def _time(self, variant: Variant) -> None:
        shipped = Variant(rows=variant.rows, dtype=variant.dtype)
        for one in dict.fromkeys([shipped, variant]):
            micros = time_one(one)
            self._note(one, **{f"us, {SHAPE}": round(micros, 1)})
            print(f"{one}: {micros:.1f} us")


def lab() -> KernelLab:
    return KernelLab()
