"""The conversion table, both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.errors import ProfileError
from hwprofiles.units import (
    UNITS,
    dimension_of,
    format_bytes,
    format_rate,
    format_seconds,
    from_si,
    to_si,
    units_of,
)


@pytest.mark.parametrize(
    ("value", "unit", "si"),
    [
        (989, "TFLOP/s", 989e12),
        (400, "Gbit/s", 50e9),
        (3.35, "TB/s", 3.35e12),
        (81559, "MiB", 81559 * 2**20),
        (3.4, "us", 3.4e-6),
        (10.2, "kW", 10200),
        (2.95, "USD/h", 2.95),
    ],
)
def test_known_conversions(value: float, unit: str, si: float) -> None:
    assert to_si(value, unit) == pytest.approx(si, rel=1e-15)


@given(st.sampled_from(sorted(UNITS)), st.floats(1e-9, 1e9))
def test_conversion_and_its_inverse_cancel(unit: str, value: float) -> None:
    assert from_si(to_si(value, unit), unit) == pytest.approx(value, rel=1e-12)
    assert unit in units_of(dimension_of(unit))


def test_unknown_unit_and_infinity_are_refused() -> None:
    with pytest.raises(ProfileError, match="furlong"):
        to_si(1, "furlong")
    with pytest.raises(ProfileError, match="finite"):
        to_si(float("inf"), "GB")


def test_what_people_read() -> None:
    assert format_bytes(512) == "512 B"
    assert format_bytes(1023.9 * 2**30) == "1024 GiB"
    assert format_seconds(0.00042) == "420 us"
    assert format_seconds(0) == "0 us"
    assert format_rate(50e9) == "50 GB/s"
    assert format_rate(1979e12, "flops") == "1979 TFLOP/s"
