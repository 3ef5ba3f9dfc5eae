"""OSWorld's tasks on OSWorld's virtual machines: `environment.kind: osworld` (docs/osworld.md).

`machine` is the client of the server inside a virtual machine, `programs` writes actions as the pyautogui programs that
OSWorld's own agents write, `tasks` reads OSWorld's task files, `setup` carries out their set-up steps, `evaluator` runs
OSWorld's own evaluators in an environment of their own, `pools` and `emulators` say where machines come from, and
`world` is the world.
"""
