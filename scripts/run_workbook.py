"""Executes the notebooks and writes each as a page, with an index: `make run`.

    python scripts/run_workbook.py                         all of notebooks/
    python scripts/run_workbook.py notebooks/02*.ipynb     some

A notebook fails when a cell raises, when anything is written to stderr (which is where
warnings go), when a widget's callback raises into its Output, or when a cell runs past
--timeout. A cell whose stderr is expected, such as one that calls a compiler, carries the tag
`allow-stderr`. The exit status is then 1, and the pages are written all the same, so that one
can look at what happened.

The sources are only read: what a run produced stands in the pages. Those hold no script and
load nothing from elsewhere, so they show the same on a laptop without a network, and a widget
is shown as the figure that it held and the names of its controls.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import html
import json
import math
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from bs4 import BeautifulSoup
from jinja2 import pass_context
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from latex2mathml.converter import convert as latex_to_mathml
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from nbformat.v4 import new_output
from tqdm import tqdm
from traitlets import Type

ROOT = Path(__file__).resolve().parent.parent
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
ALLOW_STDERR = "allow-stderr"

#: Packages named on the index, because a result or a failure may hang on them.
PACKAGES = ("torch", "triton", "cuda-toolkit", "nvidia-cuda-nvcc", "numpy", "pandas",
            "matplotlib", "ipywidgets", "jupyterlab", "ipykernel", "nbclient", "nbconvert")


# -- executing ----------------------------------------------------------------------------


@dataclasses.dataclass
class Failure:
    """What went wrong in which cell: `index` counts all cells from 1, `number` is In [n]."""

    index: int
    number: int
    source: str
    error: str

    def __str__(self) -> str:
        return f"cell {self.index} (In [{self.number}]): {self.error}"


@dataclasses.dataclass
class Result:
    """One notebook after its run."""

    path: Path
    notebook: NotebookNode
    failures: list[Failure]
    seconds: float

    @property
    def summary(self) -> str:
        cells = sum(1 for _ in code_cells(self.notebook))
        return f"{cells} cell{'' if cells == 1 else 's'} in {self.seconds:.0f} s"


class Channel(AsyncZMQSocketChannel):
    """A channel that looks again twice a second instead of sleeping until it is woken.

    zmq wakes a sleeper once for each change of a socket, and sending takes note of changes
    too. nbclient's stand-in for the Output widget sends on the socket on which the reply to
    the cell is awaited; when it does so just as the reply comes in, nobody is woken, and the
    run stands still for as long as a cell may take.
    """

    async def get_msg(self, timeout: float | None = None) -> dict[str, Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = math.inf if deadline is None else deadline - time.monotonic()
            try:
                return await super().get_msg(max(0.0, min(0.5, left)))
            except queue.Empty:
                if left <= 0.5:
                    raise


class KernelClient(AsyncKernelClient):
    shell_channel_class = Type(Channel)
    iopub_channel_class = Type(Channel)


class Client(NotebookClient):
    """A client whose kernel is always the Python that runs this script, whatever kernels named
    python3 the machine has installed elsewhere."""

    sockets: Path

    def create_kernel_manager(self) -> AsyncKernelManager:
        # Without folders to search, the manager falls back to ipykernel's own description of
        # a kernel, which names sys.executable.
        specs = KernelSpecManager(kernel_dirs=[])
        # Sockets in a folder of one's own and not TCP ports, which other users of the machine
        # can reach (and which ipykernel 7 warns about). The path must be short.
        self.km = AsyncKernelManager(
            kernel_name="python3", kernel_spec_manager=specs, transport="ipc",
            client_factory=KernelClient, connection_file=str(self.sockets / "k.json"),
        )
        return self.km


def code_cells(notebook: NotebookNode) -> Iterator[NotebookNode]:
    return (c for c in notebook.cells if c.cell_type == "code" and c.source.strip())


def one_line(text: str, limit: int = 300) -> str:
    """The first line of `text` that says something, without terminal colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= limit else line[:limit] + " …"


def output_problem(output: dict[str, Any], tags: Sequence[str]) -> str | None:
    """Why an output means failure, or None."""
    if output["output_type"] == "error":
        return one_line(f"{output['ename']}: {output['evalue']}")
    if (output["output_type"] == "stream" and output["name"] == "stderr"
            and output["text"].strip() and ALLOW_STDERR not in tags):
        return f"wrote to stderr: {one_line(output['text'])}"
    return None


