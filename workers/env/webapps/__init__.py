"""CUA-Gym-Hub's offline web applications in the worker's own Chromium: `environment.kind: webapps` (docs/worlds.md).

`tasks` reads CUA-Gym's task bundles, `servers` keeps a process for each application, `programs` runs the tasks' own
programs with limits, `episodes` is one session from its set-up to its reward, `environment` the page that shows it, and
`world` is the world.
"""
