"""The world `desktop`: a fresh Xvfb desktop for each episode, with real applications and real input.

`world` is what the env worker sees, `environment` one desktop of it. `session` boots a desktop under a `keeper`, which
ends everything in it; `screen`, `inputs`, `windows` and `tree` look at it and act on it. `tasks` reads the task files,
`setup` prepares a task, `grading` judges it, and `oracle` solves it.
"""
