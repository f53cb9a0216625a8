"""The notebooks as they are committed, and the runner behind `make run`.

The workbook's own notebooks are not executed here: `make run` does that, and .ci/run calls
both. Here small notebooks made on the spot show what the runner does with each kind of cell.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUNNER = ROOT / "scripts" / "run_workbook.py"


# -- the notebooks as committed -----------------------------------------------------------

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def headings(notebook: nbformat.NotebookNode) -> list[tuple[int, str]]:
    """(cell index, text) of every heading, and of every line that is bold as a whole."""
    found = []
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            for match in re.finditer(r"^(?:#+ +(.+)|\*\*([^*]+)\*\*[.:]?)\s*$", cell.source,
                                     re.MULTILINE):
                found.append((i, match[1] or match[2]))
    return found


def test_make_lab_finds_its_notebook():
    assert NOTEBOOKS and NOTEBOOKS[0].name == "00_start_here.ipynb"


@each
def test_notebook_is_valid(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    ids = [cell["id"] for cell in notebook.cells]
    assert len(set(ids)) == len(ids) and all(ids)
    # One kernel name everywhere; a name of somebody's environment opens nowhere else.
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata, "GitHub refuses stored widget state"


@each
def test_notebook_keeps_figures_and_no_other_output(path):
    for i, cell in enumerate(read(path).cells):
        for output in cell.get("outputs", ()):
            where = f"cell {i + 1} of {path.name}"
            assert output.output_type in ("display_data", "execute_result"), (
                f"{where} has a stored {output.output_type}")
            kinds = set(output.data)
            assert "image/png" in kinds and kinds <= {"image/png", "text/plain"}, (
                f"{where} stores {sorted(kinds)}")
            picture = base64.b64decode(output.data["image/png"])
            assert picture.startswith(b"\x89PNG\r\n"), where


@each
def test_notebook_has_the_frame(path):
    """Objectives, a question to predict, an exercise that checks itself: see style.md."""
    notebook = read(path)
    assert notebook.cells[0].cell_type == "markdown"
    assert re.match(r"# \S", notebook.cells[0].source), "the first line is the title"
    found = headings(notebook)

    def after(words: str) -> int:
        cells = [i for i, text in found if re.search(words, text.lower())]
        assert cells, f"no heading with “{words}” in {path.name}: {[t for _, t in found]}"
        return cells[-1]

    after("objectives|what you will learn")
    after("predict first")
    exercise = after("exercise")
    code = [c.source for c in notebook.cells[exercise:] if c.cell_type == "code"]
    assert any(re.search(r"\bassert\b|check", c) for c in code), (
        "no cell after the exercise's heading checks the answer")


@each
def test_notebook_links_lead_somewhere(path):
    for i, cell in enumerate(read(path).cells):
        if cell.cell_type != "markdown":
            continue
        prose = re.sub(r"```.*?```|`[^`]*`", "", cell.source, flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            file = target.partition("#")[0]
            if file and not re.match(r"[a-z]+:", file):
                assert (path.parent / file).exists(), f"cell {i + 1}: {target}"


@each
def test_notebook_names_nobody_s_folders(path):
    text = "\n".join(cell.source for cell in read(path).cells)
    assert not re.search(r"(?<![\w.])/(root|home|Users|work)/", text)


# -- the runner ---------------------------------------------------------------------------

FIGURE = """\
%matplotlib inline
import matplotlib.pyplot as plt
def draw(nodes=3):
    figure, axes = plt.subplots(figsize=(2, 1))
    axes.plot(range(nodes))
    plt.show()
