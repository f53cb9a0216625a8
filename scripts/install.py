"""Makes the virtual environment and installs this project into it, saying how far it is.

`make` calls it with the machine's own Python, so it uses the standard library only. pip
alone would print hundreds of lines, or nothing for minutes (torch and the CUDA compiler are
several GB); here a terminal shows one line that moves, and a log file takes the rest.

    python3 scripts/install.py .venv --extras test
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "build" / "install.log"
#: Editable installs from a pyproject.toml alone need this pip.
PIP_MINIMUM = (21, 3)


class Status:
    """One line that says what goes on. On a terminal it is rewritten every second; elsewhere
    (CI, a log) a line is printed when the work changes, and at least every half minute."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.text = "starting"
        self.tty = sys.stderr.isatty()
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.printed = 0.0
        self.thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Status:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.done.set()
        self.thread.join()
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def say(self, text: str, *, important: bool = False) -> None:
        with self.lock:
            changed, self.text = text != self.text, text
            if self.tty or (important and changed):
                self._print()

    def _print(self) -> None:
        self.printed = time.monotonic()
        minutes, seconds = divmod(int(self.printed - self.began), 60)
        line = f"install {minutes}:{seconds:02d}  {self.text}"
        if self.tty:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width]}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _tick(self) -> None:
        while not self.done.wait(1.0):
            with self.lock:
                if self.tty or time.monotonic() - self.printed > 30:
                    self._print()


def describe(line: str, seen: set[str]) -> tuple[str, bool] | None:
    """What a line of pip's output means for the reader: a text, and whether it is worth a
    line of its own in a log. None for the many lines that mean nothing to them."""
    if match := re.match(r"(?:Collecting|Requirement already satisfied:) ([\w.-]+)", line):
        seen.add(match[1].lower())
        return f"looking at {match[1]} ({len(seen)} packages so far)", False
    if match := re.match(r"\s+Downloading (\S+) \((.+ ([kMG]?B))\)", line):
        name = match[1].rsplit("/", 1)[-1].split("-")[0]
        big = match[3] == "GB" or (match[3] == "MB" and float(match[2].split()[0]) >= 100)
        return f"downloading {name}, {match[2]} ({len(seen)} packages so far)", big
    if line.startswith("Installing collected packages:"):
        count = line.count(",") + 1
        patience = ": takes a minute or two and prints nothing" if count > 20 else ""
        return f"unpacking {count} package{'' if count == 1 else 's'}{patience}", True
    return None


def run(command: list[str], status: Status) -> None:
    """Runs a command, its output going to the log; raises SystemExit with the log's end when
    the command fails."""
    seen: set[str] = set()
    lines: list[str] = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with open(LOG, "a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        )
        try:
            for line in process.stdout:
                log.write(line)
                log.flush()
                lines.append(line)
                if said := describe(line, seen):
                    status.say(said[0], important=said[1])
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code:
        status.__exit__()
        print("".join(lines[-25:]), end="", file=sys.stderr)
        sys.exit(f"install: {Path(command[0]).name} {' '.join(command[1:4])} … ended with exit "
                 f"status {code}; the whole log is in {LOG.relative_to(ROOT)}")


def version_of(python: Path) -> tuple[int, int] | None:
    """The version of an environment's Python, or None when it is not there or does not run."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    major, minor = done.stdout.split()
    return int(major), int(minor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("venv", type=Path, help="folder of the environment")
    parser.add_argument("--extras", default="test", help="extras of pyproject.toml, with commas")
    args = parser.parse_args()

    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("", encoding="utf-8")
    python = args.venv.absolute() / "bin" / "python"
    with Status() as status:
        there = version_of(python)
        if there is None:
            status.say(f"making {args.venv} with Python {sys.version.split()[0]}", important=True)
            # A half-made or broken environment is begun anew, but no other folder is emptied.
            fresh = ["--clear"] if (args.venv / "pyvenv.cfg").exists() else []
            run([sys.executable, "-m", "venv", *fresh, str(args.venv)], status)
        elif there != sys.version_info[:2]:
            status.__exit__()
            sys.exit(
                f"install: {args.venv} has Python {there[0]}.{there[1]}, and "
                f"{sys.version_info[0]}.{sys.version_info[1]} was asked for: `make clean-all` "
                "removes it, or name another with VENV="
            )
        pip = [str(python), "-m", "pip"]
        shown = subprocess.run([*pip, "--version"], capture_output=True, text=True).stdout
        found = re.match(r"pip (\d+)\.(\d+)", shown)
        if not found or (int(found[1]), int(found[2])) < PIP_MINIMUM:
            status.say("bringing a newer pip", important=True)
            run([*pip, "install", "--upgrade", "pip"], status)
        status.say("asking pip for this project's packages (several GB the first time)",
                   important=True)
        run([*pip, "install", "--progress-bar", "off", "-e", f".[{args.extras}]"], status)
        took = int(time.monotonic() - status.began)
    print(f"install: {args.venv} is ready after {took // 60}:{took % 60:02d}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("install: interrupted; the next make goes on from here")
