"""The prompt templates: the exact characters around instruction, screenshots and sampled turns.

All are ChatML as Qwen-VL reads it. The texts of `ui_tars` and `qwen3_vl` are those with which the models were scored,
to the character: changing a word changes what the model does. The instruction stands in a user turn of its own, so that
it keeps its place when old screenshots slide out; Qwen3-VL's harness has the first screenshot before it, and a list of
actions that are too old to be shown as turns.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import astuple, dataclass

from dart.agent.qwen3_vl import TOOL
from dart.config.policy import INSTRUCTION, NOTE, Agent, PromptTexts, Shown

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
"""An image stands alone between these two."""
LABELS: dict[Shown, str] = {
    "last_action_error": "\nThe last action failed: ",
    "accessibility_tree": "\nAccessibility tree:\n",
}
"""What stands before each text of the environment, in the order in which they follow a screenshot."""


@dataclass(frozen=True, slots=True)
class Template:
    """Instruction between `before_instruction` and `after_instruction`; then per step a screenshot between
    `before_image` and `after_image`, and an assistant turn between `before_turn` and `after_turn`.

    `before_image` ends with VISION_START, `after_image` begins with VISION_END.

    The sampled tokens end with <|im_end|> themselves, so `after_turn` does not have it.
    """

    before_instruction: str
    after_instruction: str
    before_image: str
    after_image: str
    before_turn: str
    after_turn: str


def _conversation(system: str, before_instruction: str, after_instruction: str) -> Template:
    return Template(
        before_instruction=f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{before_instruction}",
        after_instruction=f"{after_instruction}<|im_end|>\n",
        before_image="<|im_start|>user\n<|vision_start|>",
        after_image="<|vision_end|><|im_end|>\n",
        before_turn="<|im_start|>assistant\n",
        after_turn="\n",
    )


_UI_TARS_TASK = r"""You are a GUI agent. You are given a task and your action history, with screenshots. You need to perform the next action to complete the task.{space}

## Output Format
```
Thought: ...
Action: ...
```

## Action Space

click(start_box='<|box_start|>(x1,y1)<|box_end|>')
left_double(start_box='<|box_start|>(x1,y1)<|box_end|>')
right_single(start_box='<|box_start|>(x1,y1)<|box_end|>')
drag(start_box='<|box_start|>(x1,y1)<|box_end|>', end_box='<|box_start|>(x3,y3)<|box_end|>')
hotkey(key='')
type(content='') #If you want to submit your input, use "\n" at the end of `content`.
scroll(start_box='<|box_start|>(x1,y1)<|box_end|>', direction='down or up or right or left')
wait() #Sleep for 5s and take a screenshot to check for any changes.
finished(content='xxx') # Use escape characters \', \", and \n in content part to ensure we can parse the content in normal python string format.


## Note
- Use English in `Thought` part.
- Write a small plan and finally summarize your next action (with its target element) in one sentence in `Thought` part.

## User Instruction
""".replace("{space}", " ")  # noqa: E501 - the published prompt has it, and editors strip it

_QWEN3_VL_SCREEN = """Use a mouse and keyboard to interact with a computer, and take screenshots.
* This is an interface to a desktop GUI. You do not have access to a terminal or applications menu. You must click on desktop icons to start applications.
* Some applications may take time to start or process actions, so you may need to wait and take successive screenshots to see the results of your actions. E.g. if you click on Firefox and a window doesn't open, try wait and taking another screenshot.
* The screen's resolution is 1000x1000.
* Whenever you intend to move the cursor to click on an element like an icon, you should consult a screenshot to determine the coordinates of the element before moving the cursor.
* If you tried clicking on a program or link but it failed to load even after waiting, try adjusting your cursor position so that the tip of the cursor visually falls on the element that you want to click.
* Make sure to click any buttons, links, icons, etc with the cursor tip in the center of the element. Don't click boxes on their edges unless asked."""  # noqa: E501

