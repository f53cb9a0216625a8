"""Each lab as a page without scripts: its picture is there, from the file and from a run."""

import base64
import importlib
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbconvert import HTMLExporter

ROOT = Path(__file__).parent.parent
NAMES = ("09_tree_lab", "10_budget_advisor", "11_kernel_lab")
STILLS = {"09_tree_lab": "tree", "10_budget_advisor": "advisor", "11_kernel_lab": "kernel"}


@pytest.mark.parametrize("name", NAMES)
def test_exported_file_shows_the_labs_first_state(name):
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    page, _ = HTMLExporter().from_notebook_node(notebook)
    soup = BeautifulSoup(page, "html.parser")
    for script in soup.find_all("script"):
        script.decompose()
    (picture,) = soup.select(".jp-OutputArea img")
    assert base64.b64decode(picture["src"].partition("base64,")[2]).startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_run_page_shows_the_lab_and_names_its_controls(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    run_workbook = importlib.import_module("run_workbook")
    path = ROOT / "notebooks" / f"{name}.ipynb"
    result = run_workbook.execute(path, timeout=120)
    assert not result.failures
    text = run_workbook.page(result, ROOT / "build", [(path, name)], "")
    soup = BeautifulSoup(text, "html.parser")
    assert not soup.find_all("script")
    assert soup.select(".jp-OutputArea img")
    assert "They work in JupyterLab" in soup.select_one(".workbook-controls").get_text()
    still = importlib.import_module(f"mla_kernels.labs.{STILLS[name]}").still()
    sources = [img["src"].partition("base64,")[2] for img in soup.select("img[src]")]
    assert still.data in [base64.b64decode(s) for s in sources]
