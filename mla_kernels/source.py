"""The kernel's source as something to read: pieces of its text, and its constants as numbers.

Nothing here knows a value of the kernel. Constants are asked of the compiler, and pieces of
text are found by the names of functions, so a notebook that shows them shows what is compiled.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from IPython.display import HTML
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from . import build

#: What the regions of shared memory are for, by the constant at which they begin.
REGIONS = {
    "kKV": "cache rows",
    "kMail": "S, P",
    "kRescale": "rescale factors",
    "kChanged": "rescale flags",
    "kBarriers": "barriers",
    "kSources": "addresses",
    "kWalk": "share",
}


# -- text ---------------------------------------------------------------------------------


def _blank(text: str) -> str:
    """``text`` with comments and literals replaced by blanks, at equal length."""
    pattern = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'"
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL)


def _close(blank: str, at: int) -> int:
    """Index of the bracket that closes the one at ``at``."""
    opening = blank[at]
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    for i in range(at, len(blank)):
        depth += (blank[i] == opening) - (blank[i] == closing)
        if depth == 0:
            return i
    raise ValueError(f"unbalanced {opening} in the source")


def _dedent(text: str) -> str:
    """``textwrap.dedent`` that does not count preprocessor lines, which begin at the margin."""
    lines = text.split("\n")
    margin = min((len(line) - len(line.lstrip()) for line in lines
                  if line.strip() and not line.startswith("#")), default=0)
    return "\n".join(line if line.startswith("#") else line[margin:] for line in lines)


def function(text: str, name: str) -> str:
    """The definition of a C++ function, with the comment above it, dedented.

    Args:
        text: a source file; name: the function's. Of several definitions, the first.

    Raises:
        ValueError: none is defined there.
    """
    blank = _blank(text)
    for found in re.finditer(rf"\b{re.escape(name)}\s*\(", blank):
        after = _close(blank, found.end() - 1) + 1
        body = re.compile(r"\s*(?:const\b)?\s*(?:noexcept\b)?\s*\{").match(blank, after)
        if not body:
            continue
        end = _close(blank, body.end() - 1) + 1
        start = max(blank.rfind(mark, 0, found.start()) for mark in ";{}") + 1
        start += len(blank[start:]) - len(blank[start:].lstrip())
        start = text.rfind("\n", 0, start) + 1
        while True:  # the comment above
            line = text.rfind("\n", 0, max(start - 1, 0)) + 1
            if line == start or not text[line:start].lstrip().startswith("//"):
                break
            start = line
        return _dedent(text[start:end])
    raise ValueError(f"no definition of {name} in this source")


def main_loop(text: str) -> str:
    """The longest loop of a function that is inside no other loop, dedented.

    Raises:
        ValueError: there is none with a body in braces.
    """
    blank = _blank(text)
    best, at = "", 0
    while found := re.compile(r"\b(?:for|while)\s*\(").search(blank, at):
        at = _close(blank, found.end() - 1) + 1
        body = re.compile(r"\s*\{").match(blank, at)
        if not body:
            continue
        at = _close(blank, body.end() - 1) + 1
        loop = text[text.rfind("\n", 0, found.start()) + 1:at]
        best = max(best, loop, key=len)
    if not best:
        raise ValueError("no loop in this function")
    return _dedent(best)


def load_inline_call() -> str:
    """The call of ``load_inline`` in build.py, as it stands there."""
    text = inspect.getsource(build)
    for node in ast.walk(ast.parse(text)):
        if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                and node.func.attr == "load_inline"):
            lines = text.splitlines()[node.lineno - 1:node.end_lineno]
            return _dedent("\n".join(lines))
    raise ValueError("build.py does not call load_inline")


def listing(text: str, language: str) -> HTML:
    """Source text for a notebook to show, with its syntax in colours.

    ``IPython.display.Code`` would do, but a page made from the notebook then sets it in a
    proportional font. Ink and paper are named, so that it can be read on a dark page too.
    """
    style = ("font-family: ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; "
             "font-size: 13px; line-height: 1.35; margin: 0; overflow-x: auto; "
             "white-space: pre; color: #1f2328; background: #f7f8fa; padding: 8px 12px")
    formatter = HtmlFormatter(noclasses=True, nobackground=True, prestyles=style)
    return HTML(highlight(text, get_lexer_by_name(language, stripnl=True), formatter))


# -- constants ----------------------------------------------------------------------------


def _config_definitions() -> dict[str, str]:
    """Names and expressions of the integer constants of ``VerifyConfig``."""
    blank = _blank(build.sources()["tree_verify.cuh"])
    start = re.search(r"\bstruct\s+VerifyConfig\s*\{", blank)
    if not start:
        raise ValueError("no struct VerifyConfig in tree_verify.cuh")
    body = blank[start.end():_close(blank, start.end() - 1)]
    found = {}
    for statement in re.findall(r"\bstatic\s+constexpr\s+(?:int|bool)\s+([^;]*);", body):
        for name, expression in re.findall(r"(\w+)\s*=\s*((?:[^,()]|\([^()]*\))+)", statement):
            found[name] = " ".join(expression.split())
    return found


def _row_definitions() -> list[str]:
    """Names of the integer constants of kv_layout.cuh, which hold for every tile shape."""
    blank = _blank(build.sources()["kv_layout.cuh"])
    return re.findall(r"^constexpr\s+int\s+(\w+)\s*=", blank, re.MULTILINE)


def constants(arch: str = "sm_120") -> dict[int, dict[str, int]]:
    """Every constant of ``VerifyConfig`` for every tile shape (its rows), and of a row in
    kv_layout.cuh, as the compiler evaluates them. Takes a second; needs no GPU.

    Raises:
        BuildError, ValueError: as :func:`build.report`.
    """
    toolkit = build.find_toolkit()
    build.check_arch(arch, toolkit)
    shared = _row_definitions()
    names = shared + list(_config_definitions())
    lines = ['#include "tree_verify.cuh"']
    for rows in build.TILE_ROWS:
        config = f"mla::VerifyConfig<__half, {rows}>"
        lines += [f"__device__ int ask_{rows}_{i} = {'mla' if name in shared else config}::{name};"
                  for i, name in enumerate(names)]
    with tempfile.TemporaryDirectory() as folder:
        probe, out = Path(folder) / "ask.cu", Path(folder) / "ask.ptx"
        probe.write_text("\n".join(lines) + "\n")
        command = [str(toolkit.nvcc), *build.NVCC_FLAGS, "-I", str(build.CSRC),
                   f"-arch=compute_{arch[3:]}", "-ptx", str(probe), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise build.BuildError(f"nvcc failed ({' '.join(command)}):\n{done.stderr[:8000]}")
        ptx = out.read_text()
    # A variable that is 0 has no initialiser.
    values = {f"ask_{rows}_{i}": int(value or 0) for rows, i, value in
              re.findall(r"\bask_(\d+)_(\d+)(?: = (-?\d+))?;", ptx)}
    return {rows: {name: values[f"ask_{rows}_{i}"] for i, name in enumerate(names)}
            for rows in build.TILE_ROWS}


def smem_parts(config: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each region of a block's shared memory, in order; they add up to
    ``kSmemBytes``.

    Args:
        config: one tile shape's :func:`constants`.

    Regions are found by following the chain of definitions back from ``kSmemBytes``: each
    begins at a constant that is defined as the one before it plus a size.
    """
    definitions = _config_definitions()
    chain = ["kSmemBytes"]
    while definitions[chain[-1]] != "0":
        before = re.match(r"k\w+", definitions[chain[-1]])
        if not before or before[0] in chain:
            raise ValueError(f"{chain[-1]} = {definitions[chain[-1]]} does not begin with the "
                             "region before it")
        chain.append(before[0])
    chain.reverse()
    return {REGIONS.get(name, name.removeprefix("k")): config[after] - config[name]
            for name, after in zip(chain, chain[1:], strict=False)}


