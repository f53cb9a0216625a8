"""Pictures of the way into SGLang and of recorded engine runs, in the style of
:mod:`mla_kernels.figures`."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from .engine_runs import PAIRS, EngineRecord
from .figures import COLOR, MARKERS, SERIES, _grid, _new_figure, _styled

#: Whose code a box is.
OWNER = {"SGLang": COLOR["faint"], "this project": COLOR["latent"]}

#: The way of a verify call: x and y of a box's centre, its width, whose it is, title and what
#: it adds.
PATH = (
    (2.5, 9.0, 4.6, "SGLang", "scheduler, speculative worker", "draft tree: tokens, custom_mask"),
    (2.5, 7.5, 4.6, "SGLang", "init_forward_metadata", "qo_indptr, kv_indptr, kv_indices, mask"),
    (2.5, 6.0, 4.6, "SGLang", "attention layer, absorbed MLA", "q 576, k 576, v = first 512 of k"),
    (2.5, 4.5, 4.6, "SGLang", "TritonAttnBackend.forward_extend", "writes the draft rows to the "
     "pool"),
    (2.5, 3.0, 4.6, "this project", "TreeVerify", "in place of extend_attention_fwd"),
    (7.6, 4.5, 4.0, "this project", "marshal.from_sglang", "once a pass: VerifyBatch, mask bits"),
    (7.6, 3.0, 4.0, "this project", "verify_attention", "tree_verify, then combine"),
    (2.5, 1.2, 4.6, "SGLang", "extend_attention_fwd", "SGLang's Triton kernel"),
    (7.6, 1.2, 4.0, "SGLang", "the rest of the layer", "out, 512 a head"),
)

#: Arrows between their indices, and what is written beside them.
ARROWS = ((0, 1, ""), (1, 2, ""), (2, 3, ""), (3, 4, "target verify"), (4, 5, ""), (5, 6, ""),
          (4, 7, "cannot serve, an error,\nor a mismatch"), (6, 8, ""), (7, 8, ""))


@_styled
def verify_path() -> Figure:
    """From the scheduler to the kernel: whose code a verify call passes through."""
    figure, ax = _new_figure(5.4)
    height = 1.0
    for x, y, width, owner, title, text in PATH:
        ours = owner == "this project"
        ax.add_patch(FancyBboxPatch(
            (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=.1",
            facecolor=OWNER[owner], edgecolor="none"))
        color = "white" if ours else COLOR["ink"]
        ax.text(x, y + 0.18, title, ha="center", va="center", color=color, weight="bold",
                fontsize=9.5)
        ax.text(x, y - 0.22, text, ha="center", va="center", color=color, fontsize=8.5)
    for start, end, label in ARROWS:
        (x0, y0, w0, *_), (x1, y1, w1, *_) = PATH[start], PATH[end]
        across = x0 != x1 and (start, end) != (5, 6)
        a = (x0 + w0 / 2, y0) if across else (x0, y0 - height / 2)
        b = (x1 - w1 / 2, y1) if across else (x1, y1 + height / 2)
        ax.add_patch(FancyArrowPatch(a, b, arrowstyle="-|>", mutation_scale=11, shrinkA=1,
                                     shrinkB=1, color=COLOR["muted"]))
        if label:
            ax.text(a[0] + 0.12, (a[1] + b[1]) / 2, label, va="center", fontsize=8.5,
                    color=COLOR["muted"])
    marks = [Line2D([], [], linestyle="", marker="s", markersize=10, color=c, label=name)
             for name, c in OWNER.items()]
    ax.legend(handles=marks, loc="upper right", title="whose code")
    ax.set_xlim(0, 9.8)
    ax.set_ylim(0.5, 9.6)
    ax.set_axis_off()
    return figure


@_styled
def step_time(record: EngineRecord, *, title: str = "") -> Figure:
    """Milliseconds of a whole step of the engine, for one request, against context, for both
    paths, with CUDA graphs and without; the speed-up is written at each context."""
    table = record.table()
    modes = [mode for mode in PAIRS if any(r["mode"] == mode for r in table)]
    figure, axes = _new_figure(3.6, 1, max(len(modes), 1), sharey=True, squeeze=False)
    for ax, mode in zip(axes[0], modes, strict=False):
        rows = [r for r in table if r["mode"] == mode]
        for i, (who, column) in enumerate((("ours", "ours ms/step"),
                                           ("SGLang's Triton", "SGLang ms/step"))):
            ax.plot([r["context"] for r in rows], [r[column] for r in rows], color=SERIES[i],
                    marker=MARKERS[i], label=who)
        for row in rows:
            top = max(row["ours ms/step"], row["SGLang ms/step"])
            ax.annotate(f"{row['speed-up']:.1f}x", (row["context"], top), (0, 6),
                        textcoords="offset points", ha="center", fontsize=9)
        contexts = sorted({r["context"] for r in table})
        ax.set_xscale("log", base=2)
        ax.set_xticks(contexts, [f"{c // 1024}k" for c in contexts])
        ax.set_yscale("log")
        ax.margins(x=0.12, y=0.15)
        ax.set_xlabel("context, tokens")
        ax.set_title(mode)
        _grid(ax, "y")
    axes[0][0].set_ylabel("ms a step")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=11)
    return figure


@_styled
def layer_time(record: EngineRecord, *, title: str = "") -> Figure:
    """Microseconds that one layer's verify call keeps the GPU, against context."""
    one, other = PAIRS["CUDA graphs"]
    contexts = [row["context"] for row in record.rows(one, other)]
    figure, ax = _new_figure(3.0)
    for i, (run, who) in enumerate(((other, "ours"), (one, "SGLang's Triton"))):
        points = [(c, us) for c in contexts if (us := record.attention_us(run, c))]
        ax.plot([c for c, _ in points], [us for _, us in points], color=SERIES[i],
                marker=MARKERS[i], label=who)
        for c, us in points:
            ax.annotate(f"{us:,.0f}", (c, us), (0, 6), textcoords="offset points", ha="center",
                        fontsize=9)
    ax.set_xscale("log", base=2)
    ax.set_xticks(contexts, [f"{c // 1024}k" for c in contexts])
    ax.set_yscale("log")
    ax.margins(x=0.12, y=0.2)
    ax.set_xlabel("context, tokens")
    ax.set_ylabel("us a layer")
    _grid(ax, "y")
    ax.legend(loc="upper left")
    ax.set_title(title)
    return figure
