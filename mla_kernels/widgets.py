"""Controls around figures, and the check behind an exercise.

A picture of a notebook is drawn twice by one function: once as a cell's result, so that a
reader without a kernel sees it, and once by :func:`explore`, with controls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import clear_output, display
from matplotlib.figure import Figure

#: Pixels that a figure of one inch height takes up at most in a notebook's column.
_PIXELS_PER_INCH = 120

#: Held by a callback while it draws or measures. ipykernel 7 may run the callbacks of two
#: controls at once, in two threads: Matplotlib's settings are not made for that, and a picture
#: drawn beside a benchmark would be in its figures.
one_at_a_time = threading.RLock()


class Explorer(ipywidgets.VBox):
    """What :func:`explore` returns: ``controls`` by name, ``picture`` and ``errors``, both
    Output widgets."""

    def __init__(self, controls: Mapping[str, ipywidgets.Widget], picture: ipywidgets.Output,
                 errors: ipywidgets.Output) -> None:
        self.controls, self.picture, self.errors = dict(controls), picture, errors
        row = ipywidgets.Box(list(controls.values()),
                             layout=ipywidgets.Layout(flex_flow="row wrap", grid_gap="4px 24px"))
        super().__init__([row, errors, picture])


def explore(
    draw: Callable[..., Figure | tuple], *, height: float, **controls: ipywidgets.Widget
) -> Explorer:
    """Controls that redraw a figure.

    Args:
        draw: gets the controls' values by name and returns a figure, or a tuple of things to
            show one below the other. What it raises is shown as one line above the picture,
            which then stays as it was.
        height: inches kept free for the picture, so that the page does not jump while it is
            redrawn; the tallest figure that ``draw`` makes.
        controls: sliders, drop-downs and so on. They report a value when it is final, not
            while it is dragged.

    Raises:
        Exception: whatever ``draw`` raises for the values that the controls start with; these
            are the notebook's and not the reader's, so the cell fails.
    """
    for control in controls.values():
        if control.has_trait("continuous_update"):
            control.continuous_update = False
        control.style.description_width = "initial"
    errors = ipywidgets.Output(layout=ipywidgets.Layout(min_height="1.8em"))

    picture = ipywidgets.Output()
    drawn: dict[str, Any] | None = None

    def redraw(_: object = None) -> None:
        # The values as they are when it is this callback's turn, not when it was called.
        nonlocal drawn
        with one_at_a_time:
            values = {name: control.value for name, control in controls.items()}
            if values == drawn:
                return
            first, drawn = drawn is None, values
            try:
                figure = draw(**values)
            except Exception as error:
                if first:
                    raise
                _say(errors, f"{type(error).__name__}: {error}\n")
            else:
                _say(errors, "")
                show(picture, *figure if isinstance(figure, tuple) else (figure,))

    redraw()
    for control in controls.values():
        control.observe(redraw, "value")
    picture.layout.height = f"{height * _PIXELS_PER_INCH + 16:.0f}px"
    picture.layout.overflow = "hidden auto"
    return Explorer(controls, picture, errors)


def show(output: ipywidgets.Output, *things: Any) -> None:
    """Replaces what ``output`` shows by ``things``, one below the other.

    ``with output: display(...)`` would do so by having the page divert what a message causes.
    When two messages are handled at once the page then misses the end of one of them, and the
    control that had sent it stays silent from there on.
    """
    formatter = InteractiveShell.instance().display_formatter
    output.outputs = tuple(
        {"output_type": "display_data", "data": data, "metadata": metadata}
        for data, metadata in map(formatter.format, things))


def _say(output: ipywidgets.Output, text: str) -> None:
    """Replaces what ``output`` shows."""
    output.outputs = ({"output_type": "stream", "name": "stdout", "text": text},) if text else ()


def check(answer: Any, test: Callable[[Any], bool | str]) -> None:
    """Says whether the reader's answer to an exercise is right.

    Args:
        answer: None while the reader has not answered, so that a notebook runs unattended.
        test: returns True when the answer is right, or else what is wrong with it. What it
            raises counts as wrong, with the error as the reason.
    """
    if answer is None:
        print("Not answered yet. Set `answer` in the cell above, run it, then run this one again.")
        return
    try:
        verdict = test(answer)
    except Exception as error:
        verdict = f"{type(error).__name__}: {error}"
    if verdict is True:
        print(f"Right: {answer!r}")
    else:
        print(f"Not right yet: {answer!r}" + (f". {verdict}" if verdict else ""))


def action(label: str, run: Callable[[], Any], *, unavailable: str = "") -> ipywidgets.VBox:
    """A button for what takes long: nothing happens until it is pressed.

    Args:
        label: what the button does, as its text.
        run: called when it is pressed; its result is displayed below, and so is what it prints
            and its progress bar. What it raises is shown as one line.
        unavailable: why it cannot run here; the button is then disabled and the reason shown.
    """
    button = ipywidgets.Button(description=label, layout=ipywidgets.Layout(width="auto"),
                               disabled=bool(unavailable))
    output = ipywidgets.Output()

    def press(_: Any) -> None:
        if button.disabled:  # pressed again before the page had heard that it runs
            return
        button.disabled = True
        with one_at_a_time, output:
            clear_output()
            try:
                result = run()
                if result is not None:
                    display(result)
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
            finally:
                button.disabled = False

    button.on_click(press)
    if unavailable:
        _say(output, unavailable + "\n")
    box = ipywidgets.VBox([button, output])
    box.button, box.output = button, output
    return box
