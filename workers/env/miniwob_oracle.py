"""How the oracle does the MiniWoB tasks that it knows: `TASKS`."""

from __future__ import annotations

import json
import re

from dart.core.action import TypeText, Wait
from dart.errors import UserError
from dart.workers.env.oracle import On, Plan, Step


def _css(selector: str) -> On:
    return On(f"document.querySelector({json.dumps(selector)})")


def _labelled(selector: str, text: str) -> On:
    """The element of `selector` whose text is `text`."""
    elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
    return On(f"{elements}.find(element => element.textContent.trim() === {json.dumps(text)})")


def _quoted(instruction: str) -> list[str]:
    return re.findall(r'"([^"]*)"', instruction)


def _word(pattern: str, instruction: str) -> str:
    match = re.search(pattern, instruction)
    if match is None:
        raise ValueError(
            f"the instruction {instruction!r} does not match {pattern!r}: is this another version of the task?"
        )
    return match.group(1)


def _click_dialog_2(instruction: str) -> list[Step]:
    label = _quoted(instruction)[0]
    if label == "x":
        return [_css(".ui-dialog-titlebar button")]
    return [_labelled(".ui-dialog-buttonpane button", label)]


def _select(instruction: str) -> list[Step]:
    names = _word(r"^Select (.*) and click Submit", instruction)
    chosen = [] if names == "nothing" else names.split(", ")
    return [*(_labelled("#boxes label", name) for name in chosen), _css("#subbtn")]


def _enter_text(instruction: str) -> list[Step]:
    return [_css("#tt"), TypeText(_quoted(instruction)[0]), _css("#subbtn")]


def _enter_password(instruction: str) -> list[Step]:
    text = TypeText(_quoted(instruction)[0])
    return [_css("#password"), text, _css("#verify"), text, _css("#subbtn")]


def _login_user(instruction: str) -> list[Step]:
    user, password = _quoted(instruction)
    return [_css("#username"), TypeText(user), _css("#password"), TypeText(password), _css("#subbtn")]


def _identify_shape(_: str) -> list[Step]:
    name = """({rect: 'rectangle', circle: 'circle', polygon: 'triangle'}[shape.tagName]
               || (/[0-9]/.test(shape.textContent) ? 'digit' : 'letter'))"""
    find = f"document.querySelector('#area-buttons button[data-type=' + {name} + ']')"
    return [On(f"(shape => {find})(document.querySelector('#area_svg > *'))")]


def _click_shape(instruction: str) -> list[Step]:
    *adjectives, noun = _word(r"^Click on a (.*)$", instruction).split()
    return [On(_SHAPE % (json.dumps(adjectives), json.dumps(noun)))]


# Sizes are 20 and 10 pixels; a letter's size is that of its font.
_SHAPE = """((adjectives, noun) => [...document.querySelectorAll('#area_svg > *')].find(element => {
  const plain = {rect: 'rectangle', circle: 'circle', polygon: 'triangle'}[element.tagName];
  const text = plain || element.textContent;
  const type = plain ? 'shape' : /[0-9]/.test(text) ? 'digit' : 'letter';
  const size = plain ? element.getBBox().height : parseFloat(element.getAttribute('font-size'));
  const is = [element.getAttribute('fill'), size > 15 ? 'large' : 'small'];
  return adjectives.every(word => is.includes(word)) && ['item', type, text].includes(noun);
}))(%s, %s)"""


TASKS: dict[str, Plan] = {
    "click-button": lambda said: [_labelled("#area button", _quoted(said)[0])],
    "click-button-sequence": lambda said: [_css("#subbtn"), _css("#subbtn2")],
    "click-checkboxes": _select,
    # The only wait that UI-TARS has; environment.options.max_wait_seconds shortens it.
    "click-collapsible": lambda said: [_css("#area h3"), Wait(5.0), _css("#subbtn")],
    "click-color": lambda said: [_css("#area [data-color=" + _word(r"on the (\w+)", said) + "]")],
    "click-dialog": lambda said: [_css(".ui-dialog-titlebar button")],
    "click-dialog-2": _click_dialog_2,
    "click-option": _select,
    "click-link": lambda said: [_labelled("#area .alink", _quoted(said)[0])],
    "click-shape": _click_shape,
    "click-tab": lambda said: [_css("#area a[href='#tabs-" + _word(r"#(\d)", said) + "']")],
    "click-test": lambda said: [_css("#subbtn")],
    "click-test-2": lambda said: [_css("#subbtn")],
    "enter-password": _enter_password,
    "enter-text": _enter_text,
    "focus-text": lambda said: [_css("#tt")],
    "focus-text-2": lambda said: [_css("#tt" + _word(r"the (\d)", said))],
    "grid-coordinate": lambda said: [_css("[id='" + _word(r"(\(.*\))", said) + "']")],
    "identify-shape": _identify_shape,
    "login-user": _login_user,
}


def plan(name: str) -> Plan:
    """Raises UserError for a task that the oracle does not know."""
    if name not in TASKS:
        raise UserError(f"the oracle does not know task {name!r}: it knows {', '.join(TASKS)}")
    return TASKS[name]
