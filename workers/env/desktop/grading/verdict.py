"""The verdict on an episode, by what the desktop holds: files, documents, the clipboard, windows, the answer."""

from __future__ import annotations

from dart.core.action import Action, Finish
from dart.workers.env.desktop import setup
from dart.workers.env.desktop.grading.checks import CHECKS, Found
from dart.workers.env.desktop.session import Session
from dart.workers.env.desktop.tasks import Getter, TaskFile
from dart.worlds import EnvironmentFailure, Verdict

INFEASIBLE = "infeasible"
MOST_TEXT = 1000


def grade(session: Session, task: TaskFile, last: Action) -> Verdict:
    """1 if the evaluator's checks hold (with `conj` "or": one of them), else 0; the evidence has each of them.

    The check `infeasible` holds if the policy gave up, with any status but `success`, and no other holds then. Raises
    EnvironmentFailure if a result cannot be read.
    """
    gave_up = isinstance(last, Finish) and last.status != "success"
    if task.evaluator.func == INFEASIBLE:
        return Verdict(float(gave_up), {"said_infeasible": gave_up})
    if gave_up:
        return Verdict(0.0, {"gave_up": True})
    setup.carry_out(session, task.evaluator.postconfig)
    evidence: list[dict[str, object]] = []
    for name, result, expected in task.evaluator.checks():
        found = _get(session, result, last) if result else Found()
        try:
            holds, why = CHECKS[name](found, expected.rules if expected else {}), ""
        except (ValueError, OSError) as error:
            holds, why = False, str(error)
        evidence.append({"check": name, "holds": holds, "why": why, "found": _shown(found)})
    held = [bool(one["holds"]) for one in evidence]
    passed = all(held) if task.evaluator.conj == "and" else any(held)
    return Verdict(float(passed), {"checks": evidence})


def _get(session: Session, getter: Getter, last: Action) -> Found:
    match getter.type:
        case "vm_file":
            return Found(file=setup.place(session, str(getter.path)))
        case "list_directory":
            folder = setup.place(session, str(getter.path))
            names = [one.name for one in folder.iterdir() if not one.name.startswith(".")] if folder.is_dir() else []
            return Found("\n".join(sorted(names)))
        case "vm_command_line":
            command = setup.Execute(command=getter.command or (), shell=getter.shell)
            code, said = session.output(setup.words(command), setup.COMMAND_SECONDS)
            if code == 127:
                raise EnvironmentFailure(f"{getter.command} could not be run")
            return Found(said)
        case "clipboard":
            return Found(session.windows.clipboard())
        case "window_titles":
            return Found("\n".join(window.title for window in session.windows.all()))
        case "answer":
            return Found(last.answer if isinstance(last, Finish) else "")
        case "rule":
            return Found(str(getter.rules.get("expected", "")))


def _shown(found: Found) -> str:
    if found.file is None:
        return found.text[:MOST_TEXT]
    return f"{found.file.name}: {'there' if found.file.exists() else 'missing'}"