def execute(
    path: Path, *, timeout: float, progress: Callable[[], None] = lambda: None
) -> Result:
    """Runs a notebook from top to bottom in a kernel of its own, started in its folder.

    Args:
        timeout: seconds that one cell may take.
        progress: called after each code cell.

    Returns:
        The result; its notebook, with the outputs of this run and no others, is in memory
        only. The run stops at the first cell that raises.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata.pop("widgets", None)
    failures: list[Failure] = []
    reported: set[str] = set()  # widgets whose trouble has been said
    begun: list[tuple[int, NotebookNode]] = []

    def fail(index: int, cell: NotebookNode, error: str) -> None:
        # Counted here: a kernel that dies may not have told the cell's number yet.
        number = [i for i, _ in begun].index(index) + 1
        failures.append(Failure(index + 1, number, one_line(cell.source), error))

    def begin(cell: NotebookNode, cell_index: int) -> None:
        begun.append((cell_index, cell))

    def finish(cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        tags = cell.metadata.get("tags", [])
        for output in cell.outputs:
            if problem := output_problem(output, tags):
                fail(cell_index, cell, problem)
        # A callback's exception goes to the widget's Output and raises nowhere.
        for model, state in client.widget_state.items():
            for output in state.get("outputs", ()):
                problem = output_problem(output, tags)
                if problem and model not in reported:
                    reported.add(model)
                    fail(cell_index, cell, f"in a widget: {problem}")
        progress()

    client = Client(
        notebook, timeout=timeout, startup_timeout=180, force_raise_errors=True,
        coalesce_streams=True, resources={"metadata": {"path": str(path.parent)}},
        # `store_widget_state` stays on: without it nbclient's stand-in for the Output widget,
        # which interactive_output needs, fails with a KeyError.
        store_widget_state=True, on_cell_execute=begin, on_cell_executed=finish,
    )
    # The debugger's complaint about frozen modules would be the first line of each kernel.
    environment = {**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="mla-") as sockets:
            client.sockets = Path(sockets)
            client.execute(env=environment)
    except CellExecutionError as error:
        if not failures:  # normally `finish` has seen the error's output already
            fail(*begun[-1], one_line(f"{error.ename}: {error.evalue}"))
    except CellTimeoutError:
        fail(*begun[-1], f"took longer than {timeout:g} s and was stopped")
    except (DeadKernelError, AssertionError) as error:
        # On Ctrl-C nbclient ends the kernel under its own feet and stumbles over that.
        if getattr(client, "_async_cleanup_kernel_future", None):
            raise KeyboardInterrupt from None
        if isinstance(error, AssertionError):
            raise
        fail(*begun[-1], "the kernel died (killed for memory, or a crash in native code)")
    seconds = time.monotonic() - began
    freeze_widgets(notebook, client.widget_state)
    return Result(path, notebook, failures, seconds)


# -- widgets ------------------------------------------------------------------------------

#: Widgets that hold or show others and that nobody moves.
PASSIVE = re.compile(r"(Box|HTML|HTMLMath|Label|Output|Progress|Image|Accordion|Tab|Stack)Model$")


def freeze_widgets(notebook: NotebookNode, state: dict[str, dict[str, Any]]) -> None:
    """Puts in place of each widget what it showed: its Output's contents and the names of its
    controls. A page has no kernel behind it, and the scripts that draw widgets there come
    from a server; without them a widget is an empty spot or "model not found".

    A figure that the notebook has shown already (the static one above the controls, in the
    same bytes) is not shown again.
    """
    shown: set[str] = set()

    def fresh(output: dict[str, Any]) -> bool:
        picture = output.get("data", {}).get("image/png")
        if picture is None:
            return True
        known = picture in shown
        shown.add(picture)
        return not known

    def children(model: str) -> list[str]:
        return [c.removeprefix("IPY_MODEL_") for c in state.get(model, {}).get("children", ())]

    def kind(model: str) -> str:
        return state.get(model, {}).get("_model_name", "")

    def walk(model: str, controls: list[str], outputs: list[NotebookNode]) -> None:
        fields = state.get(model, {})
        if kind(model) == "OutputModel":
            outputs.extend(o for o in map(NotebookNode, fields.get("outputs", ())) if fresh(o))
        elif kind(model) in ("HTMLModel", "HTMLMathModel", "LabelModel"):
            if text := fields.get("value", "").strip():
                text = html.escape(text) if kind(model) == "LabelModel" else text
                outputs.append(new_output("display_data", {"text/html": f"<p>{text}</p>"}))
        elif not PASSIVE.search(kind(model)):
            name = fields.get("description") or kind(model).removesuffix("Model")
            controls.append(name.strip().rstrip(":"))
        parts = children(model)
        if any(kind(part).endswith("ProgressModel") for part in parts):
            # A progress bar and the words beside it: done with when the cell is.
            parts = [p for p in parts if not PASSIVE.search(kind(p)) or kind(p) == "OutputModel"]
        for part in parts:
            walk(part, controls, outputs)

    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        kept: list[NotebookNode] = []
        for output in cell.outputs:
            view = output.get("data", {}).get(WIDGET_VIEW)
            if view is None:
                fresh(output)
                kept.append(output)
                continue
            controls: list[str] = []
            inside: list[NotebookNode] = []
            walk(view["model_id"], controls, inside)
            if controls:
                text = ", ".join(dict.fromkeys(filter(None, controls)))
                note = (f'<p class="workbook-controls">Controls: {html.escape(text)}. '
                        "They work in JupyterLab: <code>make lab</code>.</p>")
                kept.append(new_output("display_data", {"text/html": note}))
            kept.extend(inside)
        cell.outputs = kept
    notebook.metadata.pop("widgets", None)


# -- pages --------------------------------------------------------------------------------


class Renderer(IPythonRenderer):
    """Markdown whose formulas become MathML, which browsers draw by themselves."""

    def _math(self, body: str, display: str) -> str:
        try:
            return latex_to_mathml(body.strip(), display=display)
        except Exception as error:  # it raises many kinds; the source is better than no page
            print(f"run_workbook: no MathML for {body.strip()!r}: {error}", file=sys.stderr)
            return f"<code>{html.escape(body)}</code>"

    def inline_math(self, body: str) -> str:
        return self._math(body, "inline")

    def block_math(self, body: str) -> str:
        return f'<div class="workbook-math">{self._math(body, "block")}</div>\n'

    def heading(self, text: str, level: int, **attrs: Any) -> str:
        # nbconvert's own re-parses the heading to add a link and loses MathML on the way. The
        # id is the one that Jupyter makes, so that links within a notebook hold.
        id_ = BeautifulSoup(text, "html.parser").get_text().replace(" ", "-")
        return f'<h{level} id="{html.escape(id_)}">{text}</h{level}>\n'

    def latex_environment(self, name: str, body: str) -> str:
        return self.block_math(f"\\begin{{{name}}}{body}\\end{{{name}}}")

    def _html_embed_images(self, html: str) -> str:
        # Markdown hands over a tag at a time, and nbconvert's own completes each: <details>
        # and <sup> would be closed before what they hold.
        return super()._html_embed_images(html) if "<img" in html else html


def render_markdown(source: str, **options: Any) -> str:
    return MarkdownWithMath(renderer=Renderer(escape=False, **options)).render(source)


class PageExporter(HTMLExporter):
    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        return render_markdown(
            source, attachments=context.get("cell", {}).get("attachments", {}),
            embed_images=True, path=context["resources"]["metadata"]["path"],
        )


PAGE_STYLE = """
main { max-width: 1060px; margin: 0 auto; padding: 0 20px 40px; }
.workbook-nav { display: flex; gap: 20px; padding: 14px 0; font: 14px system-ui, sans-serif; }
.workbook-nav a { color: #1f5fbf; text-decoration: none; }
.workbook-nav a:hover { text-decoration: underline; }
.workbook-nav .end { margin-left: auto; text-align: right; }
.workbook-failed { background: #fdecea; border-left: 4px solid #c62828; padding: 10px 14px;
  font: 14px system-ui, sans-serif; }
.workbook-math { margin: 0.6em 0; padding: 4px 0; overflow: auto hidden; }
.workbook-run { border-top: 1px solid #ddd; margin-top: 28px; padding-top: 10px;
  color: #555; font: 13px system-ui, sans-serif; }
p.workbook-controls { color: #555; font-style: italic; padding-left: 6px; }
details.workbook-fold > summary { cursor: pointer; color: #555; padding: 4px 0;
  font: 13px system-ui, sans-serif; }
"""


def title_of(notebook: NotebookNode, default: str) -> str:
    """The first level-one heading, as Markdown."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            if match := re.search(r"^# +(.+?)#*\s*$", cell.source, re.MULTILINE):
                return match[1].strip()
    return default


def inline(markdown: str) -> str:
    """One line of Markdown as HTML without a paragraph around it."""
    return render_markdown(markdown).strip().removeprefix("<p>").removesuffix("</p>")


def plain(markdown: str) -> str:
    """One line of Markdown as text without marks."""
    return BeautifulSoup(inline(markdown), "html.parser").get_text()


def first_paragraph(notebook: NotebookNode) -> str:
    """The first paragraph of plain prose, as HTML: what the notebook is about."""
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        soup = BeautifulSoup(render_markdown(cell.source), "html.parser")
        for paragraph in soup.find_all("p", recursive=False):
            if paragraph.get_text().strip():
                for link in paragraph.find_all("a"):  # a card is one link already
                    link.unwrap()
                return paragraph.decode_contents()
    return ""


def page(
    result: Result, out: Path, pages: Sequence[tuple[Path, str]], stamp: str
) -> str:
    """A notebook as one HTML file without scripts.

    Args:
        out: folder that the page will lie in.
        pages: every notebook of this run, in order, with its title.
        stamp: what ran this, where and when; stands at the end.
    """
    notebook, name = result.notebook, result.path.stem
    for cell in code_cells(notebook):
        for output in cell.outputs:
            # Declared harmless: shown, but not in an error's colours.
            if output.output_type == "stream" and ALLOW_STDERR in cell.metadata.get("tags", []):
                output.name = "stdout"
    exporter = PageExporter(theme="light")
    exporter.log.setLevel("ERROR")  # it warns about missing alternative texts; see below
    resources = {"metadata": {"name": name, "path": str(result.path.parent)}}
    body, _ = exporter.from_notebook_node(notebook, resources=resources)
    soup = BeautifulSoup(body, "html.parser")
    for script in soup.find_all("script"):
        script.decompose()
    soup.title.string = plain(title_of(notebook, name))
    style = soup.new_tag("style")
    style.string = PAGE_STYLE
    soup.head.append(style)

    # Links to other notebooks lead to their pages, and those to files of the repository to
    # the files, seen from where the page lies.
    names = {path.resolve(): path.stem for path, _ in pages}
    for tag, key in [(t, "href") for t in soup.find_all("a", href=True)] + [
        (t, "src") for t in soup.find_all("img", src=True)
    ]:
        target, hash_, fragment = tag[key].partition("#")
        if not target or re.match(r"[a-z][a-z0-9+.-]*:|/", target, re.IGNORECASE):
            continue
        file = (result.path.parent / target).resolve()
        if file in names:
            tag[key] = f"{names[file]}.html{hash_}{fragment}"
        else:
            tag[key] = Path(os.path.relpath(file, out)).as_posix() + hash_ + fragment

    heading = soup.title.string
    for tag in soup.select("h1, h2, h3, h4, img"):
        if tag.name != "img":
            heading = tag.get_text().strip()
        elif not tag.get("alt") or tag["alt"].startswith("No description"):
            tag["alt"] = f"Figure in the section “{heading}”"

    # Cells that JupyterLab shows folded are folded here too.
    for cell in notebook.cells:
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            block = soup.find(id=f"cell-id={cell.get('id')}")
            wrapper = block and block.select_one(".jp-Cell-inputWrapper")
            if wrapper:
                details = soup.new_tag("details", attrs={"class": "workbook-fold"})
                wrapper.wrap(details)
                summary = soup.new_tag("summary")
                summary.string = "Show the code"
                details.insert(0, summary)

    at = next(i for i, (path, _) in enumerate(pages) if path == result.path)
    links = ['<a href="index.html">All notebooks</a>']
    if at > 0:
        path, title = pages[at - 1]
        links.append(f'<a href="{path.stem}.html">← {inline(title)}</a>')
    if at + 1 < len(pages):
        path, title = pages[at + 1]
        links.append(f'<a class="end" href="{path.stem}.html">{inline(title)} →</a>')
    nav = f'<nav class="workbook-nav">{"".join(links)}</nav>'
    failed = "".join(f"<p>{html.escape(str(f))}</p>" for f in result.failures)
    top = nav + (f'<div class="workbook-failed"><b>This run failed.</b>{failed}</div>'
                 if failed else "")
    bottom = f'<p class="workbook-run">{html.escape(stamp)}</p>{nav}'
    soup.main.insert(0, BeautifulSoup(top, "html.parser"))
    soup.main.append(BeautifulSoup(bottom, "html.parser"))
    return str(soup)


INDEX_STYLE = """
:root { --ink: #1d2430; --soft: #5a6473; --line: #dfe3ea; --paper: #fff; --back: #f5f6f8;
  --link: #1f5fbf; --good: #1c7c46; --bad: #c62828; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #343b48;
  --paper: #1d222b; --back: #14181f; --link: #7fb0ff; --good: #6cce97; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 860px; margin: 0 auto; padding: 48px 20px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 40px 0 12px; }
.lead { color: var(--soft); margin: 0 0 28px; }
ol { list-style: none; margin: 0; padding: 0; display: grid; gap: 12px; }
li a { display: grid; grid-template-columns: 44px 1fr; gap: 4px 12px; padding: 16px 18px;
  background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  color: inherit; text-decoration: none; }
li a:hover, li a:focus-visible { border-color: var(--link); }
.number { font: 600 20px/1.4 ui-monospace, Menlo, Consolas, monospace; color: var(--soft); }
.title { font-weight: 600; font-size: 18px; color: var(--link); }
.about, .state { grid-column: 2; margin: 0; }
.about { overflow-wrap: anywhere; }
.state { color: var(--soft); font-size: 14px; }
.good { color: var(--good); } .bad { color: var(--bad); }
code { font: 0.92em ui-monospace, Menlo, Consolas, monospace; }
dl { display: grid; grid-template-columns: minmax(110px, max-content) 1fr; gap: 6px 20px;
  margin: 0; padding: 16px 18px; background: var(--paper); border: 1px solid var(--line);
  border-radius: 10px; font-size: 15px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
footer { margin-top: 28px; color: var(--soft); font-size: 14px; }
"""


def index(results: Sequence[Result], facts: dict[str, str]) -> str:
    """The page that lists the others, with what ran them."""
    items = []
    for result in results:
        name = result.path.stem
        number, _, rest = name.partition("_")
        number, rest = (number, rest) if number.isdigit() else ("", name)
        state = f'<span class="good">ran</span> · {result.summary}'
        if result.failures:
            state = f'<span class="bad">failed</span> · {html.escape(str(result.failures[0]))}'
        title = title_of(result.notebook, rest.replace("_", " "))
        if number:  # it stands beside the title already
            title = re.sub(rf"^{number}\W+", "", title)
        items.append(
            f'<li><a href="{name}.html"><span class="number">{number}</span>'
            f'<span class="title">{inline(title)}</span>'
            f'<p class="about">{first_paragraph(result.notebook)}</p>'
            f'<p class="state">{state}</p></a></li>'
        )
    rows = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>"
                   for k, v in facts.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>MLA kernels: a workbook</title>
<style>{INDEX_STYLE}</style>
</head>
<body>
<main>
<h1>MLA kernels: a workbook</h1>
<p class="lead">Which 512 of a 576-wide cache row is the value, and a draft-tree verify kernel
for sm_120.</p>
<ol>
{chr(10).join(items)}
</ol>
<h2>What ran it</h2>
<dl>{rows}</dl>
<footer>These pages are a record of one run. To change a number and see what follows, open the
notebooks themselves: <code>make lab</code>.</footer>
</main>
</body>
</html>
"""


# -- the machine --------------------------------------------------------------------------

#: Runs in a process of its own, so that the runner does not hold torch in memory beside each
#: kernel. It also builds matplotlib's font cache: on a fresh machine that takes seconds, and
#: matplotlib says so on stderr of whichever notebook imports it first.
PROBE = """
import json, torch, matplotlib.font_manager
gpus = []
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    gpus.append(f"{p.name} (sm_{p.major}{p.minor}, {p.multi_processor_count} SMs, "
                f"{p.total_memory / 2**30:.0f} GiB)")
print(json.dumps({"gpus": gpus, "cuda": torch.version.cuda}))
"""


def machine_facts(now: datetime.datetime) -> dict[str, str]:
    """What a reader must know to trust or repeat a number, as label and text."""
    from importlib import metadata

    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if done.returncode:
        sys.exit("run_workbook: torch or matplotlib cannot be imported:\n" + done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    gpu = "; ".join(found["gpus"]) or (
        "no GPU: recorded numbers and sm_120 compilation only"
    )
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue  # not installed on this platform
    facts = {
        "Date": now.strftime("%Y-%m-%d %H:%M %Z"),
        "GPU": gpu,
        "CUDA of torch": found["cuda"] or "none (a CPU build of torch)",
        "Machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "Python": platform.python_version(),
        "Packages": ", ".join(versions),
    }
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], check=True,
                                capture_output=True, text=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"],
                                 check=True, capture_output=True, text=True).stdout.strip()
        facts["Commit"] = commit + (" with changes that are not committed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        pass  # a download without history
    return facts


# -- the command --------------------------------------------------------------------------


def shown_path(path: Path) -> str:
    """A path as one would type it here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Executes notebooks and writes each as an HTML page, with an index."
    )
    parser.add_argument("notebooks", nargs="*", type=Path,
                        help="notebooks to run (default: all of notebooks/)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "workbook",
                        help="folder for the pages (default: build/workbook)")
    parser.add_argument("--timeout", type=float, default=600,
                        help="seconds that one cell may take (default: %(default)s)")
    args = parser.parse_args(argv)

    paths = [p.resolve() for p in args.notebooks or sorted((ROOT / "notebooks").glob("*.ipynb"))]
    if not paths:
        parser.error("no notebooks in notebooks/")
    if missing := [p for p in paths if not p.is_file()]:
        parser.error(f"not a file: {', '.join(map(shown_path, missing))}")
    out = args.out.resolve()
    if any(out == path.parent for path in paths):
        parser.error("--out must be another folder than the notebooks'")
    out.mkdir(parents=True, exist_ok=True)
    for name in ["index", *(p.stem for p in paths)]:  # an old page must not pass for a new one
        (out / f"{name}.html").unlink(missing_ok=True)

    now = datetime.datetime.now().astimezone()
    facts = machine_facts(now)
    total = sum(1 for p in paths for _ in code_cells(nbformat.read(p, as_version=4)))
    results: list[Result] = []
    terminal = sys.stderr.isatty()
    width = min(100, shutil.get_terminal_size().columns)
    with tqdm(total=total, unit="cell", disable=not terminal, ncols=width) as bar:
        for path in paths:
            bar.set_description(path.stem)
            if not terminal:
                print(f"{path.stem} …", flush=True)
            result = execute(path, timeout=args.timeout, progress=bar.update)
            results.append(result)
            state = "FAILED" if result.failures else "ran"
            bar.write(f"{path.stem}: {state}, {result.summary}", file=sys.stdout)

    pages = [(r.path, title_of(r.notebook, r.path.stem)) for r in results]
    stamp = f"Executed {facts['Date']} with Python {facts['Python']}, on: {facts['GPU']}."
    for result in results:
        text = page(result, out, pages, stamp)
        (out / f"{result.path.stem}.html").write_text(text, encoding="utf-8")
    (out / "index.html").write_text(index(results, facts), encoding="utf-8")
    print(f"{len(results)} pages and an index in {shown_path(out / 'index.html')}")

    sys.stdout.flush()
    for result in results:
        for failure in result.failures:
            print(f"FAILED {shown_path(result.path)}, {failure}\n    {failure.source}",
                  file=sys.stderr)
    return 1 if any(r.failures for r in results) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("run_workbook: interrupted", file=sys.stderr)
        sys.exit(130)
