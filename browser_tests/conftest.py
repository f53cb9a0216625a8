"""A real JupyterLab on a copy of the notebooks, and a real browser. Skips with one line where
there is no browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCREENSHOTS = ROOT / "build" / "screenshots"

#: Where a system keeps a browser that Playwright can drive.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

#: Settings under which all cells are in the page, and nothing pops up over it.
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false", "checkForUpdates": False},
}


def launch(playwright):
    """A browser, or a skip that says why there is none."""
    named = os.environ.get("MLA_KERNELS_BROWSER")
    path = named or next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        return playwright.chromium.launch(executable_path=path, args=[
            "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-component-update",
            "--disable-background-networking", "--disable-sync"])
    except Exception as error:
        if named:
            raise
        pytest.skip(f"no browser: {str(error).splitlines()[0]}; install chromium, run "
                    "`playwright install chromium`, or set MLA_KERNELS_BROWSER")


@pytest.fixture(scope="session")
def browser():
    api = pytest.importorskip("playwright.sync_api",
                              reason="no browser: Playwright is not installed (make browser)")
    with api.sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(browser, tmp_path_factory):
    """The address of a JupyterLab whose folder is a copy: running a notebook saves it."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks",
                    ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    settings = folder / "settings"
    for name, values in SETTINGS.items():
        path = settings / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = open(folder / "log", "w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
         "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--ServerApp.password=",
         f"--ServerApp.root_dir={folder}", f"--LabApp.user_settings_dir={settings}",
         f"--LabApp.workspaces_dir={folder / 'workspaces'}"],
        stdout=log, stderr=subprocess.STDOUT, cwd=folder,
        env={**os.environ, "JUPYTER_CONFIG_DIR": str(folder / "config"),
             "PYDEVD_DISABLE_FILE_VALIDATION": "1"})
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/api", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None:
                    break
                time.sleep(0.5)
        else:
            process.terminate()
        if process.poll() is not None:
            log.seek(0)
            pytest.fail(f"JupyterLab did not start:\n{log.read()[-3000:]}")
        yield address
    finally:
        process.terminate()
        process.wait(30)
        log.close()


class Notebook:
    """A notebook open in JupyterLab."""

    def __init__(self, page, name: str) -> None:
        self.page, self.name = page, name

    def run_all(self, seconds: float = 240) -> None:
        """Runs all cells and waits until none is queued or running."""
        menu = self.page.locator(".lm-MenuBar-item", has_text=re.compile("^Run$"))
        menu.click()
        self.page.locator(".lm-Menu-item:visible", has_text="Run All Cells").first.click()
        quiet, end = 0, time.monotonic() + seconds
        while quiet < 3:
            assert time.monotonic() < end, f"{self.name} still runs after {seconds} s"
            self.page.wait_for_timeout(400)
            prompts = self.page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()
            begun = any(re.search(r"\d", p) for p in prompts)
            quiet = quiet + 1 if begun and not any("*" in p for p in prompts) else 0

    def problems(self) -> list[str]:
        """Errors, warnings and broken widgets in the outputs."""
        kinds = ("application/vnd.jupyter.error", "application/vnd.jupyter.stderr")
        prompts = self.page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()
        found = [f"cell {i} did not run" for i, p in enumerate(prompts)
                 if not re.search(r"\d", p)]
        for kind in kinds:
            for one in self.page.locator(f".jp-OutputArea-output[data-mime-type='{kind}']").all():
                found.append(one.inner_text())
        text = "\n".join(self.page.locator(".jp-OutputArea-output").all_inner_texts())
        found += re.findall(r".*(?:Error displaying widget|model not found|IProgress not found).*",
                            text)
        return found

    def cell(self, beginning: str):
        """The code cell whose source begins so."""
        return self.page.locator(".jp-CodeCell", has=self.page.locator(
            ".cm-content", has_text=re.compile("^" + re.escape(beginning)))).first

    def screenshot(self, name: str, of=None) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        if of is not None:
            of.scroll_into_view_if_needed()
        (of or self.page).screenshot(path=SCREENSHOTS / f"{name}.png")

    def shut_down(self) -> None:
        """Ends the notebook's kernel: each holds some hundred megabytes."""
        self.page.evaluate("""async () => {
            const sessions = await (await fetch('/api/sessions')).json();
            const cookie = document.cookie.match(/_xsrf=([^;]*)/);
            for (const s of sessions) await fetch('/api/sessions/' + s.id, {
                method: 'DELETE', headers: {'X-XSRFToken': cookie ? cookie[1] : ''}});
        }""")


@pytest.fixture
def open_notebook(browser, server):
    opened = []

    def open_one(name: str) -> Notebook:
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.goto(f"{server}/lab/tree/notebooks/{name}.ipynb?reset", timeout=120_000)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=120_000)
        # The menu's commands do nothing before the kernel is there.
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']",
                               timeout=120_000)
        opened.append(Notebook(page, name))
        return opened[-1]

    yield open_one
    for notebook in opened:
        notebook.shut_down()
        notebook.page.close()
