"""Values as TOML writes them."""

from __future__ import annotations

import json

from ..base.units import MICRO, ONE, in_unit


def toml_string(text: str) -> str:
    """Formats text as a TOML string in quotes."""
    # JSON's escapes are also TOML's, except for characters above U+FFFF, and for U+007F, which TOML wants
    # escaped
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def efficiency_toml(row: tuple[str, str, float, float, float]) -> str:
    """Formats a row of a device's own efficiencies."""
    name, dtype, share, ramp_s, backward = row
    figures = in_unit(share, ONE), in_unit(ramp_s, MICRO), in_unit(backward, ONE)
    return f'["{name}", "{dtype}", {", ".join(figures)}]'
