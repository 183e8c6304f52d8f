"""A picture of a run's latencies."""

from collections.abc import Sequence
from pathlib import Path

from mini_infer.cli.load.client import Record
from mini_infer.cli.load.figures import NAMES, Objective, samples_of
from mini_infer.core.errors import InvalidConfigError


def save_plot(
    path: Path, records: Sequence[Record], objectives: Sequence[Objective], title: str
) -> None:
    """Writes each metric's cumulative distribution, with its objective, in the format that the
    file's ending names.

    Raises:
        InvalidConfigError: matplotlib is missing, or the file can't be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    figure.suptitle(title)
    bounds = {objective.metric: objective.milliseconds for objective in objectives}
    for axes, (metric, name) in zip(figure.subplots(2, 2).flat, NAMES.items(), strict=True):
        values = sorted(samples_of(records, metric))
        if values:
            shares = [100 * (row + 1) / len(values) for row in range(len(values))]
            axes.step(values, shares, where="post")
        if metric in bounds:
            axes.axvline(bounds[metric], color="tab:red", linestyle="--", label="objective")
            axes.legend()
        axes.set_xlabel(f"{name} ({metric.upper()}), ms")
        axes.set_ylabel("at most that, %")
        axes.set_ylim(0, 101)
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InvalidConfigError(f"can't write --plot {path}: {error}") from None


def check_plot(path: Path) -> None:
    """Raises InvalidConfigError: matplotlib is missing, or writes no such kind of file.

    Called before a run, so that an hour of it is not lost to a picture.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise InvalidConfigError(
            "--plot needs the package matplotlib: pip install 'mini-infer[bench]'"
        ) from None
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise InvalidConfigError(
            f"--plot {path}: the file's ending must be one of {', '.join(sorted(known))}"
        )
