from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MouseButton(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MOUSE_BUTTON_UNSPECIFIED: _ClassVar[MouseButton]
    MOUSE_BUTTON_LEFT: _ClassVar[MouseButton]
    MOUSE_BUTTON_MIDDLE: _ClassVar[MouseButton]
    MOUSE_BUTTON_RIGHT: _ClassVar[MouseButton]

class PressMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRESS_MODE_UNSPECIFIED: _ClassVar[PressMode]
    PRESS_MODE_PRESS: _ClassVar[PressMode]
    PRESS_MODE_DOWN: _ClassVar[PressMode]
    PRESS_MODE_UP: _ClassVar[PressMode]

class FinishStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_STATUS_UNSPECIFIED: _ClassVar[FinishStatus]
    FINISH_STATUS_SUCCESS: _ClassVar[FinishStatus]
    FINISH_STATUS_FAIL: _ClassVar[FinishStatus]
    FINISH_STATUS_INFEASIBLE: _ClassVar[FinishStatus]
    FINISH_STATUS_CALL_USER: _ClassVar[FinishStatus]

class SystemKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SYSTEM_KIND_UNSPECIFIED: _ClassVar[SystemKind]
    SYSTEM_KIND_BACK: _ClassVar[SystemKind]
    SYSTEM_KIND_HOME: _ClassVar[SystemKind]
    SYSTEM_KIND_OPEN_APP: _ClassVar[SystemKind]
    SYSTEM_KIND_OPEN_URL: _ClassVar[SystemKind]
    SYSTEM_KIND_APP_SWITCH: _ClassVar[SystemKind]
    SYSTEM_KIND_VOLUME_UP: _ClassVar[SystemKind]
    SYSTEM_KIND_VOLUME_DOWN: _ClassVar[SystemKind]
MOUSE_BUTTON_UNSPECIFIED: MouseButton
MOUSE_BUTTON_LEFT: MouseButton
MOUSE_BUTTON_MIDDLE: MouseButton
MOUSE_BUTTON_RIGHT: MouseButton
PRESS_MODE_UNSPECIFIED: PressMode
PRESS_MODE_PRESS: PressMode
PRESS_MODE_DOWN: PressMode
PRESS_MODE_UP: PressMode
FINISH_STATUS_UNSPECIFIED: FinishStatus
FINISH_STATUS_SUCCESS: FinishStatus
FINISH_STATUS_FAIL: FinishStatus
FINISH_STATUS_INFEASIBLE: FinishStatus
FINISH_STATUS_CALL_USER: FinishStatus
SYSTEM_KIND_UNSPECIFIED: SystemKind
SYSTEM_KIND_BACK: SystemKind
SYSTEM_KIND_HOME: SystemKind
SYSTEM_KIND_OPEN_APP: SystemKind
SYSTEM_KIND_OPEN_URL: SystemKind
SYSTEM_KIND_APP_SWITCH: SystemKind
SYSTEM_KIND_VOLUME_UP: SystemKind
SYSTEM_KIND_VOLUME_DOWN: SystemKind

class Point(_message.Message):
    __slots__ = ("x", "y")
    X_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    x: float
    y: float
    def __init__(self, x: _Optional[float] = ..., y: _Optional[float] = ...) -> None: ...

class Action(_message.Message):
    __slots__ = ("move", "click", "button", "drag", "scroll", "keys", "type_text", "wait", "observe", "finish", "system", "code", "several")
    MOVE_FIELD_NUMBER: _ClassVar[int]
    CLICK_FIELD_NUMBER: _ClassVar[int]
    BUTTON_FIELD_NUMBER: _ClassVar[int]
    DRAG_FIELD_NUMBER: _ClassVar[int]
    SCROLL_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TYPE_TEXT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    SEVERAL_FIELD_NUMBER: _ClassVar[int]
    move: Move
    click: Click
    button: Button
    drag: Drag
    scroll: Scroll
    keys: Keys
    type_text: TypeText
    wait: Wait
    observe: Observe
    finish: Finish
    system: System
    code: Code
    several: Several
    def __init__(self, move: _Optional[_Union[Move, _Mapping]] = ..., click: _Optional[_Union[Click, _Mapping]] = ..., button: _Optional[_Union[Button, _Mapping]] = ..., drag: _Optional[_Union[Drag, _Mapping]] = ..., scroll: _Optional[_Union[Scroll, _Mapping]] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., type_text: _Optional[_Union[TypeText, _Mapping]] = ..., wait: _Optional[_Union[Wait, _Mapping]] = ..., observe: _Optional[_Union[Observe, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., system: _Optional[_Union[System, _Mapping]] = ..., code: _Optional[_Union[Code, _Mapping]] = ..., several: _Optional[_Union[Several, _Mapping]] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("at",)
    AT_FIELD_NUMBER: _ClassVar[int]
    at: Point
    def __init__(self, at: _Optional[_Union[Point, _Mapping]] = ...) -> None: ...

class Click(_message.Message):
    __slots__ = ("at", "button", "count", "modifiers", "hold_seconds")
    AT_FIELD_NUMBER: _ClassVar[int]
    BUTTON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MODIFIERS_FIELD_NUMBER: _ClassVar[int]
    HOLD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    at: Point
    button: MouseButton
    count: int
    modifiers: _containers.RepeatedScalarFieldContainer[str]
    hold_seconds: float
    def __init__(self, at: _Optional[_Union[Point, _Mapping]] = ..., button: _Optional[_Union[MouseButton, str]] = ..., count: _Optional[int] = ..., modifiers: _Optional[_Iterable[str]] = ..., hold_seconds: _Optional[float] = ...) -> None: ...

class Button(_message.Message):
    __slots__ = ("at", "button", "mode")
    AT_FIELD_NUMBER: _ClassVar[int]
    BUTTON_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    at: Point
    button: MouseButton
    mode: PressMode
    def __init__(self, at: _Optional[_Union[Point, _Mapping]] = ..., button: _Optional[_Union[MouseButton, str]] = ..., mode: _Optional[_Union[PressMode, str]] = ...) -> None: ...

class Drag(_message.Message):
    __slots__ = ("path", "button", "duration_seconds")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BUTTON_FIELD_NUMBER: _ClassVar[int]
    DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    path: _containers.RepeatedCompositeFieldContainer[Point]
    button: MouseButton
    duration_seconds: float
    def __init__(self, path: _Optional[_Iterable[_Union[Point, _Mapping]]] = ..., button: _Optional[_Union[MouseButton, str]] = ..., duration_seconds: _Optional[float] = ...) -> None: ...

class Scroll(_message.Message):
    __slots__ = ("at", "dx_notches", "dy_notches")
    AT_FIELD_NUMBER: _ClassVar[int]
    DX_NOTCHES_FIELD_NUMBER: _ClassVar[int]
    DY_NOTCHES_FIELD_NUMBER: _ClassVar[int]
    at: Point
    dx_notches: int
    dy_notches: int
    def __init__(self, at: _Optional[_Union[Point, _Mapping]] = ..., dx_notches: _Optional[int] = ..., dy_notches: _Optional[int] = ...) -> None: ...

class Keys(_message.Message):
    __slots__ = ("keysyms", "mode")
    KEYSYMS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    keysyms: _containers.RepeatedScalarFieldContainer[str]
    mode: PressMode
    def __init__(self, keysyms: _Optional[_Iterable[str]] = ..., mode: _Optional[_Union[PressMode, str]] = ...) -> None: ...

class TypeText(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class Observe(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Finish(_message.Message):
    __slots__ = ("status", "answer")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    status: FinishStatus
    answer: str
    def __init__(self, status: _Optional[_Union[FinishStatus, str]] = ..., answer: _Optional[str] = ...) -> None: ...

class System(_message.Message):
    __slots__ = ("kind", "argument")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ARGUMENT_FIELD_NUMBER: _ClassVar[int]
    kind: SystemKind
    argument: str
    def __init__(self, kind: _Optional[_Union[SystemKind, str]] = ..., argument: _Optional[str] = ...) -> None: ...

class Code(_message.Message):
    __slots__ = ("language", "source")
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    language: str
    source: str
    def __init__(self, language: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class Several(_message.Message):
    __slots__ = ("actions",)
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    actions: _containers.RepeatedCompositeFieldContainer[Action]
    def __init__(self, actions: _Optional[_Iterable[_Union[Action, _Mapping]]] = ...) -> None: ...