draw()"""

WIDGET = """\
import ipywidgets
from IPython.display import display
def panel(start):
    slider = ipywidgets.IntSlider(start, 1, 9, description="nodes:", continuous_update=False)
    output = ipywidgets.interactive_output(draw, {"nodes": slider})
    display(ipywidgets.VBox([ipywidgets.HBox([slider]), output]))
    return slider"""

BARS = """\
from tqdm.auto import tqdm
for _ in tqdm(range(3), leave=False): pass
for _ in tqdm(range(3), desc="a bar that stays"): pass"""


def write(folder: Path, name: str, *cells: str | nbformat.NotebookNode) -> Path:
    """A notebook; a text that begins with # or $ is a Markdown cell."""
    nodes = [c if not isinstance(c, str) else
             new_markdown_cell(c) if c[0] in "#$" else new_code_cell(c) for c in cells]
    notebook = new_notebook(cells=nodes)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3",
                                    "language": "python"}
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUNNER), *map(str, arguments)], capture_output=True, text=True,
        stdin=subprocess.DEVNULL, env={**os.environ, **environment}, timeout=300,
    )


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """One run in which all is well, of two notebooks that use what notebooks use."""
    source = tmp_path_factory.mktemp("notebooks")
    out = tmp_path_factory.mktemp("build") / "workbook"
    # A kernel named python3 that leads nowhere, found before the environment's own.
    elsewhere = tmp_path_factory.mktemp("jupyter")
    kernel = elsewhere / "kernels" / "python3"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(json.dumps(
        {"argv": ["/bin/false"], "display_name": "a trap", "language": "python"}))

    folded = new_code_cell("print('from a folded cell')")
    folded.metadata["jupyter"] = {"source_hidden": True}
    allowed = new_code_cell("import sys; print('ptxas info: 0 spills', file=sys.stderr)")
    allowed.metadata["tags"] = ["allow-stderr"]
    stale = new_code_cell("1 + 1")
    stale.outputs = [nbformat.v4.new_output("stream", name="stdout", text="of another day")]
    write(source, "01_second", "# Second", "print('two')")
    write(
        source, "00_first",
        "# First: $q^\\top k$\n\n## Objectives\n\n*Not this list:*\n\nnor <this> `$one`.",
        "$$\\mathrm{softmax}\\Big(\\frac{QK^\\top}{\\sqrt{d}}\\Big)V$$",
        "# More\n\nSee [the next](01_second.ipynb#More) and [data](data.txt) and "
        "[a paper](https://arxiv.org/abs/2405.04434).",
        "import os, sys; print('python', sys.executable); print('in', os.getcwd())",
        "print(open('data.txt').read())", FIGURE, WIDGET,
        "moved = panel(4)", "same = panel(3)", "moved.value = 7", BARS, folded, allowed, stale,
        "import pandas; pandas.DataFrame({'column': [1, 2]})",
    )
    (source / "data.txt").write_text("read from its own folder")
    before = snapshot(source)
    done = run(*sorted(source.glob("*.ipynb")), "--out", out, JUPYTER_PATH=str(elsewhere))
    return {"done": done, "source": source, "out": out, "before": before}


def page_of(result: dict, name: str) -> BeautifulSoup:
    return BeautifulSoup((result["out"] / f"{name}.html").read_text(), "html.parser")


def test_a_good_run_ends_well(good):
    assert good["done"].returncode == 0, good["done"].stderr
    assert "00_first: ran, 12 cells" in good["done"].stdout
    assert sorted(p.name for p in good["out"].iterdir()) == [
        "00_first.html", "01_second.html", "index.html"]


def test_sources_are_only_read(good):
    assert snapshot(good["source"]) == good["before"]
    assert [p.name for p in good["source"].iterdir() if p.is_dir()] == []


def test_the_kernel_is_this_python_in_the_notebook_s_folder(good):
    text = page_of(good, "00_first").get_text()
    assert f"python {sys.executable}" in text
    assert f"in {good['source']}" in text and "read from its own folder" in text


def test_pages_load_nothing(good):
    """Opened offline, with scripts disabled, a page must show the same."""
    for file in good["out"].glob("*.html"):
        soup = BeautifulSoup(file.read_text(), "html.parser")
        assert not soup.find_all(["script", "iframe", "link", "object", "embed"])
        for tag in soup.find_all(src=True):
            assert tag["src"].startswith("data:"), (file.name, tag["src"][:80])
        for style in soup.find_all("style"):
            assert not re.search(r"@import|url\((?!['\"]?data:)", style.get_text())


def test_pages_show_no_error_output(good):
    for name in ("00_first", "01_second"):
        soup = page_of(good, name)
        assert not soup.select('[data-mime-type="application/vnd.jupyter.stderr"]')
        assert not soup.select(".workbook-failed")
    assert "ptxas info: 0 spills" in page_of(good, "00_first").get_text()  # it was allowed