def report_table(reports: Sequence[build.KernelReport]) -> pd.DataFrame:
    """What :func:`build.format_report` prints, as a table for a notebook."""
    rows = {_name(r): {"registers": r.registers, "spills, B": r.spill_bytes,
                     "shared memory, B": f"{r.smem_bytes:,}",
                     **{name: r.sass.get(name, "–") for name in ("HMMA", "LDSM", "UBLKCP", "BAR")},
                     "all instructions": r.sass.get("total", "–")} for r in reports}
    return pd.DataFrame.from_dict(rows, orient="index")


def _name(report: build.KernelReport) -> str:
    """Short enough for one line of a table, and kept on it."""
    split = f", {report.split} warp{'s' if report.split > 1 else ''}" if report.split else ""
    return f"{report.kernel}, {report.dtype}, {report.rows} rows{split}".replace(" ", "\u00a0")


# -- what a target accepts ----------------------------------------------------------------

_MMA = """{{ .reg .b32 a, b, c, d; .reg .f32 f;
mov.b32 a, 0; mov.b32 b, 0; mov.b32 c, 0; mov.b32 d, 0; mov.f32 f, 0f00000000;
{} {{f, f, f, f}}, {{a, b, c, d}}, {{a, b}}, {{f, f, f, f}}; }}"""

