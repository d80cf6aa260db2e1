"""Which trackers a run wants, and whether their packages are there. Imports none of them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from protocol.config import ConfigError, TrackingSection

ALL = "all"
# The packages that have each tracker, any of which will do; accelerate has classes for these.
PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "comet_ml": ("comet-ml",),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "aim": ("aim",),
    "clearml": ("clearml",),
    "dvclive": ("dvclive",),
    "swanlab": ("swanlab",),
}
# Those that are extras of Slipstream's own.
EXTRAS = ("tensorboard", "wandb", "trackio")


def wanted(section: TrackingSection) -> list[str]:
    """The trackers of `tracking.report_to`. Raises `ConfigError` for one whose package is not installed."""
    if ALL in section.report_to:
        found = [name for name in PACKAGES if _is_installed(name)]
        if not found:
            raise ConfigError(
                f"tracking.report_to = all: none of {', '.join(PACKAGES)} is installed; install one, such as: "
                f"{_install('tensorboard')}"
            )
        return found
    if missing := [name for name in section.report_to if not _is_installed(name)]:
        raise ConfigError(
            f"tracking.report_to = {', '.join(section.report_to)}: {missing[0]} is not installed; install it with: "
            f"{_install(missing[0])}, or leave it out"
        )
    return list(section.report_to)


def _install(name: str) -> str:
    return f"pip install '{f'slipstream-rl[{name}]' if name in EXTRAS else PACKAGES[name][0]}'"


def _is_installed(name: str) -> bool:
    """By its distribution: a folder of that name, as wandb leaves behind where it runs, is not the package."""
    for package in PACKAGES[name]:
        try:
            distribution(package)
        except PackageNotFoundError:
            continue
        return True
    return False
