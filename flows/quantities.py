"""Large numbers as a person reads them."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """Three digits and a binary unit: `1.42 TiB`."""
    return _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def amount(number: float) -> str:
    """Three digits and a decimal unit: `2.78 T`."""
    return _scaled(number, 1000, ("", "K", "M", "B", "T")).rstrip()


def count(number: int) -> str:
    """`2.779e12`, `105.4e9`; exact below a million."""
    if number >= 10**12:
        return f"{number / 1e12:.3f}e12"
    return f"{number / 1e9:.1f}e9" if number >= 10**9 else f"{number / 1e6:.2f}e6" if number >= 10**6 else f"{number:,}"


def duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _scaled(number: float, step: int, units: tuple[str, ...]) -> str:
    unit = 0
    while abs(number) >= step - 0.5 and unit < len(units) - 1:
        number, unit = number / step, unit + 1
    digits = 0 if unit == 0 or abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    return f"{number:,.{digits}f} {units[unit]}"
