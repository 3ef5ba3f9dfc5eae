"""X keysym names and characters → the key data that DevTools needs (US layout). Tables only, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from dart.core.action import PUNCTUATION

ALT, CONTROL, META, SHIFT = 1, 2, 4, 8


@dataclass(frozen=True, slots=True)
class Key:
    """`text` is what it types, or empty; `shifted` keys need Shift; `modifier` is its DevTools bit, or 0."""

    key: str
    code: str
    virtual: int
    text: str = ""
    shifted: bool = False
    modifier: int = 0


_NAMED = {
    "Return": Key("Enter", "Enter", 13, "\r"),
    "KP_Enter": Key("Enter", "NumpadEnter", 13, "\r"),
    "Tab": Key("Tab", "Tab", 9),
    "ISO_Left_Tab": Key("Tab", "Tab", 9, shifted=True),
    "BackSpace": Key("Backspace", "Backspace", 8),
    "Delete": Key("Delete", "Delete", 46),
    "Insert": Key("Insert", "Insert", 45),
    "Escape": Key("Escape", "Escape", 27),
    "Left": Key("ArrowLeft", "ArrowLeft", 37),
    "Up": Key("ArrowUp", "ArrowUp", 38),
    "Right": Key("ArrowRight", "ArrowRight", 39),
    "Down": Key("ArrowDown", "ArrowDown", 40),
    "Home": Key("Home", "Home", 36),
    "End": Key("End", "End", 35),
    "Page_Up": Key("PageUp", "PageUp", 33),
    "Prior": Key("PageUp", "PageUp", 33),
    "Page_Down": Key("PageDown", "PageDown", 34),
    "Next": Key("PageDown", "PageDown", 34),
    "Caps_Lock": Key("CapsLock", "CapsLock", 20),
    "Menu": Key("ContextMenu", "ContextMenu", 93),
    "Print": Key("PrintScreen", "PrintScreen", 44),
    "Pause": Key("Pause", "Pause", 19),
    "Shift_L": Key("Shift", "ShiftLeft", 16, modifier=SHIFT),
    "Shift_R": Key("Shift", "ShiftRight", 16, modifier=SHIFT),
    "Control_L": Key("Control", "ControlLeft", 17, modifier=CONTROL),
    "Control_R": Key("Control", "ControlRight", 17, modifier=CONTROL),
    "Alt_L": Key("Alt", "AltLeft", 18, modifier=ALT),
    "Alt_R": Key("Alt", "AltRight", 18, modifier=ALT),
    "Meta_L": Key("Meta", "MetaLeft", 91, modifier=META),
    "Meta_R": Key("Meta", "MetaRight", 92, modifier=META),
    "Super_L": Key("Meta", "MetaLeft", 91, modifier=META),
    "Super_R": Key("Meta", "MetaRight", 92, modifier=META),
    "Num_Lock": Key("NumLock", "NumLock", 144),
    "Scroll_Lock": Key("ScrollLock", "ScrollLock", 145),
    **{f"F{n}": Key(f"F{n}", f"F{n}", 111 + n) for n in range(1, 25)},
}

# (plain, with Shift, code, Windows virtual key code)
_PRINTABLE = [
    *((letter, letter.upper(), f"Key{letter.upper()}", ord(letter.upper())) for letter in "abcdefghijklmnopqrstuvwxyz"),
    *((digit, mark, f"Digit{digit}", ord(digit)) for digit, mark in zip("0123456789", ")!@#$%^&*(", strict=True)),
    (" ", " ", "Space", 32),
    ("-", "_", "Minus", 189),
    ("=", "+", "Equal", 187),
    ("[", "{", "BracketLeft", 219),
    ("]", "}", "BracketRight", 221),
    ("\\", "|", "Backslash", 220),
    (";", ":", "Semicolon", 186),
    ("'", '"', "Quote", 222),
    ("`", "~", "Backquote", 192),
    (",", "<", "Comma", 188),
    (".", ">", "Period", 190),
    ("/", "?", "Slash", 191),
]

_CHARACTERS: dict[str, Key] = {}
_WITH_SHIFT: dict[Key, Key] = {}
for _plain, _with_shift, _code, _virtual in _PRINTABLE:
    _CHARACTERS[_with_shift] = Key(_with_shift, _code, _virtual, _with_shift, shifted=True)
    _CHARACTERS[_plain] = Key(_plain, _code, _virtual, _plain)
    _WITH_SHIFT[_CHARACTERS[_plain]] = _CHARACTERS[_with_shift]
_CHARACTERS["\n"] = _CHARACTERS["\r"] = _NAMED["Return"]
_CHARACTERS["\t"] = _NAMED["Tab"]

_KEYSYM_CHARACTERS = {"space": " ", **{keysym: character for character, keysym in PUNCTUATION.items()}}


def of_keysym(name: str) -> Key | None:
    """The key of an X keysym name, for example "Return", "a", "Control_L" or "period"; None if this layout has none."""
    return _NAMED.get(name) or _CHARACTERS.get(_KEYSYM_CHARACTERS.get(name, name))


def of_character(character: str) -> Key | None:
    """The key that types a character; None when no key of the layout does."""
    return _CHARACTERS.get(character)


def with_shift(key: Key) -> Key:
    """What the key is while Shift is held: "A" for "a", "!" for "1"."""
    return _WITH_SHIFT.get(key, key)


SHIFT_KEY = _NAMED["Shift_L"]