def test_widgets_become_what_they_showed(good):
    """Three different figures drawn by four calls: the static one; the first panel's, as the
    moved slider left it; and nothing from the second panel, which shows the static one."""
    soup = page_of(good, "00_first")
    pictures = [img["src"] for img in soup.find_all("img")]
    assert len(pictures) == len(set(pictures)) == 2
    assert all(p.startswith("data:image/png;base64,") for p in pictures)
    notes = [p.get_text() for p in soup.select("p.workbook-controls")]
    assert len(notes) == 2 and all(n.startswith("Controls: nodes.") for n in notes)
    text = soup.get_text()
    assert "VBox(children" not in text and "model not found" not in text.lower()
    assert "widget-view" not in str(soup)
    cell = soup.find(string=re.compile("moved = panel|moved")).find_parent(class_="jp-CodeCell")
    assert len(cell.find_all("img")) == 1
    # Progress bars are done with when the cell is.
    assert "100%" not in text and "3/3" not in text


def test_pages_read_well(good):
    soup = page_of(good, "00_first")
    assert soup.title.get_text() == "First: q⊤k"
    assert len(soup.find_all("math")) == 2 and not re.search(r"\\frac|\$\$", soup.get_text())
    assert all("Figure in the section “More”" == img["alt"] for img in soup.find_all("img"))
    links = {a.get_text(): a["href"] for a in soup.find_all("a")}
    assert links["the next"] == "01_second.html#More"
    assert links["a paper"] == "https://arxiv.org/abs/2405.04434"
    data = (good["out"] / links["data"]).resolve()
    assert data == good["source"] / "data.txt"
    assert links["Second →"] == "01_second.html" and links["All notebooks"] == "index.html"
    fold = soup.select_one("details.workbook-fold")
    assert "from a folded cell" in fold.get_text() and fold.find("summary")
    text = soup.get_text()
    assert "of another day" not in text and "column" in text
    assert re.search(r"Executed \d{4}-\d\d-\d\d \d\d:\d\d", text)


def test_the_index(good):
    soup = page_of(good, "index")
    cards = soup.select("ol a")
    assert [c["href"] for c in cards] == ["00_first.html", "01_second.html"]
    assert [c.select_one(".number").get_text() for c in cards] == ["00", "01"]
    assert cards[0].select_one(".about").get_text() == "Not this list:"
    assert all(c.select_one(".good").get_text() == "ran" for c in cards)
    facts = {dt.get_text(): dt.find_next("dd").get_text() for dt in soup.find_all("dt")}
    import torch

    if torch.cuda.is_available():
        assert torch.cuda.get_device_name(0) in facts["GPU"]
    else:
        assert facts["GPU"] == "no GPU: recorded numbers and sm_120 compilation only"
    assert f"torch {torch.__version__.split('+')[0]}" in facts["Packages"]
    assert facts["CUDA of torch"].startswith(torch.version.cuda or "none")
    assert facts["Python"] == ".".join(map(str, sys.version_info[:3])) and facts["Date"]


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """One run in which each notebook fails in its own way, but one."""
    source = tmp_path_factory.mktemp("notebooks")
    out = tmp_path_factory.mktemp("build")
    (out / "raises.html").write_text("the page of an older, better run")
    write(source, "raises", "# Raises", "x = 1", "# A heading", "# why not\nraise ValueError('no "
          "such order')".replace("# why", "y = 2  # why"), "print('never', 'reached')")
    tagged = new_code_cell("1 / 0")
    tagged.metadata["tags"] = ["raises-exception"]
    write(source, "tagged", "# Tagged", tagged)
    write(source, "warns", "# Warns", "import warnings\nwarnings.warn('it is deprecated')",
          "print('after', 'the warning')")
    write(source, "widget", "# Widget", "import ipywidgets\nfrom IPython.display import display",
          "slider = ipywidgets.IntSlider(1)\ndef show(n):\n    if n > 1:\n        raise "
          "RuntimeError('in a callback')\n    print('n', n)\n"
          "display(slider, ipywidgets.interactive_output(show, {'n': slider}))",
          "slider.value = 2")
    write(source, "dies", "# Dies", "import os; os._exit(1)")
    write(source, "hangs", "# Hangs", "import time; time.sleep(100)")
    write(source, "well", "# Well", "print('all is well')")
    done = run(*sorted(source.glob("*.ipynb")), "--out", out, "--timeout", 10)
    return {"done": done, "source": source, "out": out}


