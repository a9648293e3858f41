"""Save figures as reproducible files: equal pictures give equal bytes."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.base.files import write_atomically
from simparallel.base.units import format_type_of
from simparallel.errors import InputError

if TYPE_CHECKING:
    from matplotlib.animation import Animation
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# Colours of an animation.
_PALETTE = 64
# Removes metadata that matplotlib writes by default: the date, and the version of the library.
_METADATA: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def save_figure(ax_or_fig: Axes | Figure | SubFigure, path: str | os.PathLike[str], dpi: int = 150) -> Path:
    """Write a figure as PNG, SVG or PDF, by the suffix of `path`. Replaces the file atomically.

    Args:
        ax_or_fig: axes (their whole figure is saved) or a figure.
        path: the file; missing parent directories are created.
        dpi: dots per inch, for PNG.

    Returns:
        The path.

    Raises:
        InputError: neither axes nor a figure, or the suffix is none of .png, .svg, .pdf.
        OSError: the file cannot be written.
    """
    import matplotlib

    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in _METADATA:
        raise InputError(f"save_figure({str(path)!r}): end the name in one of {', '.join(_METADATA)}.")
    figure: Any = ax_or_fig
    if not hasattr(figure, "figure"):
        raise InputError(f"save_figure: got {format_type_of(figure)}, expected axes or a figure of matplotlib.")
    while getattr(figure, "figure", figure) is not figure:
        # Go up from axes, or from a figure inside a figure, to the outermost figure.
        figure = figure.figure

    # Into memory first: the file is then written in one move, or not at all.
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "simparallel"}):
        # matplotlib salts the ids in SVG files with random bits by default.
        figure.savefig(content, format=suffix[1:], dpi=dpi, metadata=_METADATA[suffix], bbox_inches="tight")

    write_atomically(target, content.getvalue())
    return target


def save_animation(animation: Animation, path: str | os.PathLike[str], fps: int = 8, dpi: int = 100) -> Path:
    """Write an animation as GIF, which repeats for ever. Replaces the file atomically.

    Args:
        animation: an animation of matplotlib.
        path: the file; missing parent directories are created.
        fps: frames per second.
        dpi: dots per inch.

    Returns:
        The path.

    Raises:
        InputError: the suffix is not .gif.
        OSError: the file cannot be written.
    """
    from matplotlib.animation import AbstractMovieWriter
    from PIL import Image

    target = Path(path)
    if target.suffix.lower() != ".gif":
        raise InputError(f"save_animation({str(path)!r}): end the name in .gif.")
    content = io.BytesIO()

    class Writer(AbstractMovieWriter):
        """A writer of frames with one palette and no dithering: parts that stand still cost no bytes."""

        def setup(self, fig: Any, outfile: Any, dpi: Any = None) -> None:
            super().setup(fig, outfile, dpi)
            self.images: list[Any] = []

        def grab_frame(self, **settings: Any) -> None:
            canvas: Any = self.fig.canvas
            canvas.draw()
            self.images.append(np.asarray(canvas.buffer_rgba())[..., :3].copy())

        def finish(self) -> None:
            # A few frames, side by side, contain the colours of all.
            some = np.concatenate(self.images[:: max(len(self.images) // 8, 1)])
            palette = Image.fromarray(some).quantize(_PALETTE)
            none = Image.Dither.NONE
            first, *rest = (Image.fromarray(image).quantize(palette=palette, dither=none) for image in self.images)
            first.save(content, "GIF", save_all=True, append_images=rest, duration=round(1000 / self.fps), loop=0)

    # The file is written afterwards, in one move.
    animation.save(target, writer=Writer(fps=fps), dpi=dpi)
    write_atomically(target, content.getvalue())
    return target
