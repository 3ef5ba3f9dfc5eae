"""A to-do list that keeps CUA-Gym-Hub's contract, for tests: `python todo_server.py PORT`.

Like the published applications it keeps each session's state in files below the folder that it is started in, fetches
the state when the page opens, fills in what is missing, and sends changes to its server 0.3 s after they were made.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

STATES = Path(".mock-states")
DEFAULT = {"user": "Demo", "todos": [{"id": 1, "text": "Water the plants", "done": False}], "theme": "light"}
PAGE = """<!doctype html><title>To do</title>
<style>body { font: 16px sans-serif } input { caret-color: transparent }
input[type=text] { position: fixed; left: 8px; top: 8px; width: 200px }
ul { position: fixed; left: 8px; top: 40px; margin: 0; padding: 0; list-style: none }</style>
<input type=text placeholder="What to do?"><ul></ul>
<script>
const sid = new URLSearchParams(location.search).get('sid'), box = document.querySelector('[type=text]');
let state, timer;
const draw = () => {
  document.querySelector('ul').replaceChildren(...state.todos.map(todo => {
    const line = document.createElement('li'), tick = document.createElement('input');
    tick.type = 'checkbox';
    tick.checked = todo.done;
    tick.onchange = () => change(() => todo.done = tick.checked);
    line.append(tick, todo.text);
    return line;
  }));
};
const send = () => fetch('/post?sid=' + sid, {method: 'POST', body: JSON.stringify({action: 'set_current', state})});
const change = what => { what(); draw(); clearTimeout(timer); timer = setTimeout(send, 300); };
box.onkeydown = event => {
  if (event.key !== 'Enter' || !box.value) return;
  change(() => state.todos.push({id: state.todos.length + 1, text: box.value, done: false}));
  box.value = '';
};
fetch('/state?sid=' + sid).then(answer => answer.json()).then(found => {
  state = {...DEFAULT, ...found.stored_state};
  draw();
  send();
});
</script>""".replace("DEFAULT", json.dumps(DEFAULT))


class Todo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        route, sid = self._asked()
        if route == "/go":
            initial = _read(sid, "initial") or _read(sid, "current") or DEFAULT
            current = _read(sid, "current") or initial
            changed = {
                name: {"modified" if name in initial else "added": value}
                for name, value in current.items()
                if value != initial.get(name)
            }
            self._answer({"initial_state": initial, "current_state": current, "state_diff": changed})
        elif route == "/state":
            state = _read(sid, "current")
            self._answer({"stored_state": state, "has_custom_state": state is not None, "sid": sid})
        else:
            self._answer(PAGE)

    def do_POST(self) -> None:
        _, sid = self._asked()
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["action"] == "reset":
            for which in ("initial", "current"):
                _file(sid, which).unlink(missing_ok=True)
        else:
            _file(sid, "current").write_text(json.dumps(asked["state"]))
            if asked["action"] == "set" and not _file(sid, "initial").exists():
                _file(sid, "initial").write_text(json.dumps(asked["state"]))
        self._answer({"success": True})

    def _asked(self) -> tuple[str, str]:
        parts = urlsplit(self.path)
        return parts.path, re.sub(r"[^a-zA-Z0-9_-]", "", parse_qs(parts.query).get("sid", [""])[0])

    def _answer(self, what: object) -> None:
        body = (what if isinstance(what, str) else json.dumps(what)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if isinstance(what, str) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


def _file(sid: str, which: str) -> Path:
    return STATES / f"{sid}.{which}.json"


def _read(sid: str, which: str) -> dict[str, object] | None:
    path = _file(sid, which)
    found: dict[str, object] | None = json.loads(path.read_text()) if path.exists() else None
    return found


if __name__ == "__main__":
    STATES.mkdir(exist_ok=True)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Todo).serve_forever()
