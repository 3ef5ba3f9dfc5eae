"""The published tasks that run on `guest.py`, and for each feasible one a program that does it (the oracle).

The programs are actions `code` of the world's own action space, so they reach the desktop as any policy's would. Most
write a setting with a command, which no policy would be asked to do by hand: what they show is that set-up, actions and
evaluator work together, not that a policy can use the applications.
"""

from __future__ import annotations

WINDOW = """
import json, os, pathlib, re, subprocess, time
HOME = pathlib.Path.home()
def run(*words):
    return subprocess.run(words, capture_output=True, text=True)
def until(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.3)
    assert condition(), condition
def window(title):
    until(lambda: title in run("wmctrl", "-l").stdout)
def gone(name):
    until(lambda: run("pgrep", name).returncode)
def end(name):
    run("pkill", name)
    gone(name)
"""
"""What comes before every program: it waits for windows and processes, because this machine may be slow."""
_AUTOSAVE = """
window("Impress")
end("soffice.bin")
xcu = HOME / ".config/libreoffice/4/user/registrymodifications.xcu"
prop = '<prop oor:name="{}" oor:op="fuse"><value>{}</value></prop>'
item = '<item oor:path="/org.openoffice.Office.Common/Save/Document">' + prop + '</item>'
items = item.format("AutoSave", "true") + item.format("AutoSaveTimeIntervall", 3)
xcu.write_text(xcu.read_text().replace("</oor:items>", items + "</oor:items>"))
"""
_PANEL = """
run("wmctrl", "-a", "Impress")
pyautogui.press("f10"); time.sleep(0.3)
pyautogui.press("right", presses=2, interval=0.1); time.sleep(0.3)
pyautogui.press("down", presses=11, interval=0.1); pyautogui.press("enter"); time.sleep(2)
"""
_CONDA = """
with (HOME / ".bashrc").open("a") as rc:
    rc.write("# >>> conda initialize >>>\\nexport PATH=$HOME/miniconda3/bin:$PATH\\n# <<< conda initialize <<<\\n")
"""


def _settings(schema: str, key: str, value: str) -> str:
    return f"assert not run('gsettings', 'set', {schema!r}, {key!r}, {value!r}).returncode"


def _vlc(line: str) -> str:
    return f"""
window("VLC")
end("vlc")
with (HOME / ".config/vlc/vlcrc").open("a") as rc:
    rc.write({line + chr(10)!r})
"""


def _gimp(line: str) -> str:
    """GIMP writes its settings when it ends, so it is ended first."""
    return f"""
window("GNU Image Manipulation Program")
time.sleep(2)
pyautogui.hotkey("ctrl", "q")
gone("gimp")
with (HOME / ".config/GIMP/2.10/gimprc").open("a") as rc:
    rc.write({line + chr(10)!r})
"""


def _chrome(change: str, file: str = "Default/Preferences") -> str:
    """`change` changes `found`, the contents of the file in the profile."""
    return f"""
window("Chrom")
profile = HOME / ".config/google-chrome"
until(lambda: (profile / "Default/Preferences").exists())
end("chrome")
path = profile / {file!r}
found = json.loads(path.read_text()) if path.exists() else {{}}
{change}
path.write_text(json.dumps(found))
"""


FEASIBLE: dict[str, str] = {
    "multi_apps/3c8f201a-009d-4bbe-8b65-a6f8b35bb57f": (
        "pyautogui.screenshot().convert('RGB').save(HOME / 'Desktop/compressed.jpeg', quality=80)"
    ),
    "multi_apps/f8369178-fafe-40c2-adc4-b9b08a125456": _settings("org.gnome.desktop.interface", "gtk-theme", "Orchis"),
    "os/28cc3b7e-b194-4bc9-8353-d04c0f4d56d2": "assert not run('pactl', 'set-sink-volume', '0', '100%').returncode",
    "os/3ce045a0-877b-42aa-8d2c-b4a863336ab8": _settings("org.gnome.desktop.interface", "text-scaling-factor", "1.25"),
    "os/a4d98375-215b-4a4d-aee9-3d4370fccc41": _settings("org.gnome.desktop.screensaver", "lock-enabled", "true"),
    "os/bedcedc4-4d72-425e-ad62-21960b11fe0d": _settings("org.gnome.desktop.session", "idle-delay", "0"),
    "os/e0df059f-28a6-4169-924f-b9623e7184cc": (
        "ran = subprocess.run(['sudo', '-S', 'mv', 'Desktop/todo_list_Jan_1', 'Desktop/todo_list_Jan_2'],\n"
        "                     input='password\\n', text=True, cwd=HOME, check=True)"
    ),
    "os/ec4e3f68-9ea4-4c18-a5c9-69f89d1178b3": _settings(
        "org.gnome.shell", "favorite-apps", "['thunderbird.desktop', 'google-chrome.desktop']"
    ),
    "os/f9be0997-4b7c-45c5-b05c-4612b44a6118": _settings("org.gnome.desktop.notifications", "show-banners", "false"),
    "vlc/215dfd39-f493-4bc3-a027-8a97d72c61bf": _vlc("qt-bgcone=0"),
    "vlc/9195653c-f4aa-453d-aa95-787f6ccfaae9": _vlc("qt-max-volume=200"),
    "vlc/a5bbbcd5-b398-4c91-83d4-55e1e31bbb81": _vlc("qt-minimal-view=1"),
    "vlc/d06f0d4d-2cd5-4ede-8de9-598629438c6e": _vlc("qt-slider-colours=0;0;0;20;20;20;40;40;40;60;60;60"),
}
"""By task: the program that does it, after `WINDOW`."""