#: One PTX statement for each kind of instruction that an attention kernel could be built on.
#: ``s`` is an address in shared memory, ``g`` one in device memory.
INSTRUCTIONS = {
    "mma.sync, bf16": _MMA.format("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
    "mma.sync, fp8 (kind::f8f6f4)": _MMA.format(
        "mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32.e4m3.e4m3.f32"),
    "ldmatrix": "{ .reg .b32 a; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {a}, [s]; }",
    "cp.async": "cp.async.cg.shared.global [s], [g], 16;",
    "cp.async.bulk (TMA, rows)":
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [g], 16, [s];",
    "cp.async.bulk.tensor (TMA, tiles)":
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[s], [g, {n, n}], [s];",
    "setmaxnreg": "setmaxnreg.inc.sync.aligned.u32 232;",
    "wgmma": "wgmma.fence.sync.aligned;",
    "tcgen05": "tcgen05.fence::before_thread_sync;",
}


def accepted(archs: Sequence[str] = ("sm_90a", "sm_100a", "sm_120", "sm_120a")
             ) -> dict[str, dict[str, bool]]:
    """Whether ``ptxas`` takes each of :data:`INSTRUCTIONS` for each target. Needs no GPU.

    Raises:
        BuildError: no compiler, or it refuses even an empty kernel for a target.
    """
    toolkit = build.find_toolkit()
    ptxas = toolkit.nvcc.parent / "ptxas"
    version = _ptx_version(toolkit)
    with tempfile.TemporaryDirectory() as folder:
        def takes(arch: str, statement: str) -> bool:
            file = Path(folder) / "ask.ptx"
            file.write_text(
                f".version {version}\n.target {arch}\n.address_size 64\n"
                ".visible .entry ask() .maxntid 128 {\n.shared .align 128 .b8 buffer[1024];\n"
                ".reg .b32 s, n; .reg .b64 g;\nmov.u32 s, buffer; mov.b32 n, 0; mov.b64 g, 0;\n"
                f"{statement}\nret;\n}}\n")
            return subprocess.run([ptxas, f"-arch={arch}", file, "-o", Path(folder) / "ask.cubin"],
                                  capture_output=True).returncode == 0

        for arch in archs:
            if not takes(arch, ""):
                raise build.BuildError(f"{ptxas} does not compile for {arch}")
        return {name: {arch: takes(arch, statement) for arch in archs}
                for name, statement in INSTRUCTIONS.items()}


def _ptx_version(toolkit: build.Toolkit) -> str:
    """The PTX that this compiler writes."""
    done = subprocess.run([toolkit.nvcc, "-ptx", "-x", "cu", "-", "-o", "/dev/stdout"],
                          input="", capture_output=True, text=True)
    found = re.search(r"^\.version (\S+)", done.stdout, re.MULTILINE)
    if not found:
        raise build.BuildError(f"{toolkit.nvcc} wrote no PTX:\n{done.stderr[:2000]}")
    return found[1]
