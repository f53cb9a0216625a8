"""Controls around figures, and the check behind an exercise.

A picture of a notebook is drawn twice by one function: once as a cell's result, so that a
reader without a kernel sees it, and once by :func:`explore`, with controls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets
from IPython.display import display
from matplotlib.figure import Figure

#: Pixels that a figure of one inch height takes up at most in a notebook's column.
_PIXELS_PER_INCH = 120


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

    failures: list[Exception] = []

    def redraw(**values: Any) -> None:
        try:
            figure = draw(**values)
        except Exception as error:
            failures.append(error)
            _say(errors, f"{type(error).__name__}: {error}\n")
        else:
            _say(errors, "")
            display(*figure if isinstance(figure, tuple) else (figure,))

    picture = ipywidgets.interactive_output(redraw, controls)  # draws once
    if failures:
        raise failures[0]
    picture.layout.height = f"{height * _PIXELS_PER_INCH + 16:.0f}px"
    picture.layout.overflow = "hidden auto"
    return Explorer(controls, picture, errors)


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
        button.disabled = True
        output.clear_output()
        with output:
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
