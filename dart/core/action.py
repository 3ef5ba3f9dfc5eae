"""The canonical action: every model's grammar is parsed into it, and every environment carries it out as real input.

Positions are fractions of the observation in [0, 1); key names are X keysyms. The same kinds, with the same names,
are in `proto/dart/v1/action.proto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dart.core.records import unguarded

MouseButton = Literal["left", "middle", "right"]
PressMode = Literal["press", "down", "up"]
FinishStatus = Literal["success", "fail", "infeasible", "call_user"]
SystemKind = Literal["back", "home", "open_app", "open_url", "app_switch", "volume_up", "volume_down"]
MOST_TOGETHER = 16
"""The most actions in one `Several`."""
MOST_HELD_SECONDS = 60.0
"""The longest that an action may hold a button, or a drag may take."""

PUNCTUATION: Mapping[str, str] = {
    "!": "exclam", '"': "quotedbl", "#": "numbersign", "$": "dollar", "%": "percent", "&": "ampersand",
    "'": "apostrophe", "(": "parenleft", ")": "parenright", "*": "asterisk", "+": "plus", ",": "comma", "-": "minus",
    ".": "period", "/": "slash", ":": "colon", ";": "semicolon", "<": "less", "=": "equal", ">": "greater",
    "?": "question", "@": "at", "[": "bracketleft", "\\": "backslash", "]": "bracketright", "^": "asciicircum",
    "_": "underscore", "`": "grave", "{": "braceleft", "|": "bar", "}": "braceright", "~": "asciitilde",
}  # fmt: skip
"""Characters that are neither letters, digits nor a space → X keysyms."""
ROUNDING = 1e-6
"""In pixels: a pixel divided by the width and multiplied by it again may be a trifle less than it was."""


@unguarded
@dataclass(frozen=True, slots=True)
class Point:
    """A position as a fraction of the observation. `x` grows to the right, `y` downwards; both in [0, 1)."""

    x: float
    y: float

    def __post_init__(self) -> None:
        if not (0.0 <= self.x < 1.0 and 0.0 <= self.y < 1.0):
            raise ValueError(f"point ({self.x}, {self.y}) is outside the observation: both must be in [0, 1)")

    def pixels(self, width: int, height: int) -> tuple[float, float]:
        """The position in pixels of an observation of `width` × `height`."""
        return self.x * width, self.y * height


@dataclass(frozen=True, slots=True)
class Move:
    at: Point


@unguarded
@dataclass(frozen=True, slots=True)
class Click:
    """`at` None clicks where the pointer is. `count` 2 is a double click. `modifiers` are held during the click.

    `hold_seconds` is how long the button stays down: a long press. 0 is an ordinary click.
    """

    at: Point | None
    button: MouseButton = "left"
    count: int = 1
    modifiers: tuple[str, ...] = ()
    hold_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Button:
    """Press a mouse button and hold it (`down`), or release it (`up`)."""

    at: Point | None
    button: MouseButton = "left"
    mode: Literal["down", "up"] = "down"


@dataclass(frozen=True, slots=True)
class Drag:
    """Pressed at the first point of `path`, released at the last. A path of one point starts at the pointer.

    `duration_seconds` is the time from press to release; 0 is as fast as the environment can.
    """

    path: tuple[Point, ...]
    button: MouseButton = "left"
    duration_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Scroll:
    """Wheel notches at `at`; positive is right and down."""

    at: Point | None
    dx: int = 0
    dy: int = 0


@dataclass(frozen=True, slots=True)
class Keys:
    """A chord: pressed in this order, released in reverse."""

    keysyms: tuple[str, ...]
    mode: PressMode = "press"


@dataclass(frozen=True, slots=True)
class TypeText:
    text: str


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float


@dataclass(frozen=True, slots=True)
class Observe:
    """Take a new screenshot and do nothing else."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The policy ends the episode. `fail` says that it could not do the task, not that nobody can."""

    status: FinishStatus = "success"
    answer: str = ""

    @property
    def refuses(self) -> bool:
        """Whether it says that the task cannot be done; UI-TARS has only `call_user` for that."""
        return self.status in ("infeasible", "call_user")


@dataclass(frozen=True, slots=True)
class System:
    kind: SystemKind
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    """A program in the environment's own language; an environment that cannot run programs does nothing."""

    language: str
    source: str


Single = Move | Click | Button | Drag | Scroll | Keys | TypeText | Wait | Observe | Finish | System | Code


@dataclass(frozen=True, slots=True)
class Several:
    """Actions of one turn, carried out in order with one observation afterwards. None of them finishes the episode.

    Environments never get it: its actions are sent one by one, until one fails or the episode is over.
    """

    actions: tuple[Single, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.actions) <= MOST_TOGETHER:
            raise ValueError(f"{len(self.actions)} actions together: there must be 1 to {MOST_TOGETHER}")
        if wrong := [one for one in self.actions if isinstance(one, Several | Finish)]:
            raise ValueError(f"{wrong[0]} cannot be one of several actions: only what an environment carries out can")


Action = Single | Several


def pointer_after(action: Action, pointer: Point) -> Point:
    """Where the pointer is after the action: what an action that names no place is about."""
    match action:
        case Move(at=at) | Click(at=at) | Button(at=at) | Scroll(at=at):
            return at or pointer
        case Drag(path=path) if path:
            return path[-1]
        case _:
            return pointer
