"""What was measured on a GPU, and by how much it differed from what was computed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Calibration:
    """factor: measured over computed bytes of the plan's row `row`, for the models of a family.

    device, date and run say where the measurement comes from; a plan shows such a row as measured.
    """

    row: str
    family: str
    factor: float
    device: str
    date: str
    run: str


CALIBRATIONS: tuple[Calibration, ...] = ()


def calibration(row: str, family: str) -> Calibration | None:
    return next((each for each in CALIBRATIONS if (each.row, each.family) == (row, family)), None)