DRAFTS: dict[str, str] = {
    "chrome/030eeff7-b492-4218-b312-701ec99ee0cc": _chrome("found['enable_do_not_track'] = True"),
    "chrome/2ad9387a-65d8-4e33-ad5b-7580065a27ca": _chrome(
        "folder = {'children': [], 'id': '4', 'name': 'Favorites', 'type': 'folder'}\n"
        "roots = {name: {'children': [], 'id': id, 'name': name, 'type': 'folder'}\n"
        "         for id, name in (('1', 'bookmark_bar'), ('2', 'other'), ('3', 'synced'))}\n"
        "roots['bookmark_bar']['children'].append(folder)\n"
        "found = {'roots': roots, 'version': 1}",
        "Default/Bookmarks",
    ),
    "chrome/2ae9ba84-3a0d-4d4c-8338-3a1478dc5fe3": _chrome("found['profile']['name'] = 'Thomas'"),
    "chrome/480bcfea-d68f-4aaa-a0a9-2589ef319381": _chrome(
        "found.setdefault('browser', {})['enabled_labs_experiments'] = "
        "['chrome-refresh-2023@2', 'chrome-webui-refresh-2023@2']",
        "Local State",
    ),
    "chrome/9656a811-9b5b-4ddf-99c7-5117bcef0626": _chrome("found['safebrowsing'] = {'enabled': True}"),
    "chrome/99146c54-4f37-4ab8-9327-5f3291665e1e": _chrome(
        "found.setdefault('profile', {}).setdefault('default_content_setting_values', {})['cookies'] = 4"
    ),
    "chrome/af630914-714e-4a24-a7bb-f9af687d3b91": _chrome(
        "found.setdefault('webkit', {}).setdefault('webprefs', {})['default_font_size'] = 72"
    ),
    "chrome/bb5e4c0d-f964-439c-97b6-bdb9747de3f4": _chrome(
        "bing = {'short_name': 'Microsoft Bing', 'keyword': 'bing.com', 'prepopulate_id': 3, 'id': '3',\n"
        "        'url': 'https://www.bing.com/search?q={searchTerms}'}\n"
        "found['default_search_provider_data'] = {'template_url_data': bing}"
    ),
    "gimp/7767eef2-56a3-4cea-8c9f-48c070c7d65b": _gimp('(theme "Light")'),
    "gimp/7b7617bd-57cc-468e-9c91-40c4ec2bcb3d": _gimp("(undo-levels 100)"),
    "gimp/d52d6308-ec58-42b7-a2c9-de80e4837b2b": (
        "window('GNU Image Manipulation Program')\ntime.sleep(2)\npyautogui.press('tab')\ntime.sleep(1)"
    ),
    "libreoffice_impress/2cd43775-7085-45d8-89fa-9e35c0a915cf": _AUTOSAVE,
    "libreoffice_impress/ef9d12bd-bcee-4ba0-a40e-918400f43ddf": _PANEL,
    "multi_apps/2373b66a-092d-44cb-bfd7-82e86e7a3b4d": (
        "with (HOME / 'Desktop/System_Resources_Report.txt').open('w') as report:\n"
        "    subprocess.run(['sar', '1', '30'], stdout=report, check=True)"
    ),
    "multi_apps/48d05431-6cd5-4e76-82eb-12b60d823f7d": _CONDA,
    "os/13584542-872b-42d8-b299-866967b5c3ef": (
        "profile = run('gsettings', 'get', 'org.gnome.Terminal.ProfilesList', 'default').stdout.strip().strip(\"'\")\n"
        "path = f'org.gnome.Terminal.Legacy.Profile:/org/gnome/terminal/legacy/profiles:/:{profile}/'\n"
        "for key, value in (('default-size-columns', '132'), ('default-size-rows', '43')):\n"
        "    assert not run('gsettings', 'set', path, key, value).returncode\n"
        "pyautogui.hotkey('ctrl', 'alt', 't')\nwindow('user@')"  # the evaluator gives the next one only a second
    ),
    "vlc/8ba5ae7a-5ae5-4eab-9fcc-5dd4fe3abf89": _vlc("input-record-path=/home/user/Desktop"),
    "vlc/f3977615-2b45-4ac5-8bba-80c17dbe2a37": _vlc("one-instance-when-started-from-file=0"),
}
"""Programs that have not yet been seen to be rewarded three times out of three; run if DART_OSWORLD_DRAFTS is set."""

INFEASIBLE = (
    "chrome/3720f614-37fd-4d04-8a6b-76f54f8c222d", "chrome/93eabf48-6a27-4cb6-b963-7d5fe1e0d3a9",
    "chrome/ae78f875-5b98-4907-bbb5-9c737fc68c03", "gimp/5ca86c6f-f317-49d8-b6a7-b527541caae8",
    "gimp/e19bd559-633b-4b02-940f-d946248f088e", "gimp/fbb548ca-c2a6-4601-9204-e39a2efc507b",
    "multi_apps/6d72aad6-187a-4392-a4c4-ed87269c51cf", "os/4783cc41-c03c-4e1b-89b4-50658f642bd5",
    "os/a462a795-fdc7-4b23-b689-e8b6df786b78", "os/b3d4a89c-53f2-4d6b-8b6a-541fb5d205fa",
    "os/c288e301-e626-4b98-a1ab-159dcb162af5", "os/fe41f596-a71b-4c2f-9b2f-9dcd40b568c3",
    "vlc/5ac2891a-eacd-4954-b339-98abba077adb", "vlc/7882ed6e-bece-4bf0-bada-c32dc1ddae72",
    "vlc/cb130f0d-d36f-4302-9838-b3baf46139b6",
)  # fmt: skip