_QWEN3_VL_ACTIONS = """
* `key`: Performs key down presses on the arguments passed in order, then performs key releases in reverse order.
* `type`: Type a string of text on the keyboard.
* `mouse_move`: Move the cursor to a specified (x, y) pixel coordinate on the screen.
* `left_click`: Click the left mouse button at a specified (x, y) pixel coordinate on the screen.
* `left_click_drag`: Click and drag the cursor to a specified (x, y) pixel coordinate on the screen.
* `right_click`: Click the right mouse button at a specified (x, y) pixel coordinate on the screen.
* `middle_click`: Click the middle mouse button at a specified (x, y) pixel coordinate on the screen.
* `double_click`: Double-click the left mouse button at a specified (x, y) pixel coordinate on the screen.
* `triple_click`: Triple-click the left mouse button at a specified (x, y) pixel coordinate on the screen (simulated as double-click since it's the closest action).
* `scroll`: Performs a scroll of the mouse scroll wheel.
* `hscroll`: Performs a horizontal scroll (mapped to regular scroll).
* `wait`: Wait specified seconds for the change to happen.
* `terminate`: Terminate the current task and report its completion status.
* `answer`: Answer a question.
        """  # noqa: E501
_QWEN3_VL_NAMED = ("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click",
                   "double_click", "scroll", "wait", "terminate")  # fmt: skip
"""The actions that OSWorld's agent lists. It describes three more, which the grammar reads as well."""


def computer_use_tool() -> dict[str, object]:
    """The JSON schema of Qwen3-VL's computer_use tool, as OSWorld's agent writes it."""
    properties = {
        "action": {"description": _QWEN3_VL_ACTIONS, "enum": list(_QWEN3_VL_NAMED), "type": "string"},
        "keys": {"description": "Required only by `action=key`.", "type": "array"},
        "text": {"description": "Required only by `action=type`.", "type": "string"},
        "coordinate": {"description": "The x,y coordinates for mouse actions.", "type": "array"},
        "pixels": {"description": "The amount of scrolling.", "type": "number"},
        "time": {"description": "The seconds to wait.", "type": "number"},
        "status": {"description": "The status of the task.", "type": "string", "enum": ["success", "failure"]},
    }
    return {
        "type": "function",
        "function": {
            "name_for_human": TOOL,
            "name": TOOL,
            "description": _QWEN3_VL_SCREEN,
            "parameters": {"properties": properties, "required": ["action"], "type": "object"},
            "args_format": "Format the arguments as a JSON object.",
        },
    }


_QWEN3_VL_SYSTEM = f"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{json.dumps(computer_use_tool())}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>

# Response format

Response format for every step:
1) Action: a short imperative describing what to do in the UI.
2) A single <tool_call>...</tool_call> block containing only the JSON: {{"name": <function-name>, "arguments": <args-json-object>}}.

Rules:
- Output exactly in the order: Action, <tool_call>.
- Be brief: one sentence for Action.
- Do not output anything else outside those parts.
- If finishing, use action=terminate in the tool call."""  # noqa: E501

_TEXTS = {
    "ui_tars": ("You are a helpful assistant.", _UI_TARS_TASK, "\n"),
    "qwen3_vl": (
        _QWEN3_VL_SYSTEM,
        "Please generate the next move according to the UI screenshot, instruction and previous actions.\n\n"
        "Instruction: ",
        "",
    ),
}
"""The system text, and what stands before and after the instruction."""
TEMPLATES: dict[str, Template] = {
    **{name: _conversation(*texts) for name, texts in _TEXTS.items()},
    # For models trained only on their tasks: no roles, no white space, nothing to learn to ignore.
    "minimal": Template(
        before_instruction="<|im_start|>",
        after_instruction="<|im_end|>",
        before_image="<|im_start|><|vision_start|>",
        after_image="<|vision_end|><|im_end|>",
        before_turn="<|im_start|>",
        after_turn="",
    ),
}


def template_of(agent: Agent) -> Template:
    """The agent's template, with its note."""
    return _made(agent.prompt, agent.template, agent.note)


def digest_of(agent: Agent) -> str:
    """What tells the agent's prompt from others of the same name, of another version of dart for example."""
    texts = "\0".join(astuple(template_of(agent)))
    return hashlib.sha256(texts.encode()).hexdigest()[:12]


@functools.cache
def _made(prompt: str, own: PromptTexts | None, note: str) -> Template:
    if own is None and not note:
        return TEMPLATES[prompt]
    if own is None:
        system, before, after = _TEXTS[prompt]
    else:
        system, (before, after) = own.system, own.user.split(INSTRUCTION)
    if NOTE in system:
        system = system.replace(NOTE, note)
    elif note:
        system = f"{system}\n{note}"
    return _conversation(system, before, after)
