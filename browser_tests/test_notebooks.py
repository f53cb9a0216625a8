"""Each notebook, run in a browser as a reader would, and the labs with their controls moved."""

from __future__ import annotations

import pytest
from conftest import ROOT, SCREENSHOTS

NOTEBOOKS = sorted(p.stem for p in (ROOT / "notebooks").glob("*.ipynb"))


class Lab:
    """The output of the cell that made a lab, its controls found by their labels."""

    def __init__(self, notebook, beginning: str) -> None:
        self.page = notebook.page
        self.area = notebook.cell(beginning).locator(".jp-OutputArea-output").first
        self.area.wait_for()
        self.area.scroll_into_view_if_needed()

    def control(self, label: str):
        return self.area.locator(".widget-inline-hbox:visible", has=self.page.locator(
            f'.widget-label:text-is("{label}")')).first

    def picture(self) -> str:
        return self.area.locator("img").first.get_attribute("src")

    def text(self) -> str:
        return self.area.inner_text()

    def changes(self, act, what=None, seconds: float = 30) -> None:
        """Does something and waits until the picture, or what is named, is another."""
        what = what or self.picture
        before = self.settled(what)
        act()
        for _ in range(int(10 * seconds)):
            if what() != before:
                return
            self.page.wait_for_timeout(100)
        self.page.screenshot(path=SCREENSHOTS / "failed.png")
        raise AssertionError(f"nothing changed within {seconds} s")

    def settled(self, what, seconds: float = 30):
        """What is shown once it has been the same for half a second: an earlier change may still
        be on its way."""
        last, same = what(), 0
        for _ in range(int(10 * seconds)):
            self.page.wait_for_timeout(100)
            now = what()
            last, same = now, same + 1 if now == last else 0
            if same == 5:
                return now
        raise AssertionError(f"still changing after {seconds} s")

    def wait_for(self, text: str, seconds: float = 30) -> None:
        self.area.get_by_text(text).first.wait_for(timeout=1000 * seconds)

    def slide(self, label: str, key: str = "ArrowRight", times: int = 1) -> None:
        handle = self.control(label).locator(".noUi-handle")
        handle.focus()
        for _ in range(times):
            self.page.keyboard.press(key)

    def type(self, label: str, value: str, *, done: str = "Enter") -> None:
        """Types over a slider's number, or into a field."""
        control = self.control(label)
        readout = control.locator(".widget-readout, input, textarea").first
        readout.click()
        readout.fill(value)
        readout.press(done)

    def choose(self, label: str, value: str) -> None:
        self.control(label).locator("select").select_option(label=value)

    def press(self, label: str) -> None:
        self.area.get_by_role("button", name=label).click()


@pytest.mark.parametrize("name", [n for n in NOTEBOOKS if "_lab" not in n and "_advisor" not in n])
def test_runs_without_problems(open_notebook, name):
    notebook = open_notebook(name)
    notebook.run_all()
    notebook.screenshot(name)
    assert notebook.problems() == []


def test_tree_lab(open_notebook):
    notebook = open_notebook("09_tree_lab")
    notebook.run_all()
    assert notebook.problems() == []
    lab = Lab(notebook, "tree_lab.lab(")
    height = lab.area.bounding_box()["height"]
    assert "[27, 1]" in lab.text()                       # mask_bits: 3 + 24 nodes
    lab.changes(lambda: lab.slide("nodes"))
    lab.wait_for("[28, 1]")
    lab.changes(lambda: lab.type("nodes", "1024"))
    lab.wait_for("[1027, 32]")
    notebook.screenshot("09_tree_lab_1024", lab.area)
    lab.changes(lambda: lab.slide("best token", "ArrowLeft", 3))
    lab.changes(lambda: lab.choose("family", "EAGLE"))
    lab.changes(lambda: lab.slide("topk"))
    lab.changes(lambda: lab.choose("family", "parents"))
    lab.changes(lambda: lab.type("list", "[-1, 0, 0, 0]", done="Tab"))
    lab.wait_for("[7, 1]")
    picture = lab.settled(lab.picture)
    lab.type("list", "[-1, 7]", done="Tab")
    lab.wait_for("parents[1] must be in 0 .. 0")         # said, and the picture stays
    assert lab.picture() == picture
    lab.type("list", "[-1, 0, 1]", done="Tab")
    lab.wait_for("[6, 1]")
    lab.type("marginals from a file", "nothing.npy")
    lab.wait_for("must name a .npy or .npz file")
    lab.type("marginals from a file", " ")
    assert abs(lab.area.bounding_box()["height"] - height) < 120   # nothing jumps
    notebook.screenshot("09_tree_lab", lab.area)
    assert notebook.problems() == []


def test_budget_advisor(open_notebook):
    notebook = open_notebook("10_budget_advisor")
    notebook.run_all()
    assert notebook.problems() == []
    lab = Lab(notebook, "advisor.lab(")
    assert "A tree of 32 nodes" in lab.text() and '"parents"' in lab.text()
    notebook.screenshot("10_budget_advisor", lab.area)
    lab.changes(lambda: lab.slide("best token", "ArrowLeft", 5))
    lab.changes(lambda: lab.type("what only a tree costs, ms", "20"))
    lab.wait_for("A tree does not pay here")
    lab.type("tree's tokens a step", "8: 9")
    lab.wait_for("tree's tokens must be in 1 .. 8")
    lab.changes(lambda: lab.type("tree's tokens a step", "8: 3.2, 16: 3.3"))
    lab.choose("heads a rank", "128")
    lab.type("requests", "3")
    lab.wait_for("not measured")
    lab.changes(lambda: lab.choose("GPU", "GeForce RTX 5090 (modelled: its floor)"))
    lab.wait_for("do not speculate")
    notebook.screenshot("10_budget_advisor_no_tree", lab.area)
    assert notebook.problems() == []


def test_kernel_lab(open_notebook):
    notebook = open_notebook("11_kernel_lab")
    notebook.run_all()
    assert notebook.problems() == []
    lab = Lab(notebook, "lab = kernel_lab.lab(")
    lab.changes(lambda: lab.choose("stages", "3"))
    lab.wait_for("36,012 over the")
    lab.press("Build")
    lab.wait_for("ValueError: with 64 query rows")
    assert "spills, B" not in lab.text()                 # nothing was built
    notebook.screenshot("11_kernel_lab_refused", lab.area)
    lab.changes(lambda: lab.choose("stages", "2"))
    lab.changes(lambda: lab.choose("registers for blocks", "2"))
    lab.slide("splits (0: planned)")
    lab.type("splits (0: planned)", "0")
    lab.press("Build")
    lab.wait_for("bytes of spills", seconds=120)
    lab.wait_for("within the limits")
    check = lab.area.get_by_role("button", name="Check")
    if check.is_enabled():
        check.click()
        lab.wait_for("passed, worst relative error", seconds=120)
    else:
        assert "Check: no GPU here and no emulated backend." in lab.text()
    notebook.screenshot("11_kernel_lab", lab.area)
    assert notebook.problems() == []
