"""Key names that models write ⇄ X keysyms: one table for every grammar.

Names are read without regard to case and underscores, so "PageUp", "page_up" and the keysym "Page_Up" are one key. A
letter is its key, whatever its case: an upper-case letter is that key with shift in the chord.
"""

from __future__ import annotations

import string

from dart.core.action import PUNCTUATION

# keysym: the name to write, then other names that are accepted
_NAMED: dict[str, tuple[str, ...]] = {
    "Control_L": ("ctrl", "control", "ctrlleft", "lctrl"),
    "Control_R": ("ctrlright", "rctrl"),
    "Shift_L": ("shift", "shiftleft", "lshift"),
    "Shift_R": ("shiftright", "rshift"),
    "Alt_L": ("alt", "altleft", "lalt", "option"),
    "Alt_R": ("altright", "ralt", "altgr"),
    "Super_L": ("win", "super", "winleft", "windows", "meta", "command", "cmd"),
    "Super_R": ("winright", "superright"),
    "Return": ("enter", "return"),
    "KP_Enter": ("numpadenter",),
    "Escape": ("esc", "escape"),
    "Tab": ("tab",),
    "BackSpace": ("backspace", "back"),
    "Delete": ("delete", "del"),
    "Insert": ("insert", "ins"),
    "Home": ("home",),
    "End": ("end",),
    "Page_Up": ("pageup", "pgup", "prior"),
    "Page_Down": ("pagedown", "pgdn", "pgdown", "next"),
    "Left": ("left", "arrowleft", "leftarrow"),
    "Right": ("right", "arrowright", "rightarrow"),
    "Up": ("up", "arrowup", "uparrow"),
    "Down": ("down", "arrowdown", "downarrow"),
    "Caps_Lock": ("capslock",),
    "Num_Lock": ("numlock",),
    "Scroll_Lock": ("scrolllock",),
    "Print": ("printscreen", "prtsc", "prtscr", "prntscrn"),
    "Pause": ("pause",),
    "Menu": ("menu", "apps", "contextmenu"),
    "space": ("space", "spacebar"),
    **{f"F{number}": (f"f{number}",) for number in range(1, 25)},
}


def _folded(name: str) -> str:
    return name.lower().replace("_", "")


_NUMBER_PAD: dict[str, str] = {
    **{f"num{digit}": digit for digit in string.digits},
    "add": "plus", "subtract": "minus", "multiply": "asterisk", "divide": "slash", "decimal": "period",
}  # fmt: skip
"""pyautogui's names of its keys, which write the same as the keys beside the letters."""
_CHARACTERS: dict[str, str] = {
    " ": "space",
    **PUNCTUATION,
    **{letter: letter for letter in string.ascii_lowercase + string.digits},
    **{letter.upper(): letter for letter in string.ascii_lowercase},
}
_KEYSYMS: dict[str, str] = {
    **{keysym: keysym for keysym in PUNCTUATION.values()},
    **{_folded(keysym): keysym for keysym in _NAMED},
    **{name: keysym for keysym, names in _NAMED.items() for name in names},
    **_NUMBER_PAD,
}
_NAMES: dict[str, str] = {
    **{letter: letter for letter in string.ascii_lowercase + string.digits},
    **{keysym: character for character, keysym in PUNCTUATION.items()},
    **{keysym: names[0] for keysym, names in _NAMED.items()},
}

KEYSYMS: tuple[str, ...] = tuple(_NAMES)
"""Every keysym that has a name here."""


def keysym_of(name: str) -> str | None:
    """The X keysym of a key name or of a single character; None when there is no such key."""
    return _CHARACTERS.get(name) if len(name) == 1 else _KEYSYMS.get(_folded(name))


def name_of(keysym: str) -> str | None:
    """The name that models write for an X keysym; None when it has none."""
    return _NAMES.get(keysym)
