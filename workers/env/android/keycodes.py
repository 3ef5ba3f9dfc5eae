"""X keysyms → the names of Android's key codes, without KEYCODE_. What is not here, Android has no key for."""

from __future__ import annotations

import string

_PUNCTUATION = {
    "space": "SPACE", "comma": "COMMA", "period": "PERIOD", "minus": "MINUS", "equal": "EQUALS",
    "bracketleft": "LEFT_BRACKET", "bracketright": "RIGHT_BRACKET", "backslash": "BACKSLASH",
    "semicolon": "SEMICOLON", "apostrophe": "APOSTROPHE", "slash": "SLASH", "grave": "GRAVE", "at": "AT",
    "plus": "PLUS", "asterisk": "STAR", "numbersign": "POUND",
}  # fmt: skip
_SHIFTED = {
    "exclam": "1", "dollar": "4", "percent": "5", "asciicircum": "6", "ampersand": "7", "parenleft": "9",
    "parenright": "0", "underscore": "MINUS", "braceleft": "LEFT_BRACKET", "braceright": "RIGHT_BRACKET",
    "bar": "BACKSLASH", "colon": "SEMICOLON", "quotedbl": "APOSTROPHE", "less": "COMMA", "greater": "PERIOD",
    "question": "SLASH", "asciitilde": "GRAVE",
}  # fmt: skip
"""Characters that need Shift, as on a US keyboard."""
SHIFT = "SHIFT_LEFT"
CODES: dict[str, str] = {
    **{letter: letter.upper() for letter in string.ascii_lowercase},
    **{letter: letter for letter in string.ascii_uppercase},
    **{digit: digit for digit in string.digits},
    **{f"F{number}": f"F{number}" for number in range(1, 13)},
    **_PUNCTUATION,
    "Return": "ENTER", "KP_Enter": "NUMPAD_ENTER", "Tab": "TAB", "Escape": "ESCAPE", "BackSpace": "DEL",
    "Delete": "FORWARD_DEL", "Insert": "INSERT", "Home": "MOVE_HOME", "End": "MOVE_END", "Page_Up": "PAGE_UP",
    "Page_Down": "PAGE_DOWN", "Left": "DPAD_LEFT", "Right": "DPAD_RIGHT", "Up": "DPAD_UP", "Down": "DPAD_DOWN",
    "Caps_Lock": "CAPS_LOCK", "Num_Lock": "NUM_LOCK", "Scroll_Lock": "SCROLL_LOCK", "Print": "SYSRQ",
    "Pause": "BREAK", "Menu": "MENU", "Control_L": "CTRL_LEFT", "Control_R": "CTRL_RIGHT", "Shift_L": SHIFT,
    "Shift_R": "SHIFT_RIGHT", "Alt_L": "ALT_LEFT", "Alt_R": "ALT_RIGHT", "Super_L": "META_LEFT",
    "Super_R": "META_RIGHT", "Meta_L": "META_LEFT", "Meta_R": "META_RIGHT",
}  # fmt: skip


def codes_of(keysyms: tuple[str, ...]) -> list[str]:
    """The key codes of a chord, in order. Raises LookupError with the keysym that Android has no key for."""
    chord: list[str] = []
    for keysym in keysyms:
        if keysym in _SHIFTED:
            chord += [*([SHIFT] if SHIFT not in chord else []), _SHIFTED[keysym]]
        elif keysym in CODES:
            chord.append(CODES[keysym])
        else:
            raise LookupError(keysym)
    return chord
