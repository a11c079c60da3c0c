"""Control characters of stored text, written out for a terminal or a page."""

from __future__ import annotations

# control characters, marks of writing direction, and surrogates
CONTROLS = [*range(32), *range(127, 160), 0x061C, 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F)]
CONTROLS += [*range(0x2066, 0x206A), *range(0xD800, 0xE000)]
_VISIBLE = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in CONTROLS}
_VISIBLE |= dict.fromkeys(b"\t\n\r", " ")


def visible(text: str) -> str:
    """Return the text in one line, with its control characters written as escapes."""
    return text.translate(_VISIBLE)