def test_a_failing_cell_fails_the_run(bad):
    assert bad["done"].returncode == 1
    assert "well: ran" in bad["done"].stdout and "raises: FAILED" in bad["done"].stdout
    assert len(re.findall("^FAILED ", bad["done"].stderr, re.MULTILINE)) == 6


@pytest.mark.parametrize(("name", "message", "source"), [
    ("raises", r"cell 4 \(In \[2\]\): ValueError: no such order", "y = 2  # why not"),
    ("tagged", r"cell 2 \(In \[1\]\): ZeroDivisionError: division by zero", "1 / 0"),
    ("warns", r"cell 2 \(In \[1\]\): wrote to stderr: .*UserWarning: it is deprecated",
     "import warnings"),
    ("widget", r"cell 4 \(In \[3\]\): in a widget: RuntimeError: in a callback",
     "slider.value = 2"),
    ("dies", r"cell 2 .*the kernel died .*", "import os; os._exit(1)"),
    ("hangs", r"cell 2 .*took longer than 10 s and was stopped", "import time; time.sleep(100)"),
])
def test_failures_are_named(name, message, source, bad):
    stderr = bad["done"].stderr
    assert re.search(rf"^FAILED \S*{name}\.ipynb, {message}\n    {re.escape(source)}$", stderr,
                     re.MULTILINE), stderr
    banner = page_of(bad, name).select_one(".workbook-failed")
    assert re.search(message, banner.get_text())
    card = next(a for a in page_of(bad, "index").select("ol a") if a["href"] == f"{name}.html")
    assert card.select_one(".bad") and re.search(message, card.get_text())


def test_pages_of_a_failed_run_show_what_happened(bad):
    text = page_of(bad, "raises").get_text()
    assert "ValueError" in text and "older, better run" not in text
    assert "never reached" not in text  # the run stops at the first cell that raises
    assert "after the warning" in page_of(bad, "warns").get_text()
    assert "RuntimeError: in a callback" in page_of(bad, "widget").get_text()
    assert page_of(bad, "well").select_one(".workbook-failed") is None


def test_a_moving_widget_does_not_stall_the_run(tmp_path):
    """nbclient by itself misses the reply of about one such cell in thirty and stands still
    until the cell's time is up; the runner looks again (see its Channel)."""
    path = write(
        tmp_path, "moves", "import ipywidgets\nfrom IPython.display import display\n"
        "slider = ipywidgets.IntSlider(0, 0, 1000)\n"
        "def show(n):\n    print(n)\n"
        "display(*[ipywidgets.interactive_output(show, {'n': slider}) for _ in range(3)])",
        *["slider.value += 1"] * 150)
    done = run(path, "--out", tmp_path / "out", "--timeout", 60)
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"moves: ran, 151 cells in (\d+) s", done.stdout)[1]) < 60


def test_refused_arguments(tmp_path):
    done = run(tmp_path / "absent.ipynb", "--out", tmp_path / "out")
    assert done.returncode == 2 and "not a file: " in done.stderr
    path = write(tmp_path, "one", "# One", "1")
    done = run(path, "--out", tmp_path)
    assert done.returncode == 2 and "another folder than the notebooks'" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["one.ipynb"]


def test_html_around_markdown_stays_whole(monkeypatch):
    monkeypatch.syspath_prepend(RUNNER.parent)
    run_workbook = importlib.import_module("run_workbook")
    page = run_workbook.render_markdown(
        "<details><summary>Hint</summary>\n\nFolded *text*, 2<sup>5</sup>.\n</details>",
        embed_images=True, path=".")
    assert "<sup>5</sup>" in page
    begin, end = page.index("<details>"), page.index("</details>")
    assert begin < page.index("<em>text</em>") < end
