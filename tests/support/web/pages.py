"""Pages that do something when a person does something on them, and what is right then."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import html
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from dart.core import action as a

SCREEN = (160, 210)
RED, GREEN = (255, 0, 0), (0, 255, 0)
MIDDLE = a.Point(0.5, 0.5)
CLICK, DOWN, RETURN = a.Click(MIDDLE), a.Keys(("Down",)), a.Keys(("Return",))
DRAG = a.Drag((a.Point(0.1, 0.1), a.Point(0.8, 0.8)))
DONE = "<body style='background:rgb(0,255,0)'>"
FULL = "position:fixed;inset:0;width:160px;height:210px"
SELECT = f"<select id=s style='{FULL};display:block!important'><option>a<option>b</select>"
DRAGGED = """<div draggable=true style='width:50px;height:50px'>d</div>
<div style='position:fixed;left:80px;top:100px;width:80px;height:110px'>e</div><script>seen = [];
for (const type of ['dragstart', 'dragover', 'drop', 'dragend', 'mouseup']) addEventListener(type, event => {
  if (type === 'CANCELS') event.preventDefault();
  if (seen.at(-1) !== type) seen.push(type);
})</script>"""


TARGET = DRAGGED.replace("CANCELS", "dragover")
WRITTEN = TARGET.replace("</", "<\\/")
"""TARGET in a script of a page."""


def clicked(script: str) -> str:
    return (
        f"<body style='background:rgb(255,0,0);margin:0;height:100vh'><script>onclick = event => {{{script}}}</script>"
    )


def red(body: str) -> str:
    return clicked("") + body


@dataclass(frozen=True)
class Case:
    """A page, what is done on it, and then: a value, and the colour of what is shown, if they are known."""

    name: str
    page: str
    actions: tuple[a.Action, ...] = (CLICK,)
    value: tuple[str, object] | None = None
    colour: tuple[int, int, int] | None = None

    def and_then(self, body: str) -> Case:
        return replace(self, page=self.page + body)

    def gives(self, expression: str, value: object) -> Case:
        return replace(self, value=(expression, value))


def goes(name: str, script: str, colour: tuple[int, int, int] | None = GREEN, *more: a.Action) -> Case:
    return Case(name, clicked(script), (CLICK, *more), None, colour)


HELD = "<iframe id=hold hidden></iframe><script>hold.contentDocument.open()</script>"
"""The page is loaded when hold.contentDocument is closed."""
SERVED = """<script>navigator.serviceWorker.oncontrollerchange = () => hold.contentDocument.close();
navigator.serviceWorker.register('/worker.js')</script>"""
TOLD = "[Intl.DateTimeFormat().resolvedOptions().timeZone, new Date(0).getHours(), navigator.language]"
TALL = "<div style='height:2000px;background:linear-gradient(red,blue)'></div>"


def frame(body: str) -> str:
    return f"<iframe id=f style='{FULL};border:0' srcdoc=\"{html.escape(body)}\"></iframe>"


def nested(body: str, depth: int) -> str:
    return nested(f"<body style='margin:0'>{frame(body)}", depth - 1) if depth else body


LATER = "document.body.style.background = 'rgb(0,255,0)'"
CASES = (
    goes("a link", "location = '/done'"),
    goes("a link to a server that takes 0.3 s", "location = '/done?0.3'"),
    goes("a link to a server that takes 20 s", "location = '/done?20'", RED),
    goes("a link to a page whose style sheet takes 0.3 s", "location = '/style?0.3'"),
    goes("a link to a page whose style sheet never comes", "location = '/style?60'", RED),
    goes("a link to a page whose first script never comes", "location = '/script?60'", RED),
    goes("a link to a page whose picture never comes", "location = '/picture?60'"),
    goes("a link followed a moment later", "setTimeout(() => location = '/done?0.2')"),
    goes("a link to a page that goes on to another", "location = '/hop'"),
    goes("a request for what is shown", f"fetch('/done?0.2').then(() => {LATER})"),
    goes("two requests, one after the other", f"fetch('/done?0.1').then(() => fetch('/done?0.1')).then(() => {LATER})"),
    goes("a request that is never answered", "fetch('/done?60')", RED),
    goes("an XMLHttpRequest", f"x = new XMLHttpRequest(); x.open('GET', '/done'); x.onload = () => {LATER}; x.send()"),
    goes("leaving is not confirmed by the page", "onbeforeunload = e => e.preventDefault(); location = '/done'"),
    goes("an error page of the browser", "location = 'http://127.0.0.1:1/'", None),
    goes("a new window", "open('/done')"),
    goes("a new window that the page writes", "open('').document.write(`<body style='background:rgb(0,255,0)'>`)"),
    goes("a new window closed by Ctrl+W", "open('/done')", RED, a.Keys(("Control_L", "w"))),
    goes("a new window closed by the page", "w = open('/done'); setTimeout(() => w.close(), 200)", RED, a.Wait(0.6)),
    goes("a new window closed at once", "open('/done').close()", RED),
    goes("a new window that closes itself", "open('/close')", RED, a.Wait(0.3)),
    goes("thirty new windows", "for (let i = 0; i < 30; i++) open('/done')", None),
    goes("a view transition", f"document.startViewTransition(() => {LATER})", GREEN, a.Wait(0.6)),
    goes("full screen", "document.body.requestFullscreen()", None, a.Observe()),
    goes("the pointer locked", "document.body.requestPointerLock()", RED, CLICK),
    goes("printing", "print()", RED),
    goes("a page of a service worker", "location = '/served'").and_then(HELD + SERVED),
    goes("a request that a service worker answers", f"fetch('/served').then(r => r.ok && ({LATER}))").and_then(
        HELD + SERVED),
    goes("a frame removed while it loads", f"""f = document.createElement('iframe'); f.src = '/done?20';
         document.body.append(f); setTimeout(() => {{ f.remove(); {LATER} }}, 100)"""),
    goes("a transition that ends", f"document.body.style.transition = 'background .3s'; {LATER}", GREEN, a.Wait(0.8)),
    goes("an animation that ends", f"""document.body.animate([{{backgroundColor: 'red'}}, {{backgroundColor: 'blue'}}],
         300).onfinish = () => {LATER}""", GREEN, a.Wait(0.8)),
    goes("something new every 50 ms", f"let n = 0; setInterval(() => {{ if (++n === 3) {LATER} }}, 50)", GREEN,
         a.Wait(0.6)),
    goes("the address changed by the page", f"history.pushState(0, '', '/else'); {LATER}").gives(
        "location.pathname", "/else"),
    goes("back within the page", f"onpopstate = () => {LATER}; history.pushState(0, '', '/else'); history.back()"
         ).gives("location.pathname", "/"),
    goes("back to the page before", "location = '/back'", RED, CLICK).gives("location.pathname", "/"),
    goes("a place in the page", f"onhashchange = () => {LATER}; location = '#there'").gives("location.hash", "#there"),
    goes("a page that refreshes to another", "location = '/refresh'"),
    goes("five redirections", "location = '/redirect?5'").gives("location.pathname", "/done"),
    goes("a link without an answer", "n = (self.n ?? 0) + 1; location = '/empty'", RED, CLICK).gives(
        "[n, location.pathname]", [2, "/"]),
    goes("a page that is not found", "location = '/missing'"),
    goes("a page of a server's failure", "location = '/failure'"),
    goes("a download that the page begins", "location = '/file'", RED).gives("location.pathname", "/"),
    goes("about:blank in a new window, written later", """w = open('about:blank');
         setTimeout(() => w.document.write(`<body style='background:rgb(0,255,0)'>`))"""),
    goes("a new window that does not know its opener", "open('/done', '', 'noopener')"),
    goes("a page that writes itself anew", "document.write(`<body style='background:rgb(0,255,0)'>`)"),
    goes("a page that writes itself anew to its end",
         "document.write(`<body style='background:rgb(0,255,0)'>`); document.close()"),
    goes("a select that the page writes anew", f"document.write(`{SELECT}`); document.close()", None, CLICK, DOWN,
         RETURN).gives("s.value", "b"),
    goes("a drop on what the page writes anew", f"document.write(`{WRITTEN}`); document.close()", None, DRAG).gives(
         "seen", ["dragstart", "dragover", "drop", "dragend"]),
    goes("a page without a body", "document.body.remove(); document.documentElement.style.background = 'rgb(0,255,0)'"),
    goes("fifty thousand elements", f"""document.body.append(...Array.from({{length: 50000}}, (_, i) => {{
         const p = document.createElement('p'); p.textContent = i; return p }})); {LATER}""").gives(
         "document.querySelectorAll('p').length", 50000),
    goes("a worker's language and time zone", LATER).and_then(f"""{HELD}<script>
         new Worker(URL.createObjectURL(new Blob([`postMessage({TOLD})`]))).onmessage = event => {{
         said = event.data; hold.contentDocument.close() }}</script>""").gives("said", ["UTC", 0, "en-US"]),
    goes("frames without end", f"(f = () => {{ {LATER}; requestAnimationFrame(f) }})()"),
    goes("a document that grows without end", "(f = () => { document.body.append('x'); setTimeout(f) })()", None),
    Case("a form", red(f"<form method=post action='/done?0.2'><button style='{FULL}'>"), colour=GREEN),
    Case("a download", red(f"<a href='/file' style='{FULL}'>d</a>"), value=("location.pathname", "/"), colour=RED),
    Case("a link in a new tab", red(f"<a target=_blank href='/done' style='{FULL}'>t</a>"), colour=GREEN),
    Case("a file chooser", red(f"<input type=file style='{FULL}'>"), (CLICK, CLICK)),
    Case("a select", red(SELECT), (CLICK, DOWN, RETURN), ("s.value", "b")),
    Case(
        "a select in a frame",
        red(f"<iframe id=f style='{FULL};border:0' srcdoc=\"{SELECT}\"></iframe>"),
        (CLICK, DOWN, RETURN),
        ("f.contentDocument.getElementById('s').value", "b"),
    ),
    *(
        Case(
            f"a select in a shadow root that is {mode}",
            red(f"<div id=h></div><script>r = h.attachShadow({{mode: '{mode}'}}); r.innerHTML = `{SELECT}`</script>"),
            (CLICK, DOWN, RETURN),
            ("r.querySelector('select').value", "b"),
        )
        for mode in ("open", "closed")
    ),
    Case("a date", red(f"<input id=s type=date style='{FULL}'>"), (a.Click(a.Point(0.95, 0.5)), DOWN, RETURN)),
    Case("a drop", red(TARGET), (DRAG,),
         ("seen", ["dragstart", "dragover", "drop", "dragend"])),
    Case("a drop where nothing may be dropped", red(DRAGGED), (DRAG, CLICK),
         ("seen", ["dragstart", "dragover", "dragend", "mouseup"])),
    Case("a drag that the page cancels", red(DRAGGED.replace("CANCELS", "dragstart")), (DRAG,),
         ("seen", ["dragstart", "mouseup"])),
    *(
        Case(f"a frame of another origin at {host}{path}",
         red(f"<iframe style='{FULL};border:0' src='http://{host}:OTHER{path}'>"
             "</iframe><script>onmessage = event => said = event.data</script>"), actions, ("said", said), colour)
        for host in ("127.0.0.1", "localhost")
        for path, actions, said, colour in [("/inside", (CLICK,), "clicked", GREEN),
                                            ("/select", (CLICK, DOWN, RETURN), "b", None)]
    ),
    Case("a frame in a frame, five deep", red(nested(clicked(f"top.said = 1; {LATER}"), 5)), (CLICK,),
         ("said", 1), GREEN),
    Case("a select in a frame, five deep",
         red(nested(SELECT.replace("<select", "<select onchange='top.said = value'"), 5)), (CLICK, DOWN, RETURN),
         ("said", "b")),
    Case("a frame that a press removes",
         red(frame(f"<script>onmousedown = () => {{ parent.{LATER}; frameElement.remove() }}</script>")), colour=GREEN),
    Case("a select in a shadow root in a frame", red(frame(f"""<div id=h></div><script>
         r = h.attachShadow({{mode: 'closed'}}); r.innerHTML = `{SELECT}`</script>""")), (CLICK, DOWN, RETURN),
         ("f.contentWindow.r.querySelector('select').value", "b")),
    Case("a drop in a frame", red(frame(TARGET)), (DRAG,),
         ("f.contentWindow.eval('seen')", ["dragstart", "dragover", "drop", "dragend"])),
    Case("an element whose text is edited", red(f"<div id=b contenteditable style='{FULL}'></div>"),
         (CLICK, a.TypeText("it's é\nß")), ("b.innerText", "it's é\nß")),
    Case("a double click",
         red(f"<p style='{FULL};font:100px serif'>word</p><script>n = 0; ondblclick = () => n++</script>"),
         (a.Click(a.Point(0.3, 0.3), count=2),), ("[n, getSelection().toString()]", [1, "word"])),
    Case("a middle click", red("<script>seen = []; onauxclick = e => seen.push(e.button)</script>"),
         (a.Click(MIDDLE, "middle"),), ("seen", [1])),
    Case("a menu that opens under the pointer", red(f"""<style>
         #m {{ display: none }} #h:hover #m {{ display: block }}</style>
         <div id=h style='{FULL};height:30px'>menu<div id=m style='{FULL};top:20px;height:190px' onclick="{LATER}">
         </div></div>"""), (a.Move(a.Point(0.5, 0.05)), CLICK, a.Move(a.Point(0.5, 0.05))), colour=GREEN),
    Case("a scroll in an element that scrolls", red(f"<div id=n style='{FULL};overflow:auto'>{TALL}</div>{TALL}"),
         (a.Scroll(MIDDLE, 0, 3),), ("[n.scrollTop, scrollY]", [159, 0])),
    Case("a scroll in a frame", red(frame(TALL) + TALL), (a.Scroll(MIDDLE, 0, 3),),
         ("[f.contentWindow.scrollY, scrollY]", [159, 0])),
    Case("a drawing", red(f"""<canvas id=c width=160 height=210 style='{FULL}'></canvas><script>c.onclick = () => {{
         const t = c.getContext('2d'); t.fillStyle = 'rgb(0,255,0)'; t.fillRect(0, 0, 160, 210) }}</script>"""),
         colour=GREEN),
    Case("a film that is not there",
         clicked("n = 1; v.play().catch(() => 0)") + f"<video id=v controls style='{FULL}'></video>",
         value=("[n, v.readyState]", [1, 0])),
    Case("a dialog of the page's own", clicked("if (!d.open) d.showModal()")
         + "<style>dialog::backdrop { background: rgb(0,255,0) }</style><dialog id=d>d</dialog>",
         value=("d.open", True), colour=GREEN),
    Case("a dialog of the page's own, closed by Escape", clicked("d.showModal()") + "<dialog id=d>d</dialog>",
         (CLICK, a.Keys(("Escape",))), ("d.open", False), RED),
    Case("a popover", red(f"""<button popovertarget=p style='{FULL}'></button>
         <div id=p popover style='{FULL};border:0;background:rgb(0,255,0)'></div>"""), colour=GREEN),
    Case("what is copied and pasted", red(f"""<textarea id=t style='{FULL}'></textarea><script>seen = [];
         document.oncopy = e => {{ e.clipboardData.setData('text/plain', 'B'); e.preventDefault(); seen.push('copy') }};
         document.onpaste = e => seen.push(e.clipboardData.getData('text/plain'))</script>"""),
         (CLICK, a.TypeText("a"), a.Keys(("Control_L", "a")), a.Keys(("Control_L", "c")), a.Keys(("End",)),
          a.Keys(("Control_L", "v"))), ("[t.value, ...seen]", ["aB", "copy", "B"])),
    Case("several files", red(f"<input id=s type=file multiple style='{FULL}' oncancel='said = 1'>"),
         (CLICK, CLICK), ("s.files.length", 0)),
    Case("a file chooser that the page opens",
         clicked("n = (self.n ?? 0) + 1; s.showPicker()") + "<input id=s type=file hidden>",
         (CLICK, CLICK), ("[n, s.files.length]", [2, 0])),
    Case("objects that all have more", red(f"""<script>Object.prototype.toJSON = () => 'no'; Array.prototype.map = null;
         for (const name of ['then', 'type', 'value', 'id', 'get']) Object.prototype[name] = name</script>{SELECT}"""),
         (CLICK, DOWN, RETURN), ("s.value", "b")),
    Case("a frame's language and time zone", red(frame("")), value=(
         f"f.contentWindow.eval('{TOLD}')", ["UTC", 0, "en-US"])),
    Case("dialogs", clicked("said = [prompt('name', 'Ada'), confirm('sure?'), alert('!') ?? 0]"),
         value=("said", ["Ada", True, 0])),
    Case("functions of the browser that the page has replaced", clicked("done = 1") + """<script>
         for (const name of ['setTimeout', 'requestAnimationFrame', 'Promise', 'JSON', 'Array']) window[name] = null;
         document.querySelectorAll = addEventListener = null</script>""", value=("done", 1)),
    Case("the run's language and time zone", red(""), value=(
         "[Intl.DateTimeFormat().resolvedOptions().timeZone, new Date(0).getHours(), navigator.language]",
         ["UTC", 0, "en-US"])),
)  # fmt: skip
ANSWERS = {
    "/done": DONE,
    "/style": f"<link rel=stylesheet href='/x.css?DELAY'>{DONE}",
    "/script": f"<head><script src='/x.js?DELAY'></script></head>{DONE}",
    "/picture": f"{DONE}<img src='/x.png?DELAY'>",
    "/hop": "<script>location = '/done?0.2'</script>",
    "/back": clicked("history.back()"),
    "/close": "<script>close()</script>",
    "/refresh": "<meta http-equiv=refresh content='0;url=/done'>",
    "/missing": DONE,
    "/failure": DONE,
    "/inside": clicked(f"parent.postMessage('clicked', '*'); {LATER}"),
    "/select": SELECT.replace("<select", "<select onchange=\"parent.postMessage(value, '*')\""),
    "/worker.js": f"""oninstall = () => skipWaiting(); onactivate = event => event.waitUntil(clients.claim());
        onfetch = event => event.request.url.endsWith('/served') && event.respondWith(
        new Response(`{DONE}`, {{headers: {{'Content-Type': 'text/html'}}}}))""",
}
STATUS = {"/empty": 204, "/missing": 404, "/failure": 500, "/redirect": 302}
KINDS = {"css": "text/css", "js": "text/javascript"}
AT_ONCE = ("/", "/style", "/script", "/picture", "/redirect")
"""Where the number is not a delay, or is that of what belongs to the page."""


async def answer(other: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        target = (await reader.readline()).decode().split()[1]
        while (await reader.readline()).strip():
            pass
        path, _, number = target.partition("?")
        page = CASES[int(number)].page if path == "/" else ANSWERS.get(path, "").replace("DELAY", number)
        body = page.replace("OTHER", str(other)).encode()
        if path not in AT_ONCE:
            await asyncio.sleep(float(number or 0))
        head = [
            f"HTTP/1.1 {STATUS.get(path, 200)} so",
            f"Content-Type: {KINDS.get(path.partition('.')[2], 'text/html')}",
        ]
        if path == "/file":
            head.append("Content-Disposition: attachment")
        if path == "/redirect":
            head.append(f"Location: {'/done' if number == '1' else f'/redirect?{int(number) - 1}'}")
        head += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        writer.write("\r\n".join(head).encode() + body)
        await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """The address of a server of the pages: number N is at /?N. Another origin, for frames, is served as well."""
    other = await asyncio.start_server(functools.partial(answer, 0), "127.0.0.1", 0)
    made = await asyncio.start_server(functools.partial(answer, _port(other)), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{_port(made)}"
    finally:
        other.close()
        made.close()


def _port(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])
