"""Executes notebooks and stores the pictures of cells tagged ``keep_output`` in them, so that
GitHub shows them; every other output is removed. Usage: refresh_notebooks.py [NOTEBOOK ...]"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from run_workbook import code_cells, execute

FOLDER = Path(__file__).parent.parent / "notebooks"


def refresh(path: Path) -> None:
    result = execute(path, timeout=600)
    if result.failures:
        raise SystemExit("\n".join(map(str, result.failures)))
    pictures = {
        cell.id: [nbformat.v4.new_output(
            "display_data", {"image/png": output["data"]["image/png"]})
            for output in cell.outputs if "image/png" in output.get("data", {})]
        for cell in code_cells(result.notebook)
        if "keep_output" in cell.metadata.get("tags", [])
    }
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.pop("widgets", None)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = pictures.get(cell.id, []), None
    nbformat.write(notebook, path)
    print(f"{path.name}: {sum(map(len, pictures.values()))} pictures")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(FOLDER.glob("*.ipynb")):
        refresh(Path(name).resolve())
